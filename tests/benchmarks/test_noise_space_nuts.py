# SPDX-License-Identifier: Apache-2.0
"""The benchmark of NUTS over noise: its statistics by hand, and the script with tiny arguments."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import noise_space_nuts


def reference(tmp_path, number):
    """Store reference draws that are standard normal (tau log-normal)."""
    names = [f"theta[{school}]" for school in range(1, 9)] + ["mu", "tau"]
    draws = np.random.default_rng(0).normal(size=(number, 10)).astype(np.float32)
    draws[:, 9] = np.exp(draws[:, 9])
    folder = tmp_path / "posteriordb"
    folder.mkdir()
    np.savez(folder / "eight_schools-eight_schools_centered.npz", draws=draws, names=names)
    return tmp_path


def some_draws(num_draws):
    return {
        "mu": torch.randn(num_draws),
        "log tau": torch.randn(num_draws),
        "theta": torch.randn(num_draws, 8),
    }


def test_effective_sample_sizes_name_the_worst_coordinate():
    draws = some_draws(4000)
    independent = noise_space_nuts.chain_statistics(draws)
    assert 3000 < independent["ess_bulk"] <= independent["ess_bulk_log_tau"] < 5500
    assert independent["r_hat"] == pytest.approx(1.0, abs=5e-3)
    # An autoregression of 0.8 has (1 - 0.8) / (1 + 0.8) of the draws.
    chain, noise = draws["theta"].clone(), torch.randn(4000)
    for step in range(1, 4000):
        chain[step, 3] = 0.8 * chain[step - 1, 3] + 0.6 * noise[step]
    slow = noise_space_nuts.chain_statistics(draws | {"theta": chain})
    assert slow["ess_bulk"] == pytest.approx(4000 / 9, rel=0.25)
    assert slow["ess_bulk_log_tau"] == independent["ess_bulk_log_tau"]


def test_errors_against_the_reference(tmp_path):
    data_dir = reference(tmp_path, 4000)
    draws = some_draws(4000)
    draws["theta"][:, 5] += 0.7
    draws["log tau"] *= 0.5
    found = noise_space_nuts.errors(draws, data_dir)
    assert found["mean_error"] == pytest.approx(0.7, abs=0.08)
    assert found["sd_ratio_log_tau"] == pytest.approx(0.5, abs=0.03)
    assert found["sw2"] > 3 * found["sw2_floor"]
    assert noise_space_nuts.errors(draws, None) == {}


def test_ratios():
    line = {"ess_bulk": 300.0, "gradients": 6000}
    line |= {"sampling_cpu_seconds": 20.0, "training_cpu_seconds": 40.0}
    found = noise_space_nuts.derived(line)
    assert found["per_gradient"] == 50.0
    assert found["per_second"] == 15.0 and found["per_second_trained"] == 5.0


def test_script(no_search, tmp_path, capsys, monkeypatch):
    data_dir = reference(tmp_path, 200)
    short = partial(noise_space_nuts.NUTS, max_tree_depth=2)
    monkeypatch.setattr(noise_space_nuts, "NUTS", short)
    out = tmp_path / "out.jsonl"
    methods = ["NUTS", "noise space, gated"]
    words = "--seeds 1 --steps 2 --particles 4 --draws 4 --warmup 2 --methods".split()
    arguments = [*words, *methods, "--data-dir", str(data_dir), "--out", str(out)]
    noise_space_nuts.main(arguments)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == methods
    for line in lines:
        assert line["gradients"] >= 6 and line["ess_bulk"] > 0 and math.isfinite(line["sw2"])
        assert (line["training_cpu_seconds"] > 1e-3) == (not line["method"].startswith("NUTS"))
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out
    noise_space_nuts.main(arguments)  # nothing is left to do
    assert len(out.read_text().splitlines()) == len(lines)
