# SPDX-License-Identifier: Apache-2.0
"""A few random models, and what the checks see when the library is broken."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fuzz import checks, run
from benchmarks.fuzz.grammar import draw_model
from benchmarks.fuzz.models import with_data
from pyro_implicit.density import Target
from pyro_implicit.mcmc.spaces.conditional_reparam import _Scalar


@pytest.mark.parametrize("seed", range(100, 106))
def test_random_models(seed, no_search):
    draft = with_data(draw_model(seed))
    for name in ("density", "conditional") + ("elbos",) * (seed % 3 == 0):
        outcome, message = run.check(draft, name)
        assert outcome not in run.FAULTS, f"{name}: {message}\n{draft}"


def test_a_wrong_gradient_is_seen(monkeypatch):
    score = Target.score

    def wrong(self, latent):
        log_prob, gradient = score(self, latent)
        return log_prob, 1.001 * gradient

    monkeypatch.setattr(Target, "score", wrong)
    draft = with_data(draw_model(2))
    outcome, message = run.check(draft, "density")
    assert outcome == "WRONG" and message.startswith("gradient")
    assert len(run.smallest(draft, "density", "WRONG").sites) == 1


def test_a_wrong_map_is_seen(monkeypatch):
    to_value = _Scalar.to_value

    def wrong(self, noise):
        value, log_density, log_det = to_value(self, noise)
        return value, log_density + 0.001 * torch.ones_like(noise), log_det

    monkeypatch.setattr(_Scalar, "to_value", wrong)
    drafts = (with_data(draw_model(seed)) for seed in range(40))
    assert any(run.check(draft, "conditional")[0] == "WRONG" for draft in drafts)


def test_an_error_that_names_no_site_is_a_crash(monkeypatch):
    def fails(_):
        raise ValueError("something")

    monkeypatch.setitem(checks.CHECKS, "density", fails)
    assert run.check(with_data(draw_model(2)), "density")[0] == "crash"


def test_the_report_counts():
    records = [{"check": "density", "outcome": "right"}] * 2
    assert "| density | 2 | 2 |" in run.report(records)
