# SPDX-License-Identifier: Apache-2.0
"""Ranks and their bands: right for draws of the posterior, and not for others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sbc import bands, report, run
from benchmarks.sbc.models import MODELS
from pyro_implicit.density import Target


def test_bands_hold_as_often_as_they_say():
    rng = np.random.default_rng(1)
    ranks = rng.integers(20, size=(400, 50))
    inside = np.mean([bands.p_value(one, 19) > 0.1 for one in ranks])
    assert inside == pytest.approx(0.9, abs=0.04)
    low, high = bands.band(50, 19)
    assert (low < 0).all() and (high > 0).all()


@pytest.mark.parametrize("fault", ["shifted", "narrow", "wide"])
def test_bands_see_faults(fault):
    ranks = np.arange(200) % 20
    ranks = {"shifted": ranks // 2, "narrow": 19 * (ranks > 9), "wide": 6 + ranks % 8}[fault]
    assert bands.p_value(ranks, 19) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_models_have_statistics(name):
    truth, y = run.simulate(MODELS[name], seed=0)
    again, _ = run.simulate(MODELS[name], seed=0)
    assert all(truth[key].equal(again[key]) for key in truth)
    density = Target(MODELS[name], y)
    draws = {key: value.unsqueeze(0) for key, value in truth.items()}
    found = run.statistics(density, draws)
    assert density.init_loc.dtype == torch.float64
    assert len(found) == sum(value.numel() for value in truth.values()) + 1
    assert all(value.isfinite().all() for value in found.values())


def test_table_and_picture(tmp_path):
    rng = np.random.default_rng(0)
    records = [
        {"model": "normal", "method": "fit", "seed": seed, "how": "guide",
         "ranks": {"mean": int(rng.integers(100)), "scale": int(rng.integers(30))}}
        for seed in range(40)
    ]  # fmt: skip
    assert "| normal | fit | 40 | 1 of 2 | scale" in report.table(records)
    report.picture(records, tmp_path / "sbc.png")
    assert (tmp_path / "sbc.png").stat().st_size > 5000


def test_truth_and_fit_have_streams_of_their_own():
    seeds = [seed for number in range(50) for seed in run.streams(number)]
    assert len(set(seeds)) == 100


@pytest.mark.parametrize("method", run.METHODS)
def test_draws_do_not_repeat_the_truth(method, monkeypatch):
    seen = []

    def simulate(model, seed):
        seen.append(seed)
        return {"x": torch.zeros(())}, torch.zeros(())

    def by_method(model, y, seed):
        seen.append(seed)
        return {"x": torch.zeros(2)}, "guide"

    monkeypatch.setattr(run, "simulate", simulate)
    monkeypatch.setattr(run, f"by_{method}", by_method)
    monkeypatch.setattr(run, "Target", lambda *args: None)
    monkeypatch.setattr(run, "statistics", lambda density, draws: draws)
    run.run(next(iter(MODELS)), method, seed=3)
    assert seen == list(run.streams(3))
