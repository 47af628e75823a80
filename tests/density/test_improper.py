# SPDX-License-Identifier: Apache-2.0
"""Flat priors whose posterior is improper along a direction, and proper ones that are close."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_implicit import fit
from pyro_implicit.density import Target

X = torch.linspace(-1.0, 2.0, 30)
Y = 1 + 0.5 * X + 0.3 * torch.sin(37 * X)
GROUP = torch.arange(30) % 3


def flat(*shape, support=constraints.real):
    return dist.ImproperUniform(support, shape, ())


def observe(mean, scale):
    with pyro.plate("rows", 30):
        pyro.sample("y", dist.Normal(mean, scale), obs=Y.to(mean))


def two_intercepts():
    slope, scale = pyro.sample("slope", flat()), pyro.sample("scale", dist.HalfNormal(1.0))
    observe(pyro.sample("a", flat()) + pyro.sample("b", flat()) + slope * X, scale)


def all_groups_and_an_intercept():
    with pyro.plate("groups", 3):
        effect = pyro.sample("effect", flat())
    observe(pyro.sample("a", flat()) + effect[GROUP], 0.3)


def logits_of_all_classes():
    logits = pyro.sample("logits", flat(3).to_event(1))
    with pyro.plate("rows", 30):
        pyro.sample("y", dist.Categorical(logits=logits), obs=GROUP)


def line():
    observe(pyro.sample("a", flat()) + pyro.sample("b", flat()) * (X + 300), 0.3)


def collinear():
    weights = pyro.sample("weights", flat(2).to_event(1))
    observe(torch.stack([X, X + 1e-2 * torch.cos(50 * X)], -1).to(weights) @ weights, 0.3)


def groups_that_share_a_prior():
    centre = pyro.sample("a", dist.Normal(0.0, 100.0))
    with pyro.plate("groups", 3):
        effect = pyro.sample("effect", flat())
    pyro.factor("sum", -0.5 * (effect.sum(-1) / 0.01) ** 2)
    observe(centre + effect[GROUP], 0.3)


def product_of_scales():
    """Improper, too, but along a curve in the values, and of other cures."""
    positive = flat(support=constraints.positive)
    observe(0.0 * X, pyro.sample("a", positive) * pyro.sample("b", dist.HalfNormal(1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (two_intercepts, "'a', 'b'"),
        (all_groups_and_an_intercept, "'effect', 'a'"),
        (logits_of_all_classes, "'logits'"),
    ],
)
def test_an_endless_direction_is_named(model, names, dtype):
    torch.set_default_dtype(dtype)
    with pytest.raises(ValueError, match=f"direction of {names}, which have flat priors. Cure"):
        fit(model, seed=0, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", [line, collinear, groups_that_share_a_prior, product_of_scales])
def test_proper_posteriors_pass(model, dtype):
    torch.set_default_dtype(dtype)
    Target(model).refuse_improper()
