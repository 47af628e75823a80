# SPDX-License-Identifier: Apache-2.0
"""The runner on a small Gaussian posterior: every method, resuming, failures, the time limit."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

from benchmarks.common import read_records
from benchmarks.posteriordb import methods, metrics, run
from benchmarks.posteriordb.start import find_mode, good_start
from pyro_implicit.density.target import Target

pytestmark = pytest.mark.usefixtures("double")

X = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]).double().T
Y = 1000 * torch.tensor([1.0, 2.4, 3.0, 4.6, 4.9, 6.1]).double()
PRECISION = X.T @ X / 50**2
LOC = torch.linalg.solve(PRECISION, X.T @ Y / 50**2)
FLAT = dist.ImproperUniform(constraints.real_vector, (), (2,))


def line(x: Tensor, y: Tensor) -> None:
    """A straight line with noise of sd 50 and a flat prior."""
    beta = pyro.sample("beta", FLAT)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(torch.linalg.vecdot(x, beta[..., None, :]), 50.0), obs=y)


@dataclass
class Stub:
    """What the runner asks of a posterior."""

    model: Any = line
    args: tuple = (X, Y)

    def reference(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(2000, 2, generator=generator, dtype=torch.float64)
        factor = torch.linalg.cholesky(torch.linalg.inv(PRECISION))
        return {"beta": LOC + noise @ factor.T}

    def unconstrain(self, draws: dict[str, Tensor]) -> Tensor:
        return draws["beta"]


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.data, "NAMES", ("line", "other_line"))
    monkeypatch.setattr(run.data, "EXTRA", ())
    monkeypatch.setattr(run.data, "load", lambda name, data_dir: Stub())


def call(out: Path, *words: str) -> list[dict]:
    command = ["--data-dir", ".", "--out", str(out), "--steps", "5", *words]
    run.main(run.parser().parse_args(command))
    return read_records(out)


NO_BASELINES = ("best Gaussian", "NUTS", "implicit", "loop")
BASELINES = [name for name in methods.METHODS if name not in NO_BASELINES]


@pytest.mark.parametrize("method", BASELINES)
def test_baselines_start_at_the_mode(method: str) -> None:
    draws, info = methods.seeded(method, Stub(), 0, methods.Budget(steps=3, draws=500))
    assert draws["beta"].shape == (500, 2)
    assert info["start_is_mode"]
    assert math.isfinite(info["elbo"]) and info["ms_per_step"] > 0
    width = 200 if method == "AutoLaplaceApproximation" else 2
    torch.testing.assert_close(draws["beta"].mean(0), LOC, rtol=0, atol=width / 2)
    again, _ = methods.seeded(method, Stub(), 0, methods.Budget(steps=3, draws=500))
    other, _ = methods.seeded(method, Stub(), 1, methods.Budget(steps=3, draws=500))
    assert torch.equal(draws["beta"], again["beta"])
    assert not torch.equal(draws["beta"], other["beta"])


def test_laplace_of_a_gaussian_is_exact(tmp_path: Path) -> None:
    names = ["--posteriors", "line", "--methods", "AutoLaplaceApproximation"]
    (record,) = call(tmp_path / "out.jsonl", *names)
    assert record["ratio"] < 1.2
    assert record["ratio"] == record["distance"] / record["floor"]
    assert record["mean_error"] < 0.05
    assert 0.97 < record["sd_ratio_min"] <= record["sd_ratio_max"] < 1.03
    assert record["dim"] == 2 and record["budget"]["steps"] == 5
    reference = run.reference_of(Stub())
    assert record["floor"] == metrics.floor(reference)
    assert record["nuts_floor"] == metrics.floor(reference, 1000)
    assert {"seconds", "cpu_seconds", "commit", "torch", "start_seconds"} <= record.keys()


def test_nuts() -> None:
    budget = methods.Budget(nuts_warmup=60, nuts_draws=100)
    draws, info = methods.seeded("NUTS", Stub(), 0, budget)
    assert draws["beta"].shape == (100, 2)
    assert info["divergences"] == 0 and info["acceptance_rate"] > 0.5
    sd = torch.linalg.inv(PRECISION).diagonal().sqrt()
    assert ((draws["beta"].mean(0) - LOC).abs() < 0.6 * sd).all()


def test_runs_are_not_repeated(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    one = ["--posteriors", "line", "--methods", "AutoNormal", "--seeds"]
    assert len(call(out, *one, "3")) == 1
    before = out.read_text()
    assert len(call(out, *one, "3")) == 1
    assert out.read_text() == before
    records = call(out, "--methods", "AutoNormal", "--seeds", "3", "5")
    keys = [(record["posterior"], record["seed"]) for record in records]
    assert keys == [("line", 3), ("line", 5), ("other_line", 3), ("other_line", 5)]
    assert out.read_text().startswith(before)


def failing(error: BaseException) -> methods.Method:
    def method(posterior: Any, seed: int, budget: methods.Budget) -> Any:
        raise error

    return method


def test_a_failed_run_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(methods.METHODS, "implicit", failing(RuntimeError("lost")))
    out = tmp_path / "out.jsonl"
    words = ["--posteriors", "line", "--methods", "implicit", "AutoNormal"]
    first, second = call(out, *words)
    assert first["error"] == "RuntimeError: lost"
    assert "ratio" not in first and first["seconds"] >= 0
    assert "error" not in second
    assert len(call(out, *words)) == 2


def test_draws_that_are_not_finite_are_a_failure(tmp_path, monkeypatch) -> None:
    broken = {"beta": torch.full((10, 2), math.inf)}
    monkeypatch.setitem(methods.METHODS, "implicit", lambda *_: (broken, {"note": 1}))
    words = ["--posteriors", "line", "--methods", "implicit"]
    (record,) = call(tmp_path / "out.jsonl", *words)
    assert record["error"].startswith("ValueError: 10 of 10 draws are not finite")
    assert record["note"] == 1 and "distance" not in record


def test_time_limit(tmp_path, monkeypatch) -> None:
    """It passes through code that tries things and catches what goes wrong."""

    def stubborn(*_: Any) -> Any:
        try:
            time.sleep(5)
        except Exception:
            time.sleep(5)

    monkeypatch.setitem(methods.METHODS, "implicit", stubborn)
    words = ["--posteriors", "line", "--methods", "implicit", "--time-limit", "0.2"]
    (record,) = call(tmp_path / "out.jsonl", *words)
    assert record["error"] == "TimeLimit: more than 0.2 s"
    assert 0.2 <= record["seconds"] < 2
    time.sleep(0.3)  # no alarm is left behind
    json.dumps(record)


def test_interrupts_are_not_recorded(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(methods.METHODS, "implicit", failing(KeyboardInterrupt()))
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        call(out, "--posteriors", "line", "--methods", "implicit")
    assert not out.exists()


def test_the_mode_of_a_gamma() -> None:
    """Of log s it is log(a / b), the Jacobian included."""

    def model() -> None:
        pyro.sample("s", dist.Gamma(3.0, 0.01))
        pyro.sample("x", dist.Normal(1e5, 1e3))

    density = Target(model)
    mode = find_mode(density, torch.zeros(2))
    assert mode is not None
    torch.testing.assert_close(mode, torch.tensor([math.log(300.0), 1e5]), rtol=1e-6, atol=0.02)


def test_a_funnel_has_no_mode() -> None:
    def model() -> None:
        v = pyro.sample("v", dist.Normal(0.0, 100.0))
        pyro.sample("x", dist.Normal(torch.zeros(9), torch.exp(v / 2)).to_event(1))

    density = Target(model, init_loc_fn=lambda site: torch.ones(site["fn"].shape()))
    assert find_mode(density, torch.zeros(10)) is None
    loc, is_mode = good_start(density)
    assert not is_mode
    assert torch.equal(loc, torch.zeros(10))  # of higher density than the ones


def test_the_better_of_two_modes() -> None:
    mixture = dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.2, 0.8])), dist.Normal(torch.tensor([-5.0, 5.0]), 1.0)
    )

    def model() -> None:
        x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        pyro.factor("density", mixture.log_prob(x))

    for start in (-4.0, 4.0):
        density = Target(model, init_loc_fn=lambda site, start=start: torch.tensor(start))
        loc, is_mode = good_start(density)
        assert is_mode
        assert find_mode(density, torch.tensor([start])).item() == pytest.approx(
            math.copysign(5, start), abs=0.02
        )
    assert loc.item() == pytest.approx(5, abs=0.02)
