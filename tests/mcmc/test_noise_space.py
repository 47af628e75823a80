# SPDX-License-Identifier: Apache-2.0
"""NUTS over a guide's noise: the density it sees, the draws it maps back, and what it refuses."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.reparam import NeuTraReparam
from torch import nn
from torch.distributions import biject_to, constraints

from pyro_implicit import (
    MLP,
    AutoImplicit,
    AutoSemiImplicit,
    GatedResidualGenerator,
    NoiseSpaceReparam,
    ResidualGenerator,
)
from pyro_implicit.generators import Generator

pytestmark = pytest.mark.usefixtures("double")

Y = torch.tensor([[0.3, -1.0, 2.0], [0.5, 0.1, -0.7]], dtype=torch.float64)
SUPPORTS = {
    "scale": (constraints.positive, ()),
    "mix": (constraints.simplex, (2,)),
    "x": (constraints.real, (2, 3)),
    "shift": (constraints.real, (3,)),
}


def model(y):
    """A positive scale, a simplex, a vector, and latents in and out of nested plates."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    rows, columns = pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 3, dim=-1)
    with rows, columns:
        x = pyro.sample("x", dist.Normal(mix[0], scale))
    shift = pyro.sample("shift", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    with rows, columns:
        pyro.sample("y", dist.Normal(x + shift, 0.5), obs=y)


def make_guide(generator_type=ResidualGenerator, framed=False, curve=0.3):
    base = None
    if framed:
        base = AutoMultivariateNormal(model)
        base(Y)
        for value in base.parameters():
            nn.init.normal_(value, std=0.3)
    guide = AutoImplicit(model, lambda size: generator_type(size, 2, (8,)), frame=base)
    guide(Y)
    for value in guide.generator.parameters():
        nn.init.normal_(value, std=curve)
    guide.scale = torch.rand(12) + 0.5
    return guide


def latents(guide, noise):
    """Constrained values of one vector of noise, by the definition of the guide."""
    value = guide.loc + guide.generator(noise) * guide.scale
    if guide.frame_scale_tril is not None:
        value = guide.frame_loc + guide.frame_scale_tril @ value
    parts = value.split([1, 2, 6, 3])
    free = zip(SUPPORTS.items(), parts, strict=True)
    return {name: biject_to(s)(part.reshape(shape)) for (name, (s, shape)), part in free}


def total_log_det(guide, noise):
    """Of the map from noise to constrained values, without the simplex' last coordinate."""

    def flat(z):
        values = latents(guide, z) | {"mix": latents(guide, z)["mix"][:2]}
        return torch.cat([value.reshape(-1) for value in values.values()])

    jacobian = torch.autograd.functional.jacobian(flat, noise, create_graph=True)
    return torch.linalg.slogdet(jacobian).logabsdet


def log_density(model, values, *args):
    return poutine.trace(poutine.condition(model, data=values)).get_trace(*args).log_prob_sum()


@pytest.mark.parametrize("reparam_type", [NoiseSpaceReparam, NeuTraReparam])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("generator_type", [ResidualGenerator, GatedResidualGenerator])
def test_density_and_its_gradient(generator_type, framed, reparam_type):
    """log p(y, theta(z)) + log |det of all maps|, by one dense Jacobian; Pyro's own class too."""
    guide = make_guide(generator_type, framed)
    reparam = reparam_type(guide)
    for _ in range(3):
        noise = torch.randn(12, requires_grad=True)
        found = log_density(reparam.reparam(model), {"scale_shared_latent": noise}, Y)
        expected = log_density(model, latents(guide, noise), Y) + total_log_det(guide, noise)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, noise), torch.autograd.grad(expected, noise)
        )


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("batch", [(), (5,), (2, 4)], ids=str)
def test_transform_sample(batch, framed):
    guide = make_guide(framed=framed, curve=0.1)
    noise = torch.randn(*batch, 12)
    samples = NoiseSpaceReparam(guide).transform_sample(noise)
    assert list(samples) == list(SUPPORTS)
    rows = [latents(guide, z) for z in noise.reshape(-1, 12)]
    for name, value in samples.items():
        expected = torch.stack([row[name] for row in rows]).detach()
        torch.testing.assert_close(value, expected.reshape(batch + expected.shape[1:]))
        assert not value.requires_grad


def test_transform_sample_agrees_with_what_the_model_saw():
    guide = make_guide()
    reparam = NoiseSpaceReparam(guide)
    trace = poutine.trace(reparam.reparam(model)).get_trace(Y)
    samples = reparam.transform_sample(trace.nodes["scale_shared_latent"]["value"])
    for name, value in samples.items():
        torch.testing.assert_close(value, trace.nodes[name]["value"].detach())


def test_saved_guide():
    """A reparametrisation of a loaded guide maps noise back at once, without a run of the model."""
    guide = make_guide()
    noise = torch.randn(3, 12)
    expected = NoiseSpaceReparam(guide).transform_sample(noise)
    file = io.BytesIO()
    torch.save(guide, file)
    pyro.clear_param_store()
    file.seek(0)
    actual = NoiseSpaceReparam(torch.load(file, weights_only=False)).transform_sample(noise)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def conjugate_with_a_wrong_guide():
    """A model, its reparametrisation by a guide that is not Gaussian, exact mean and covariance."""
    prior, noise_sd, y = torch.eye(2) + 1.0, torch.tensor([1.0, 0.5]), torch.tensor([1.0, -1.0])

    def conjugate():
        x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), prior))
        pyro.sample("y", dist.Normal(x, noise_sd).to_event(1), obs=y)

    guide = AutoImplicit(conjugate, lambda size: GatedResidualGenerator(size, 1, (6,)), frame=None)
    guide()
    # Without its log-determinant this gate would shift the first coordinate by half an sd.
    nn.init.constant_(guide.generator.gate_linear.weight, 0.5)
    guide.loc, guide.scale = torch.tensor([0.2, -0.7]), torch.tensor([0.8, 0.5])
    covariance = (prior.inverse() + noise_sd.square().reciprocal().diag()).inverse()
    return conjugate, NoiseSpaceReparam(guide), covariance @ (y / noise_sd.square()), covariance


def errors(draws, weights, mean, covariance):
    """Of weighted mean and covariance, in posterior sds."""
    sd = covariance.diag().sqrt()
    found = weights @ draws
    second = (weights[:, None] * (draws - found)).T @ (draws - found)
    return (found - mean).abs() / sd, (second - covariance).abs() / (sd[:, None] * sd)


def test_moments_are_the_posteriors_whatever_the_guide():
    """By quadrature over the noise, without Monte Carlo error."""
    conjugate, reparam, *exact = conjugate_with_a_wrong_guide()
    model = reparam.reparam(conjugate)
    nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(20))
    noise = torch.cartesian_prod(nodes, nodes)
    log_weights = torch.cartesian_prod(weights, weights).log().sum(-1) + noise.square().sum(-1) / 2
    log_probs = [log_density(model, {"x_shared_latent": z}) for z in noise]
    weights = (log_weights + torch.stack(log_probs)).softmax(0).detach()
    mean, covariance = errors(reparam.transform_sample(noise)["x"], weights, *exact)
    assert mean.max() < 0.05 and covariance.max() < 0.08  # errors of the quadrature


def test_nuts_finds_a_conjugate_posterior_whatever_the_guide():
    """Its draws are mapped back; how exact the density is, the quadrature shows."""
    conjugate, reparam, *exact = conjugate_with_a_wrong_guide()
    kernel = NUTS(reparam.reparam(conjugate))
    mcmc = MCMC(kernel, num_samples=120, warmup_steps=80, disable_progbar=True)
    mcmc.run()
    draws = reparam.transform_sample(mcmc.get_samples()["x_shared_latent"])["x"]
    mean, covariance = errors(draws, torch.full((120,), 1 / 120), *exact)
    assert mean.max() < 0.7 and covariance.max() < 1.0  # effective sample sizes from 30 on


def test_a_guide_that_is_the_posterior_makes_the_noise_standard_normal():
    def funnel():
        v = pyro.sample("v", dist.Normal(1.0, 3.0))
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()).expand([2]).to_event(1))

    guide = AutoImplicit(
        funnel, lambda size: GatedResidualGenerator(size, 1, output_scale=0.0), frame=None
    )
    guide()
    nn.init.constant_(guide.generator.gate_linear.weight, 1.5)
    guide.generator.log_scale.data[1:] = 0.5
    guide.loc, guide.scale = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3.0, 1.0, 1.0])
    model = NoiseSpaceReparam(guide).reparam(funnel)
    for noise in torch.randn(5, 3):
        conditioned = poutine.condition(model, data={"v_shared_latent": noise})
        found = poutine.trace(conditioned).get_trace().log_prob_sum()
        torch.testing.assert_close(found, dist.Normal(0.0, 1.0).log_prob(noise).sum())


def test_folds_are_warned_of():
    guide = make_guide()
    with torch.no_grad():  # the core's first coordinate becomes 3 tanh(-2 z) + z
        generator = guide.generator
        for value in generator.parameters():
            value.zero_()
        generator.network.layers[0].weight[0, 0] = -2.0
        generator.network.layers[1].weight[0, 0] = 3.0
    noise = torch.zeros(10, 12)
    noise[:, 0] = torch.tensor([-2.0, -2.0, 0.0, 0.1, 0.2, 0.1, -0.1, 0.0, 0.1, 2.0])
    reparam = NoiseSpaceReparam(guide)
    with pytest.warns(UserWarning, match=r"another sign at 3 of 10 draws.*Cure: train") as record:
        reparam.transform_sample(noise)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reparam.transform_sample(noise[2:9])  # negative at all of them: a reflection, no fold


class Sinh(Generator):
    """Injective, and without a derivative of its own."""

    injective = True

    def forward(self, noise, context=None):
        return torch.sinh(noise)


def test_any_generator_that_is_injective():
    guide = AutoImplicit(model, Sinh(12, 12), frame=None)
    guide(Y)
    reparam = NoiseSpaceReparam(guide)
    noise = torch.randn(12)
    found = log_density(reparam.reparam(model), {"scale_shared_latent": noise}, Y)
    expected = log_density(model, latents(guide, noise), Y) + total_log_det(guide, noise)
    torch.testing.assert_close(found, expected)
    assert reparam.transform_sample(noise)["x"].shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoImplicit(model, MLP(5, 12), frame=None), "5 noise dimensions into 12 latents"),
        (lambda: AutoImplicit(model, frame=None), "GatedMLP may give one value to several noises"),
        (lambda: AutoImplicit(model, nn.Linear(12, 12), frame=None), "Linear may give one value"),
        (
            lambda: AutoSemiImplicit(model, lambda size: ResidualGenerator(size, 2), frame=None),
            "semi-implicit guide .* hides",
        ),
    ],
)
def test_refuses_guides_without_an_exact_density(make, message):
    guide = make()
    guide(Y)
    with pytest.raises(ValueError, match=f"{message}.*Cure: .*ResidualGenerator.*InjectiveELBO"):
        NoiseSpaceReparam(guide)
    with pytest.raises(NotImplementedError, match=message):
        guide.get_transform()
    with pytest.raises(ValueError, match="get_transform"):  # Pyro's own words
        NeuTraReparam(guide).reparam(model)(Y)


def test_refuses_other_and_untrained_guides():
    with pytest.raises(TypeError, match=r"got AutoNormal\. Cure: .*NeuTraReparam"):
        NoiseSpaceReparam(AutoNormal(model))
    with pytest.raises(ValueError, match="never called.*Cure: train it"):
        NoiseSpaceReparam(AutoImplicit(model, lambda size: ResidualGenerator(size, 2), frame=None))
