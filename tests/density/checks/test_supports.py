# SPDX-License-Identifier: Apache-2.0
"""Supports that depend on latents: densities are zero outside, and latents may not have them."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_value

from pyro_implicit import AutoImplicit
from pyro_implicit.density import Target

pytestmark = pytest.mark.usefixtures("double")


def moved(base, low):
    return dist.TransformedDistribution(base, [dist.transforms.AffineTransform(low, 2.0)])


OBSERVED = {
    "Exponential": lambda low: moved(dist.Exponential(torch.tensor(1.0)), low),
    "a vector": lambda low: moved(dist.Exponential(torch.ones(2)).to_event(1), low),
    "Pareto": lambda low: dist.Pareto(low, 3.0),
    "in a mixture": lambda low: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Pareto(torch.stack([low, 1.1 * low]), 3.0)
    ),
}


@pytest.mark.parametrize("kind", OBSERVED)
def test_no_density_where_data_are_below_their_bound(kind):
    fn = OBSERVED[kind]
    y = torch.tensor([2.0, 3.0]) if kind == "a vector" else torch.tensor(2.0)

    def model():
        low = pyro.sample("low", dist.LogNormal(torch.tensor(0.0), 1.0))
        pyro.sample("y", fn(low), obs=y)

    low = torch.tensor([1.0, 2.5])
    log_prob, score = Target(model).score(low.log().unsqueeze(-1))
    prior = dist.LogNormal(0.0, 1.0).log_prob(low[:1])  # and the Jacobian of log(1) is 0
    assert log_prob[0].item() == pytest.approx((prior + fn(low[0]).log_prob(y)).item())
    assert log_prob[1] == -math.inf and score[1] == 0


MOVING = {
    "Uniform": lambda a: dist.Uniform(0.0, a),
    "in a vector": lambda a: dist.Uniform(-a, torch.ones(2)).to_event(1),
    "Pareto": lambda a: dist.Pareto(a, 3.0),
    "flat": lambda a: dist.ImproperUniform(dist.constraints.greater_than(a), (), ()),
}


@pytest.mark.parametrize("kind", MOVING)
def test_supports_of_latents_must_not_move(kind):
    def model():
        a = pyro.sample("a", dist.LogNormal(torch.tensor(0.0), 1.0))
        pyro.sample("part", MOVING[kind](a))

    guide = AutoImplicit(model, frame=None)
    for use in (Target, lambda _: guide(), lambda _: guide()):
        with pytest.raises(ValueError, match="support of latent 'part' changes.*Cure: "):
            use(model)


@torch.no_grad()  # as guides are often called first
def test_supports_of_latents_must_not_move_with_parameters():
    def model():
        width = pyro.param("width", torch.tensor(2.0))
        pyro.sample("part", dist.Uniform(0.0, 3 * width))

    guide = AutoImplicit(model, frame=None)
    for use in (Target, lambda _: guide()):
        with pytest.raises(ValueError, match="latent 'part' changes with parameters.*Cure: "):
            use(model)


def test_a_latent_that_is_not_there_beside_the_start():
    def model():
        if pyro.sample("x", dist.Normal(0.0, 1.0)) == 0.0:
            pyro.sample("v", dist.Uniform(torch.tensor(0.0), 1.0))

    with pytest.raises(ValueError, match="site 'v' is in some runs .* and not in others.*Cure"):
        Target(model, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))


def test_supports_that_stay():
    def model():
        a = pyro.sample("a", dist.LogNormal(torch.tensor(0.0), 1.0))
        pyro.sample("fixed", dist.Uniform(torch.zeros(2), 1.0).to_event(1))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("pareto", dist.Pareto(torch.tensor(1.0), a + z))

    assert Target(model).log_prob(torch.zeros(1, 4)).isfinite()
