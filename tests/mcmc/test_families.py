# SPDX-License-Identifier: Apache-2.0
"""Priors that are not location-scale families, in the conditional space."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.transforms import OrderedTransform
from torch.autograd.functional import hessian, jacobian
from torch.distributions import biject_to

from pyro_implicit.density import Target
from pyro_implicit.mcmc import AutoConditional
from pyro_implicit.mcmc.policy import SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise, NoiseMap, dependent_sites
from pyro_implicit.mcmc.spaces.conditional_reparam import Unconstrained, transform_of

pytestmark = pytest.mark.usefixtures("double")

COUNTS = torch.tensor([2.0, 0.0, 5.0, 1.0])

FAMILIES = {
    "Beta": lambda a, b: dist.Beta(a, b),
    "Gamma": lambda a, b: dist.Gamma(a, b),
    "InverseGamma": lambda a, b: dist.InverseGamma(a, b),
    "Weibull": lambda a, b: dist.Weibull(b, a),
    "Gumbel": lambda a, b: dist.Gumbel(a, b),
}
BOUNDED = [name for name in FAMILIES if name != "Gumbel"]


def observation(name, x):
    return dist.Normal(x, 1.0) if name == "Gumbel" else dist.Poisson(x)


def parents():
    a = pyro.sample("a", dist.LogNormal(0.5, 0.5))
    return a, pyro.sample("b", dist.LogNormal(0.0, 0.5))


def in_plate(name):
    def model():
        a, b = parents()
        with pyro.plate("groups", len(COUNTS)):
            x = pyro.sample("x", FAMILIES[name](a, b))
            pyro.sample("y", observation(name, x), obs=COUNTS)

    return model


def in_loop(name):
    def model():
        a, b = parents()
        for i, count in enumerate(COUNTS):
            x = pyro.sample(f"x_{i}", FAMILIES[name](a, b))
            pyro.sample(f"y_{i}", observation(name, x), obs=count)

    return model


def in_event(name):
    """Two plates' worth of elements in one site, whose parents differ by row."""

    def model():
        a = pyro.sample("a", dist.LogNormal(torch.full((2, 1), 0.5), 0.5).to_event(2))
        b = pyro.sample("b", dist.LogNormal(0.0, 0.5))
        x = pyro.sample("x", FAMILIES[name](a.expand(*a.shape[:-1], 4), b).to_event(2))
        pyro.sample("y", observation(name, x).to_event(2), obs=COUNTS.expand(2, 4))

    return model


def ordered():
    """Three cutpoints of each of four raters."""
    a, b = parents()
    with pyro.plate("raters", len(COUNTS)):
        base = dist.Normal(a.unsqueeze(-1) * torch.arange(3.0), b.unsqueeze(-1)).to_event(1)
        x = pyro.sample("x", dist.TransformedDistribution(base, OrderedTransform()))
        pyro.sample("y", dist.Normal(x[..., -1], 1.0), obs=COUNTS)


def conditional(model, **limits):
    density = Target(model)
    torch.manual_seed(0)
    points = 0.5 * torch.randn(3, density.latent_dim)
    return ConditionalNoise(density, points[0], policy=SpacePolicy(**limits)), points


def log_det(walked, noise):
    to_latent = NoiseMap.to_latent.__wrapped__
    return jacobian(lambda at: to_latent(walked._map, at.unsqueeze(0))[0], noise).slogdet()[1]


@pytest.mark.parametrize(
    ("name", "where", "limits"),
    [
        *((name, in_plate, {}) for name in FAMILIES),
        # What differs with the family is independent of the shape: one with a bound, one without.
        *((name, in_loop, {}) for name in ("Gamma", "Gumbel")),
        *((name, in_loop, {"max_sites": 2}) for name in ("Gamma", "Gumbel")),
        *((name, in_event, {"max_columns": 3}) for name in ("Gamma", "Gumbel")),
    ],
)
def test_the_density_is_the_models_by_change_of_variables(name, where, limits):
    own = {"x"} if where is not in_loop else {f"x_{i}" for i in range(len(COUNTS))}
    check_change_of_variables(where(name), own, **limits)


@pytest.mark.parametrize("limits", [{}, {"max_columns": 3}])
def test_the_density_of_ordered_latents(limits):
    check_change_of_variables(ordered, {"x"}, **limits)


def check_change_of_variables(model, own, **limits):
    walked, points = conditional(model, **limits)
    assert set(walked.reparams) == own
    noise = walked.to_points(points)
    assert not torch.allclose(noise, points, atol=0.1)
    assert torch.allclose(walked.to_latent(noise), points, rtol=0, atol=1e-10)
    expected = walked.target.log_prob(points)
    expected = expected + torch.stack([log_det(walked, one) for one in noise])
    log_prob, score = walked.score(noise)
    assert torch.allclose(log_prob, expected, rtol=0, atol=1e-10)
    step = 1e-6 * torch.linspace(-1.0, 1.0, noise.shape[-1])
    slope = (walked.score(noise + step)[0] - walked.score(noise - step)[0]) / 2
    assert torch.allclose(slope, score @ step, rtol=1e-4)


@pytest.mark.parametrize("name", BOUNDED)
def test_location_and_scale_are_those_of_the_mode(name):
    """By differentiation of the density of the unconstrained value."""
    fn = FAMILIES[name](torch.tensor(2.3), torch.tensor(0.7))
    transform = biject_to(fn.support)

    def log_density(at):
        value = transform(at)
        return fn.log_prob(value) + transform.log_abs_det_jacobian(at, value)

    prior = Unconstrained(fn)
    at = torch.tensor([-0.4, 0.3, 1.2])
    assert torch.allclose(prior.log_prob(at), log_density(at), atol=1e-12)
    assert torch.allclose(transform_of(fn)(at), transform(at), atol=1e-12)
    assert jacobian(log_density, prior.loc).abs() < 1e-12
    assert math.isclose(-hessian(log_density, prior.loc), prior.scale**-2, rel_tol=1e-10)


def test_the_degree_of_centring_grows_with_the_information():
    """Without data it is the non-centred form, and with much data the centred form."""
    values = torch.tensor([0.4, 0.2, 0.6, 0.3])

    def mapped(exposure):
        """Return noise and prior noise of the same values, given two pairs of parents."""

        def model():
            a, b = parents()
            with pyro.plate("groups", 4):
                x = pyro.sample("x", dist.Gamma(a, b))
                pyro.factor("y", exposure * (values * x.log() - x))

        density = Target(model)
        middle = torch.cat([torch.zeros(2), values.log()])
        latent = torch.stack([middle, middle])
        latent[1, :2] = torch.tensor([0.7, -0.3])
        noise = ConditionalNoise(density, middle).to_points(latent)
        prior = Unconstrained(dist.Gamma(*latent[:, :2].exp().T.unsqueeze(-1)))
        return noise[:, 2:], (latent[:, 2:] - prior.loc) / prior.scale

    noise, white = mapped(0.0)
    assert torch.allclose(noise, white, atol=1e-10)
    noise, white = mapped(1e8)
    assert torch.allclose(noise[0], noise[1], atol=1e-3)
    assert not torch.allclose(white[0], white[1], atol=0.1)


@pytest.mark.parametrize("fn", [dist.Exponential, dist.HalfNormal, dist.HalfCauchy, FAMILIES])
def test_constant_scales_and_fixed_priors_are_left_alone(fn):
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        if fn is not FAMILIES:
            pyro.sample("x", fn(scale))
        for family in BOUNDED:
            pyro.sample(family, FAMILIES[family](torch.tensor(2.0), torch.tensor(3.0)))

    density = Target(model)
    assert dependent_sites(density, density.init_loc) == []


@pytest.mark.parametrize("model", [in_plate("Gamma"), in_plate("Weibull"), ordered])
def test_the_density_of_the_guide_is_that_of_its_noise(model):
    walked, _ = conditional(model)
    guide = AutoConditional(model, walked.reparams)
    trace = poutine.trace(guide).get_trace()
    values = {site: trace.nodes[site]["value"] for site in walked.target.shapes}
    latent = walked.target.unconstrain({n: value.unsqueeze(0) for n, value in values.items()})
    noise = walked.to_points(latent)[0]
    by_guide = guide.noise.get_posterior().log_prob(noise) - log_det(walked, noise)
    by_model = poutine.trace(poutine.condition(model, values)).get_trace().log_prob_sum()
    to_constrained = walked.target.log_prob(latent)[0] - by_model
    assert torch.allclose(trace.log_prob_sum() + to_constrained, by_guide, atol=1e-8)
