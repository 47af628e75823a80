# SPDX-License-Identifier: Apache-2.0
"""Functions with ``seed=``: reproducible with a seed, on the caller's streams without one."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal

from pyro_implicit import compare, diagnose, refine, simulation_based_calibration
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.fitting import (
    Fit,
    Schedule,
    fit_simulator,
    log_evidence,
    posterior_as_prior,
    train,
)
from pyro_implicit.fitting.policy import SimulatorPolicy
from pyro_implicit.mcmc import AutoConditional, conditional_reparams, teach, warm_start
from pyro_implicit.runtime.global_state import seeded, stream_positions
from tests.test_public_api import public_api

Y = torch.tensor([1.0, 2.0, 1.5])
QUIET = {"progress": False}


def model(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def normal_guide():
    with seeded(0):
        guide = AutoNormal(model)
        guide(Y)
    return guide


def result():
    return Fit(guide=normal_guide(), source=(model, (Y,), {}))


def calibrated(conditioned):
    y = pyro.poutine.trace(conditioned).get_trace().nodes["y"]["value"]
    return {"x": y.sum() / 4 + 0.5 * torch.randn(9)}


def calibrate(**seed):
    options = {"num_simulations": 10, "num_samples": 9, "num_bins": 2}
    return simulation_based_calibration(model, calibrated, Y, **options, **seed).ranks["x"]


def simulator(y=None):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    return pyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.fixture(scope="module")
def simulated():
    policy = SimulatorPolicy(num_networks=1, num_steps=5, least_simulations=50)
    return fit_simulator(simulator, Y[0], num_simulations=50, seed=0, policy=policy, **QUIET)


def trained(**seed):
    with pyro.get_param_store().scope():
        guide = normal_guide()
        train(model, guide, Trace_ELBO(2), Y, schedule=Schedule(num_steps=3), **QUIET, **seed)
        return guide.median(Y)["x"].detach()


def taught(**seed):
    with pyro.get_param_store().scope():
        guide = AutoLowRankMultivariateNormal(model, rank=1)  # Adam, not the moments
        with seeded(0):
            guide(Y)
        draws = {"x": torch.linspace(3.0, 5.0, 100)}
        teach(guide, draws, Y, num_steps=3, batch_size=10, **QUIET, **seed)
        return guide.loc.detach()


def groups(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("y", dist.StudentT(3.0, x, 1.0), obs=y)  # its curvature depends on the draws


def with_moments(**seed):
    """The start of the noise is a median of draws from the prior, to which the gain refers."""
    with pyro.get_param_store().scope():
        with seeded(0):
            guide = AutoConditional(groups, conditional_reparams(groups, AutoNormal(groups), Y))
            draws = {"scale": torch.rand(100) + 1.0, "x": torch.randn(100, 3)}
        return guide.take_moments(draws, Y, **seed).before


CALLS = {
    "diagnose": lambda **seed: (
        diagnose(
            model,
            result().guide,
            Y,
            num_samples=100,
            num_transitions=0,
            modes=None,
            **QUIET,
            **seed,
        ).bound.value
    ),
    "compare": lambda **seed: (
        compare(model, result().guide, {"x": torch.linspace(-1, 2, 100)}, Y, **seed).floor_ratio
    ),
    "simulation_based_calibration": calibrate,
    "Fit.diagnose": lambda **seed: (
        (
            result().diagnose(num_samples=100, num_transitions=0, modes=None, **QUIET, **seed)
        ).bound.value
    ),
    "Fit.compare": lambda **seed: (
        result().compare({"x": torch.linspace(-1, 2, 100)}, **seed).floor_ratio
    ),
    "Fit.sample": lambda **seed: result().sample(5, Y, **seed)["x"],
    "Fit.draws_by_chain": lambda **seed: result().draws_by_chain(20, **seed)["x"],
    "Fit.check_prior_predictive": lambda **seed: str(
        result().check_prior_predictive(num_samples=100, **seed)
    ),
    "Fit.check_posterior_predictive": lambda **seed: str(
        result().check_posterior_predictive(num_samples=100, **seed)
    ),
    "Fit.sensitivity": lambda **seed: result().sensitivity(**seed).prior,
    "Fit.to_datatree": lambda **seed: result().to_datatree(5, **seed).posterior["x"].values,
    "Fit.summary": lambda **seed: result().summary(50, **seed)["mean"].item(),
    "log_evidence": lambda **seed: log_evidence(result(), **seed).value,
    "train": trained,
    "teach": taught,
    "warm_start": lambda **seed: warm_start(model, normal_guide(), 2, Y, **seed)["x"],
    "conditional_reparams": lambda **seed: (
        conditional_reparams(groups, AutoNormal(groups), Y, **seed)["x"].precision
    ),
    "AutoConditional.take_moments": with_moments,
    "posterior_as_prior": lambda **seed: (
        posterior_as_prior(normal_guide(), model, Y, **seed).density.mean
    ),
}


def check(call):
    values = []
    for start in (1, 2):
        torch.manual_seed(start)
        before = stream_positions()
        values.append(call(seed=3))
        assert stream_positions() == before
        call()
        assert stream_positions() != before
    assert np.array_equal(*values)


@pytest.mark.parametrize("name", CALLS)
def test_a_seed_gives_equal_results_and_leaves_the_streams(name, monkeypatch):
    evidence = importlib.import_module("pyro_implicit.fitting.log_evidence")  # not the function
    monkeypatch.setattr(evidence, "DECISIONS", replace(DECISIONS, evidence_chains=16))
    monkeypatch.setattr(evidence, "refine", partial(refine, max_gradients=40))
    check(CALLS[name])


def test_simulator_fits_sample_by_seed(simulated):
    check(lambda **seed: simulated.sample(5, **seed)["x"])


def test_arguments_of_a_guide_may_be_called_seed():
    def shifted(seed):
        pyro.sample("x", dist.Normal(seed, 1.0))

    known = Fit(guide=shifted, source=(shifted, (), {"seed": torch.tensor(100.0)}))
    assert known.sample(3, seed=0, model_kwargs={"seed": torch.tensor(100.0)})["x"].min() > 50
    assert known.draws_by_chain(20, seed=0)["x"].min() > 50


def test_seeds_are_keywords():
    for line in public_api():
        if re.search(r"\bseed=", line):
            assert re.search(r"\*.*\bseed=", line), line
