# SPDX-License-Identifier: Apache-2.0
"""Flat priors whose posterior is improper along a direction, and proper ones that are close."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
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
    with pytest.raises(
        ValueError, match=f"direction of {names}, whose priors are flat or masked. Cure"
    ):
        fit(model, seed=0, progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", [line, collinear, groups_that_share_a_prior, product_of_scales])
def test_proper_posteriors_pass(model, dtype):
    torch.set_default_dtype(dtype)
    Target(model).refuse_improper()


def padded(y, lengths, by_handler=True):
    """Two series of different lengths, whose states are masked beyond their ends."""
    z = torch.zeros(2)
    with pyro.plate("series", 2):
        for t in pyro.markov(range(y.shape[1])):
            mask = t < lengths
            with poutine.mask(mask=mask if by_handler else torch.tensor(True)):
                fn = dist.Normal(z, 1.0)
                z = pyro.sample(f"z_{t}", fn if by_handler else fn.mask(mask))
                pyro.sample(f"y_{t}", dist.Normal(z, 0.5).mask(mask), obs=y[:, t])


@pytest.mark.parametrize("by_handler", [True, False])
def test_masked_elements_that_nothing_depends_on_are_refused(by_handler):
    lengths, y = torch.tensor([3, 2]), torch.randn(2, 3)
    message = r"1 of 2 elements of site 'z_2' have a mask in place of a prior.*Cure: mask the obs"
    with pytest.warns(UserWarning, match="1 of 2 elements of latent 'z_2' have no prior"):
        with pytest.raises(ValueError, match=message):
            fit(padded, "auto", y, lengths, by_handler, seed=0, progress=False)


def test_a_masked_sum_is_endless_in_its_differences():
    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).mask(False).to_event(1))
        observe(x.sum(), 1.0)

    message = "direction of 'x', whose priors are flat or masked. Cure"
    with pytest.raises(ValueError, match=message):
        fit(model, seed=0, progress=False)


def test_masked_elements_with_data_are_proper():
    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).mask(False).to_event(1))
        observe(x[0] * X + x[1], 1.0)

    Target(model).refuse_improper()
