# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in each stage of ``fit``, data that no model can have."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.fitting import fit

QUIET = {"seed": 0, "progress": False, "num_steps": 3, "num_particles": 4, "compile": False}


def skewed():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    y = pyro.sample("y", dist.Normal(0.0, 1.0))
    pyro.factor("bend", -2 * (y - x**2) ** 2)


def press(*args, **kwargs):
    raise KeyboardInterrupt


#: What is running, what else is asked of ``fit``, and the guide that is left.
STAGES = {
    "search": ("stages.find_modes", {}, None),
    "gaussian": ("stages.Stages.set_weights", {}, None),
    "weights of the gaussian": ("stages.reliability", {}, "gaussian"),
    "refine": ("refinement.refine_target", {"refine": True}, "gaussian injective"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_best_so_far_is_kept(stage, monkeypatch):
    where, options, left = STAGES[stage]
    monkeypatch.setattr(f"pyro_implicit.fitting.{where}", press)
    if left is None:
        with pytest.raises(KeyboardInterrupt):
            fit(skewed, "auto", **QUIET, **options)
    else:
        result = fit(skewed, "auto", **QUIET, **options)
        assert result.interrupted and result.chosen in left.split() and result.refined is None
        assert not list(pyro.get_param_store())
        assert result.sample(3)["x"].shape == (3,)


def data(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 8, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


@pytest.mark.parametrize("batches", [False, True])
def test_a_given_guide_is_kept_when_its_chains_are_interrupted(batches, monkeypatch):
    x, y = torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8)
    where = "auto.refine_by_minibatches" if batches else "refinement.refine_target"
    monkeypatch.setattr(f"pyro_implicit.fitting.{where}", press)
    guide = AutoNormal(data)
    rows = [(x[:4], y[:4]), (x[4:], y[4:])]
    more = {"batches": rows, "epochs": 1, "num_steps": None} if batches else {}
    result = fit(data, guide, *(() if batches else (x, y)), refine=True, **{**QUIET, **more})
    assert result.interrupted and result.guide is guide and result.refined is None
    assert result.losses


def mean(y, unit):
    loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 10 * unit))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(loc, unit), obs=y)


Y = torch.tensor([1.0, 2.0, 3.0, 2.5], dtype=torch.float64)
ONE = Y.new_ones(())


@pytest.mark.parametrize(
    ("y", "unit", "message"),
    [
        (Y / (Y > 1), ONE, "observation of site 'y' is infinite in 1 of 4"),
        (Y * math.nan, ONE, "observation of site 'y' is NaN in 4 of 4"),
        (Y * 1e300, ONE, None),
        (Y * 1e300, ONE * 1e300, None),
        (Y * 1e-300, ONE * 1e-300, None),
    ],
)
def test_data_without_a_density_are_refused_by_site(y, unit, message):
    """Squares of 1e300 and of 1e-300 are infinite and 0."""
    message = message or "finite at none of 50 initial points: .*site 'y' at .*Cure: "
    with pytest.raises(ValueError, match=message):
        fit(mean, "auto", y, unit, **QUIET)


def test_data_of_a_tiny_unit():
    unit = 1e-30
    result = fit(mean, "auto", Y * unit, ONE * unit, **QUIET)
    draws = result.sample(4000)["loc"] / unit
    assert draws.mean().item() == pytest.approx(Y.sum().item() / 4.01, abs=0.04)
    assert draws.std().item() == pytest.approx(4.01**-0.5, rel=0.05)
