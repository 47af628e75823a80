# SPDX-License-Identifier: Apache-2.0
"""InjectiveELBO(coverage=c): the gradient of KL(q || p) + c KL(p || q), its weights, its value."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.distributions import Implicit
from pyro_implicit.generators import ResidualGenerator
from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, Frame
from pyro_implicit.infer.engine.traces import log_weights
from pyro_implicit.infer.injective import InjectiveELBO, _truncated

pytestmark = pytest.mark.usefixtures("double")


def standard_normal():
    pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("evidence", torch.tensor(3.0))


def affine_guide(loc, scale):
    """N(loc, scale^2): the generator starts as the identity."""
    guide = AutoImplicit(standard_normal, AutoregressiveGenerator, frame=None, init_scale=scale)
    guide()
    guide.loc.data.fill_(loc)
    return guide


def gradient(elbo, guide, model=standard_normal):
    """With respect to loc and log scale."""
    loss = elbo.differentiable_loss(model, guide)
    parameters = [guide.loc_unconstrained if hasattr(guide, "loc_unconstrained") else guide.loc]
    parameters.append(guide.scale_unconstrained)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def quadrature(loc, scale, coverage):
    """The expected path gradient, by Gauss-Hermite quadrature over the noise."""
    z, weight = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(120))
    weight = weight / weight.sum()
    x = loc + scale * z
    log_w = -0.5 * x**2 + 0.5 * z**2 + math.log(scale)
    slope = -z / scale + x  # of log q - log p
    path = torch.stack([torch.ones_like(z), scale * z])
    return (weight * (1 + coverage * log_w.exp()) * path * slope).sum(-1)


@pytest.mark.parametrize("coverage", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("loc, scale", [(0.4, 1.5), (-0.6, 1.1), (0.2, 0.85)])
def test_expected_gradient(loc, scale, coverage):
    # Two closed forms of one thing: the quadrature, and the divergences of Gaussians.
    forward = torch.tensor([loc, scale**2 - 1])
    backward = torch.tensor([loc / scale**2, 1 - (1 + loc**2) / scale**2])
    expected = forward + coverage * backward
    torch.testing.assert_close(quadrature(loc, scale, coverage), expected, rtol=1e-4, atol=1e-5)

    guide = affine_guide(loc, scale)
    elbo = InjectiveELBO(1000, coverage=coverage)
    found = torch.stack([gradient(elbo, guide) for _ in range(60)])
    error = found.std(0) / math.sqrt(len(found))
    assert (error < 0.03).all()
    # Normalised weights are biased by the order of 1 / 1000.
    assert ((found.mean(0) - expected).abs() < 4 * error + 0.004).all()


def test_by_hand_for_few_particles():
    """Each particle's path gradient, times 1 + c w, summed by hand."""
    loc, scale, coverage = 0.7, 0.6, 1.5
    guide = affine_guide(loc, scale)
    elbo = InjectiveELBO(5, coverage=coverage)
    elbo.loss(standard_normal, guide)
    pyro.set_rng_seed(3)
    found = gradient(elbo, guide)
    pyro.set_rng_seed(3)
    with pyro.plate("num_particles_vectorized", 5, dim=-1):
        x = guide()["x"].detach()
    z = (x - loc) / scale
    weights = (-0.5 * x**2 + 0.5 * z**2).softmax(0) * 5
    weights = weights.clamp(max=math.sqrt(5))
    weights = 1 + coverage * weights / weights.mean()
    terms = torch.stack([torch.ones(5), x - loc]) * (x - z / scale)
    torch.testing.assert_close(found, (weights * terms).mean(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("generator", [AutoregressiveGenerator, lambda n: ResidualGenerator(n, 2)])
def test_no_gradient_at_the_posterior(generator):
    """Of a correlated Gaussian, in a frame that is one, at every draw."""
    covariance = torch.tensor([[1.0, 0.8, 0.0], [0.8, 2.0, -0.3], [0.0, -0.3, 0.5]])
    loc, root = torch.tensor([1.0, -2.0, 0.5]), torch.linalg.cholesky(covariance)

    def model():
        pyro.sample("x", dist.MultivariateNormal(loc, covariance))

    guide = AutoImplicit(model, generator, frame=Frame(loc, scale_tril=root))
    guide()
    for parameter in guide.generator.parameters():
        torch.nn.init.zeros_(parameter)
    if isinstance(guide.generator, ResidualGenerator):
        with torch.no_grad():  # whatever its scale is at zero, the frame takes it back
            jacobian = guide.generator.linearise(torch.zeros(3)).jacobian()
            guide.scale_unconstrained.sub_(jacobian.diagonal().abs().log())
    for coverage in (0.0, 1.0):
        elbo = InjectiveELBO(8, coverage=coverage)
        if not coverage:  # from a first step it knows that the guide has landed
            elbo.differentiable_loss(model, guide).backward()
            guide.zero_grad()
        loss = elbo.differentiable_loss(model, guide)
        assert loss.item() == pytest.approx(0.0, abs=1e-9)
        loss.backward()
        for parameter in guide.parameters():
            assert parameter.grad is None or parameter.grad.abs().max() < 1e-9


def test_the_loss_stays_the_elbo():
    guide = affine_guide(0.7, 0.6)
    values = []
    for coverage in (0.0, 1.0, 5.0):
        elbo = InjectiveELBO(50, coverage=coverage)
        elbo.loss(standard_normal, guide)
        pyro.set_rng_seed(1)
        values.append(elbo.differentiable_loss(standard_normal, guide).item())
        pyro.set_rng_seed(1)
        values.append(elbo.loss(standard_normal, guide))
        pyro.set_rng_seed(1)
        values.append(elbo.loss_and_grads(standard_normal, guide))
    assert values == pytest.approx([values[0]] * 9, rel=1e-12)
    expected = -math.log(0.6) + (0.36 + 0.49) / 2 - 0.5 - 3.0
    assert values[0] == pytest.approx(expected, abs=0.5)


def test_one_particle_is_refused():
    with pytest.raises(ValueError, match="num_particles is 1. Cure: num_particles of 16 or more"):
        InjectiveELBO(1, coverage=1.0)
    assert InjectiveELBO(1).coverage == 0.0


@pytest.mark.parametrize("coverage", [0.0, 1.5])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_a_common_scale_scales_the_gradient(scale, coverage):
    """Model and guide under poutine.scale(s): the same weights, so s times the gradient."""
    guide = affine_guide(0.7, 0.6)
    found = []
    for s in (1.0, scale):
        elbo = InjectiveELBO(5, coverage=coverage)
        scaled = poutine.scale(standard_normal, scale=s), poutine.scale(guide, scale=s)
        elbo.loss(*scaled)
        pyro.set_rng_seed(3)
        loss = elbo.differentiable_loss(*scaled)
        parameters = list(guide.parameters())
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(loss, parameters, **options)
        found.append(torch.cat([g.flatten() for g in grads]))
    assert found[0].abs().max() > 0.1
    torch.testing.assert_close(found[1], scale * found[0], rtol=1e-9, atol=1e-12)


def test_coverage_refuses_subsampled_data():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 10, subsample_size=5) as index:
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.arange(10.0)[index])

    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    message = "InjectiveELBO's coverage needs all data, but plate 'data' .*5 of 10.*Cure"
    with pytest.raises(ValueError, match=message):
        InjectiveELBO(4, coverage=1.0).differentiable_loss(model, guide)
    InjectiveELBO(4).differentiable_loss(model, guide)


def two_latents():
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_coverage_refuses_explicit_sites_in_the_guide():
    generator = AutoregressiveGenerator(2)

    def guide():
        pyro.sample("a", Implicit(generator, 2))
        pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match="site 'b' of the guide is Independent. Cure: coverage=0"):
        InjectiveELBO(4, coverage=1.0).differentiable_loss(two_latents, guide)
    InjectiveELBO(4).differentiable_loss(two_latents, guide)


def test_coverage_refuses_several_scales_in_the_guide():
    generators = AutoregressiveGenerator(2), AutoregressiveGenerator(2)

    def guide():
        pyro.sample("a", Implicit(generators[0], 2))
        with poutine.scale(scale=0.5):
            pyro.sample("b", Implicit(generators[1], 2))

    message = r"one scale for the whole guide, but its sites have \[0.5, 1.0\]. Cure: coverage=0"
    with pytest.raises(ValueError, match=message):
        InjectiveELBO(4, coverage=1.0).differentiable_loss(two_latents, guide)
    InjectiveELBO(4).differentiable_loss(two_latents, guide)


def test_weights_are_normalised_and_cut():
    even = _truncated(torch.full((7,), -300.0))
    torch.testing.assert_close(even, torch.ones(7))
    log_w = torch.tensor([0.1, -0.4, 0.3, 0.0])
    torch.testing.assert_close(_truncated(log_w), 4 * log_w.softmax(0))
    torch.testing.assert_close(_truncated(log_w + 800.0), 4 * log_w.softmax(0))
    # One of 100 with half of the weight: cut from 50 to 10, then all to mean 1.
    log_w = torch.zeros(100)
    log_w[17] = math.log(99.0)
    expected = torch.full((100,), 50 / 99)
    expected[17] = 10.0
    torch.testing.assert_close(_truncated(log_w), expected / expected.mean())
    # A particle without a density has none.
    assert _truncated(torch.tensor([0.0, -math.inf]))[1] == 0


def handled_traces(num_particles):
    """Sites in plates, scaled and masked, as an ELBO's traces have them."""

    def model():
        with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, True, False])):
            z = pyro.sample("z", dist.Normal(0.0, 2.0))
        with poutine.scale(scale=0.5):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(w.sum(-1), 1.0), obs=torch.tensor(1.0))
        return z, w

    def guide():
        loc = pyro.param("loc", torch.tensor([0.3, -0.2, 0.9]))
        with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, True, False])):
            pyro.sample("z", dist.Normal(loc, 1.5))
        with poutine.scale(scale=0.5):
            pyro.sample("w", dist.Normal(pyro.param("m", torch.ones(2)), 0.7).to_event(1))

    elbo = InjectiveELBO(num_particles)
    (traces,) = elbo._get_traces(model, guide, (), {})
    return traces


def test_log_weights_of_particles():
    model_trace, guide_trace = handled_traces(4)
    z = guide_trace.nodes["z"]["value"].reshape(4, 3)
    w = guide_trace.nodes["w"]["value"].reshape(4, 2)
    normal = lambda x, loc, scale: dist.Normal(loc, scale).log_prob(x)  # noqa: E731
    log_p = normal(z, 0.0, 2.0)[:, :2].sum(-1) + 0.5 * normal(w, 0.0, 1.0).sum(-1)
    log_p = log_p + 0.5 * normal(torch.tensor(1.0), w.sum(-1), 1.0)
    loc = torch.tensor([0.3, -0.2, 0.9])
    log_q = normal(z, loc, 1.5)[:, :2].sum(-1) + 0.5 * normal(w, 1.0, 0.7).sum(-1)
    torch.testing.assert_close(log_weights(model_trace, guide_trace, 4), log_p - log_q)


@pytest.mark.parametrize("coverage", [-1.0, math.nan])
def test_coverage_out_of_range(coverage):
    with pytest.raises(ValueError, match=f"coverage must be at least 0, but got {coverage}"):
        InjectiveELBO(8, coverage=coverage)


def test_coverage_wants_the_path():
    with pytest.raises(ValueError, match="coverage needs path_derivative=True"):
        InjectiveELBO(8, path_derivative=False, coverage=1.0)
    assert InjectiveELBO(8, path_derivative=False).coverage == 0.0


def test_all_ways_of_running_the_model_weigh_alike():
    """A scalar site beside data in a plate: in the loop, too, particles are weighed, not data."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 7):
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.ones(7))

    def gradient(way):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
        elbo = InjectiveELBO(16, coverage=1.0, vectorize_particles=way)
        elbo.loss(model, guide)
        pyro.set_rng_seed(1)
        elbo.differentiable_loss(model, guide).backward()
        return [parameter.grad for parameter in guide.parameters()]

    expected = gradient("plate")
    for way in ("vmap", False):
        for found, right in zip(gradient(way), expected, strict=True):
            torch.testing.assert_close(found, right)


def test_data_of_another_dtype():
    """Latents of float32 under data of float64, as numpy gives them."""
    y = torch.tensor([0.5, 1.5], dtype=torch.float64)

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2, dtype=torch.float32), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y)

    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    guide()
    loss = InjectiveELBO(4, coverage=1.0).differentiable_loss(model, guide)
    gradients = torch.autograd.grad(loss, list(guide.parameters()), allow_unused=True)
    assert any(one is not None and one.abs().sum() > 0 for one in gradients)
