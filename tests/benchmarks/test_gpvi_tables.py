# SPDX-License-Identifier: Apache-2.0
"""The GPVI tables: exact posteriors and moments against independent sums, and a tiny run."""

from __future__ import annotations

import math
from pathlib import Path

import pyro
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

from benchmarks import gpvi_tables
from pyro_implicit import AutoImplicit, AutoSemiImplicit


def test_relative_error_by_hand() -> None:
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = torch.tensor([[3.0, 1.0], [2.0, 2.0]])
    # differences 1, 2 and -2: a norm of 3, over one of 5
    assert gpvi_tables.relative_error(found, exact) == pytest.approx(0.6)
    assert gpvi_tables.relative_error(torch.tensor([3.0, 5.0]), exact.diag()) == pytest.approx(0.2)
    assert gpvi_tables.relative_error(torch.zeros(2, 2), exact) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["gaussian2", "gaussian5", "regression"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_exact_posterior_is_the_models(name, seed) -> None:
    """A log-density with this gradient and Hessian is that of the Gaussian."""
    problem = gpvi_tables.PROBLEMS[name](seed)

    def log_density(x: Tensor) -> Tensor:
        return poutine.trace(poutine.condition(problem.model, {"x": x})).get_trace().log_prob_sum()

    x = problem.mean + 0.1
    hessian = torch.autograd.functional.hessian(log_density, x)
    gradient = torch.autograd.functional.jacobian(log_density, x)
    identity = torch.eye(len(x))
    torch.testing.assert_close(-hessian @ problem.covariance, identity, atol=2e-3, rtol=0)
    step = problem.covariance @ gradient
    torch.testing.assert_close(step, problem.mean - x, atol=2e-3, rtol=0)


def test_the_data_are_the_papers() -> None:
    posterior_means = torch.stack([gpvi_tables.regression(seed).mean for seed in range(50)])
    assert posterior_means.shape == (50, 3)
    assert posterior_means.mean() == pytest.approx(5.5, abs=0.1)
    # sd 1 / sqrt(12) of the coefficients and about 0.1 of the posterior
    assert posterior_means.std() == pytest.approx(math.hypot(12**-0.5, 0.1), abs=0.05)
    variances = [gpvi_tables.regression(seed).covariance.diag().mean() for seed in range(20)]
    assert sum(variances) / 20 == pytest.approx(1 / 96, rel=0.1)
    traces = [gpvi_tables.gaussian(5, seed).covariance.trace() for seed in range(100)]
    assert sum(traces) / 100 == pytest.approx(25, rel=0.1)


class Parabola(nn.Module):
    """(1 + 2 z1, z1² + z2³), of mean (1, 1) and variances 4 and 2 + 15."""

    noise_dim = 2

    def forward(self, noise: Tensor) -> Tensor:
        first, second = noise.unbind(-1)
        return torch.stack([1 + 2 * first, first.square() + second**3], -1)


def test_moments_of_a_guide() -> None:
    problem = gpvi_tables.gaussian(2, 0)
    pyro.clear_param_store()
    guide = AutoImplicit(problem.model, Parabola())
    guide()
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([1.0, -1.0]))
        guide.scale = torch.tensor([0.5, 3.0])
    mean, covariance = gpvi_tables.guide_moments(guide)
    expected = torch.tensor([[1.0, 0.0], [0.0, 17 * 9.0]], dtype=torch.float64)
    torch.testing.assert_close(mean, torch.tensor([1.5, 2.0], dtype=torch.float64))
    torch.testing.assert_close(covariance, expected, atol=1e-4, rtol=1e-6)


def test_moments_of_a_semi_implicit_guide() -> None:
    problem = gpvi_tables.gaussian(2, 0)
    pyro.clear_param_store()
    linear = nn.Linear(2, 2)
    guide = AutoSemiImplicit(problem.model, linear, noise_dim=2, noise_scale=0.5, frame=None)
    guide()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        guide.scale = torch.tensor([1.0, 2.0])
    _, covariance = gpvi_tables.guide_moments(guide)
    expected = torch.tensor([[5.25, 12.0], [12.0, 37.0]], dtype=torch.float64)
    torch.testing.assert_close(covariance, expected, atol=1e-5, rtol=0)
    draws = guide.sample_posterior(200_000)["x"]
    torch.testing.assert_close(torch.cov(draws.T).double(), expected, atol=0, rtol=0.03)


def call(out: Path, *words: str) -> list[dict]:
    tiny = ["--out", str(out), "--steps", "2", "--particles", "12", "--seeds", "1"]
    gpvi_tables.main(gpvi_tables.parser().parse_args([*tiny, *words]))
    return gpvi_tables.read_records(out)


def test_all_methods(no_search, tmp_path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    records = call(out, "--tables", "regression")
    assert [record["method"] for record in records] == list(gpvi_tables.METHODS)
    for record in records:
        assert "error" not in record
        for field in ("mean_error", "covariance_error", "cpu_seconds"):
            assert math.isfinite(record[field])
        assert {"commit", "torch", "pyro", "threads"} <= record.keys()
    assert records[-1]["method"] == "exact draws"
    assert records[-1]["mean_error"] < 0.05
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 1 + len(records)
    assert ".128 ± .04" in text


def test_exact_fit_in_few_steps() -> None:
    """A wrong model, guide or error would show here."""
    args = gpvi_tables.parser().parse_args(["--steps", "500", "--particles", "20"])
    result = gpvi_tables.run({"table": "regression", "method": "InjectiveELBO", "seed": 1}, args)
    assert max(result["mean_error"], result["covariance_error"]) < 1e-3


def test_runs_are_not_repeated(tmp_path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--tables", "gaussian2", "--methods", "exact draws"]
    assert len(call(out, *words)) == 1
    assert len(call(out, *words)) == 1
    assert len(call(out, *words, "--seeds", "2")) == 2
    records = call(out, *words, "--particles", "30")
    assert [record["seed"] for record in records] == [0, 1, 0]
    assert "mean_error" not in records[0]
    before = out.read_text()
    call(out, "--report")
    assert out.read_text() == before


def test_a_failed_run_is_recorded(tmp_path, monkeypatch) -> None:
    def diverge(*args):
        raise ValueError("lost")

    monkeypatch.setitem(gpvi_tables.METHODS, "KIVI", diverge)
    out = tmp_path / "out.jsonl"
    (record,) = call(out, "--tables", "gaussian5", "--methods", "KIVI")
    assert record["error"] == "ValueError: lost"
    rows = out.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("| KIVI") and line.endswith("| 1 |") for line in rows)


def test_spread() -> None:
    assert gpvi_tables.spread([0.1, 0.2, 0.3]) == "0.2 ± 0.1"
    assert gpvi_tables.spread([0.1234]) == "0.12"
    assert gpvi_tables.spread([]) == ""
