# SPDX-License-Identifier: Apache-2.0
"""One posterior before and after, and the counts of the table."""

from __future__ import annotations

import json

import pyro
import pyro.distributions as dist
import pytest
import torch

from benchmarks import refine_posteriordb as script
from benchmarks.posteriordb import data


class Normal:
    """A posterior whose reference is exact."""

    args = ()

    @staticmethod
    def model() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    @staticmethod
    def reference():
        return {"x": torch.randn(10_000, 2, generator=torch.Generator().manual_seed(0))}

    @staticmethod
    def unconstrain(draws):
        return draws["x"]


def test_a_start_and_what_refine_adds(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "load", lambda name, folder: Normal())
    monkeypatch.setattr(script, "STEPS", 2)
    words = ["--posteriors", "arK-arK", "--starts", "mean field", "--chains", "64"]
    words += ["--max-gradients", "300", "--out", str(tmp_path / "out.jsonl")]
    args = script.parser().parse_args(words)
    script.run_all(args)
    script.run_all(args)
    (record,) = [json.loads(line) for line in args.out.read_text().splitlines()]
    assert record["dim"] == 2
    assert record["before"]["sd_ratio_max"] < 0.2  # two steps from AutoNormal's 0.1
    assert record["after"]["sd_ratio_min"] > 0.9


def test_counts_by_hand(tmp_path):
    moments = {"mean_error": 0.1, "sd_ratio_min": 0.9, "sd_ratio_max": 1.1}
    common = {"start": "fit", "num_gradients": 9, "stopped": "converged"}
    common |= {"guide_seconds": 1.0, "refine_seconds": 2.0}
    out = tmp_path / "out.jsonl"
    records = [
        common
        | {"posterior": "a", "before": moments | {"ratio": 2.0}}
        | {"after": moments | {"ratio": ratio}}
        for ratio in (1.5, 1.6)
    ]
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "From fit, ratio at most 1.5: 0 before and 1 after of 2." in script.report(out)


@pytest.mark.parametrize("name", script.NAMES)
def test_names_are_known(name):
    assert name in data.NAMES
