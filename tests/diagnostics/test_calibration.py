# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of fits that are right, too narrow, too wide and shifted."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch.distributions import constraints

from pyro_implicit.diagnostics.calibration import rank, simulation_based_calibration

pytestmark = pytest.mark.usefixtures("double")


def model(y):
    x = pyro.sample("x", dist.Normal(torch.tensor([1.0, -2.0]), 3.0).to_event(1))
    pyro.deterministic("twice", 2 * x)
    with pyro.plate("data", len(y)):
        first = pyro.deterministic("first", x[0].expand(len(y)))
        loc = torch.stack([first, x[1].expand(len(y))], -1)
        pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)


def exact(scale: float = 1.0, shift: float = 0.0, num_samples: int = 99):
    """Fits the model above in closed form."""

    def fit(conditioned):
        trace = poutine.trace(conditioned).get_trace()
        y = trace.nodes["y"]["value"]
        precision = torch.tensor(1 / 9 + len(y))
        mean = (y.sum(0) + torch.tensor([1.0, -2.0]) / 9) / precision
        noise = scale * torch.randn(num_samples, 2) + torch.tensor([shift, 0.0])
        return {"x": mean + noise / precision.sqrt()}

    return fit


DATA = torch.full((5, 2), 100.0)  # only its shape counts


def test_the_posterior_is_calibrated():
    found = simulation_based_calibration(model, exact(), DATA, num_simulations=200)
    assert found.is_calibrated and found.failures == ()
    assert found.ranks["x"].shape == (200, 2) and list(found.ranks) == ["x"]
    assert found.counts["x"].sum(0).tolist() == [200, 200]
    assert "Verdict: uniform" in str(found)


def test_a_fit_that_resets_the_seed_gets_new_truths():
    seen = []

    def fit(conditioned):
        pyro.set_rng_seed(0)
        seen.append(poutine.trace(conditioned).get_trace().nodes["y"]["value"].sum().item())
        return exact()(conditioned)

    simulation_based_calibration(model, fit, DATA, num_simulations=20, num_bins=4)
    assert len(set(seen)) == 20


@pytest.mark.parametrize(
    ("scale", "shift", "word"),
    [(0.6, 0.0, "too narrow"), (1.8, 0.0, "too wide"), (1.0, 0.8, "too high")],
)
def test_wrong_fits_are_found(scale, shift, word):
    found = simulation_based_calibration(model, exact(scale, shift), DATA, num_simulations=200)
    assert found.failures[:1] == ("x[0]",) or "x[0]" in found.failures
    assert not found.is_calibrated
    (line,) = (line for line in str(found).splitlines() if "x[0]" in line)
    assert line.endswith(word)
    assert ("x[1]" in found.failures) == (scale != 1)


def test_p_values_are_those_of_chi_square():
    """Ranks with bins of different sizes: 10 ranks in 3 bins of 4, 3 and 3."""
    from scipy.stats import chisquare

    found = simulation_based_calibration(
        model, exact(num_samples=9), DATA, num_simulations=50, num_samples=9, num_bins=3
    )
    for j in range(2):
        ranks = found.ranks["x"][:, j]
        counts = [int(((ranks >= a) & (ranks < b)).sum()) for a, b in ((0, 4), (4, 7), (7, 10))]
        assert found.counts["x"][:, j].tolist() == counts
        expected = chisquare(counts, [20, 15, 15]).pvalue
        assert found.p_values["x"][j].item() == pytest.approx(expected, rel=1e-6)


def test_ranks():
    draws = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])
    assert rank(torch.tensor([2.5, 0.0]), draws).tolist() == [2, 0]
    ties = torch.stack([rank(torch.tensor(1.0), torch.ones(3)) for _ in range(400)])
    assert torch.bincount(ties).min() > 60  # each of 0, 1, 2, 3


def test_guides_and_their_parameters():
    """A guide is drawn from; no simulation sees another one's parameters."""
    pyro.param("mine", torch.tensor(1.0))
    seen = []

    def fit(conditioned):
        seen.append(set(pyro.get_param_store()))
        guide = AutoNormal(conditioned)
        guide()
        pyro.param("theirs", torch.tensor(1.0))
        return guide

    found = simulation_based_calibration(model, fit, DATA, num_simulations=10, num_bins=2)
    assert found.ranks["x"].shape == (10, 2)
    assert seen == [set()] * 10 and "theirs" not in pyro.get_param_store()
    assert "mine" in pyro.get_param_store()


def test_model_keywords_of_our_names():
    def counted(num_samples):
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([num_samples]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(0.0))

    found = simulation_based_calibration(
        counted, AutoNormal, num_simulations=10, num_bins=2, model_kwargs={"num_samples": 3}
    )
    assert found.ranks["x"].shape == (10, 3) and found.num_samples == 99


def test_more_draws_are_thinned():
    found = simulation_based_calibration(
        model, exact(num_samples=250), DATA, num_simulations=50, num_samples=19, num_bins=5
    )
    assert found.ranks["x"].max() <= 19


def refused(model, match: str, fit=None, **options):
    with pytest.raises(ValueError, match=match):
        simulation_based_calibration(model, fit or exact(), DATA, **options)


def test_refusals():
    def flat(y):
        x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), (2,)))
        pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y[0])

    refused(flat, r"prior of site 'x' \(ImproperUniform\) is flat.*Cure: a proper prior")

    def factor(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("weight", -x)

    refused(factor, "factor 'weight' weighs latents.*Cure")
    refused(lambda y: pyro.sample("x", dist.Normal(0.0, 1.0)), "no observed sites")
    refused(lambda y: pyro.sample("y", dist.Normal(0.0, 1.0), obs=y), "no latents")
    refused(model, "no draws of site 'x', only of .'z'.*Cure", lambda m: {"z": torch.ones(99)})
    refused(model, r"of shape \(50, 2\). Cure: .* \(99 or more, \*\(2,\)\)", exact(num_samples=50))
    refused(model, "num_bins must be from 2 to 4", num_simulations=20)


def exact_fit(conditioned):
    y = pyro.poutine.trace(conditioned).get_trace().nodes["y"]["value"]
    return {"x": y / 2 + 0.5**0.5 * torch.randn(20)}


def normal_model(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def ranks_by(executor):
    pyro.set_rng_seed(3)
    result = simulation_based_calibration(
        normal_model, exact_fit, torch.tensor(0.0), num_simulations=100, num_samples=9,
        executor=executor,
    )  # fmt: skip
    assert result.is_calibrated and len(result.ranks["x"].unique()) == 10
    return result.ranks["x"]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_executor_runs_the_fits(kind):
    def run():
        if kind == "threads":
            executor = ThreadPoolExecutor(2)
        else:
            executor = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        with executor:
            return ranks_by(executor)

    assert run().equal(run())  # whatever the order of the threads
    assert run().equal(ranks_by(None))


def test_a_dask_cluster_runs_the_fits(monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # its processes import this file
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.Client(**options) as client:
        executor = client.get_executor()
        assert os.getpid() not in {*executor.map(_process, range(2))}
        assert ranks_by(executor).equal(ranks_by(executor))


def _process(_):
    return os.getpid()


def test_subsampled_models_are_refused():
    def subsampled(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=2) as index:
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[index])

    with pytest.raises(ValueError, match="a simulation needs all data, but plate 'data' of site"):
        simulation_based_calibration(subsampled, exact(), torch.zeros(5), num_simulations=50)
