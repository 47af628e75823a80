# SPDX-License-Identifier: Apache-2.0
"""InjectiveELBO: exact values and gradients, and posteriors that it must find exactly."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms as T
from pyro.infer import SVI
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from torch import nn

from pyro_implicit import AutoImplicit, Implicit, ResidualGenerator, SemiImplicit
from pyro_implicit.generators import FunctionGenerator
from pyro_implicit.infer.injective import InjectiveELBO
from tests.infer.helpers import curved

pytestmark = pytest.mark.usefixtures("double")

WEIGHT = torch.tensor([[1.0, 0.3, 0.0], [-0.5, 2.0, 0.4], [0.7, 0.0, 0.6]], dtype=torch.float64)


def affine() -> nn.Linear:
    generator = nn.Linear(3, 3)
    generator.weight.data.copy_(WEIGHT)
    generator.bias.data.copy_(torch.tensor([0.2, -1.0, 0.5]))
    return generator


def gaussian(generator: nn.Linear) -> dist.MultivariateNormal:
    return dist.MultivariateNormal(generator.bias, generator.weight @ generator.weight.T)


def target():
    pyro.sample("x", dist.MultivariateNormal(torch.ones(3), torch.eye(3) + 0.5))


def guide_of(generator):
    def guide():
        pyro.module("generator", generator)
        pyro.sample("x", Implicit(generator, 3))

    return guide


def gradients(elbo, model, guide, parameters, seed) -> list[torch.Tensor]:
    pyro.set_rng_seed(seed)
    loss = elbo.differentiable_loss(model, guide)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def test_value_is_the_exact_gaussian_elbo():
    generator = affine()
    drawn = {}

    def guide():
        drawn["x"] = pyro.sample("x", Implicit(generator, 3))

    loss = InjectiveELBO(50).loss(target, guide)  # its last run of the guide has all particles
    log_p = dist.MultivariateNormal(torch.ones(3), torch.eye(3) + 0.5).log_prob(drawn["x"])
    expected = (gaussian(generator).log_prob(drawn["x"]) - log_p).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("path_derivative", [False, True])
def test_gradient_is_that_of_the_density(path_derivative):
    """Of a Gaussian, whose density is known: through all of it, or through the draw alone."""
    generator = affine()
    parameters = list(generator.parameters())
    elbo, guide = InjectiveELBO(6, path_derivative), guide_of(generator)
    elbo.loss(target, guide)
    found = gradients(elbo, target, guide, parameters, 0)

    pyro.set_rng_seed(0)
    draws = generator(torch.randn(6, 3))
    fixed = affine() if path_derivative else generator
    log_p = dist.MultivariateNormal(torch.ones(3), torch.eye(3) + 0.5).log_prob(draws)
    loss = (gaussian(fixed).log_prob(draws) - log_p).mean()
    torch.testing.assert_close(found, torch.autograd.grad(loss, parameters))


def test_plain_gradient_is_the_finite_difference_of_the_exact_elbo():
    generator = affine()
    elbo = InjectiveELBO(8, path_derivative=False)
    guide = guide_of(generator)
    elbo.loss(target, guide)
    (found,) = gradients(elbo, target, guide, [generator.weight], 1)
    differences = torch.zeros(3, 3)
    for index in range(9):
        losses = []
        for step in (1e-5, -1e-5):
            generator.weight.data.view(-1)[index] += step
            pyro.set_rng_seed(1)
            losses.append(elbo.loss(target, guide))
            generator.weight.data.view(-1)[index] -= step
        differences.view(-1)[index] = (losses[0] - losses[1]) / 2e-5
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-7)


def framed_guides():
    """All ways from the generator to the site: none, a frame, a full frame, to the positive."""

    def model():
        pyro.sample("x", dist.LogNormal(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])).to_event(1))

    gaussian = AutoMultivariateNormal(model)
    gaussian()
    for value in gaussian.parameters():
        nn.init.normal_(value, std=0.4)
    yield "frame", model, AutoImplicit(model, curved(), frame=None, init_scale=0.7)
    yield "full frame", model, AutoImplicit(model, curved(), frame=gaussian)
    generator = curved()

    def to_the_positive():
        pyro.module("generator", generator)
        transforms = [T.AffineTransform(0.3, torch.tensor([1.0, -0.5, 2.0]))]
        transforms += [T.ExpTransform()]
        pyro.sample("x", dist.TransformedDistribution(Implicit(generator, 3), transforms))

    yield "exp", model, to_the_positive


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("none", False),
        ("frame", False),
        ("full frame", False),
        ("full frame", True),
        ("exp", False),
        ("exp", True),
    ],
)
def test_both_gradients_have_one_expectation(name, dense, monkeypatch):
    pyro.set_rng_seed(0)
    generator = curved()
    cases = {name: (model, guide) for name, model, guide in framed_guides()}
    cases["none"] = (target, guide_of(generator))
    model, guide = cases[name]
    if dense:
        closed = ResidualGenerator.linearise

        def linearise(self, noise, context=None):
            return FunctionGenerator(lambda z: closed(self, z, context).value).linearise(noise)

        monkeypatch.setattr(ResidualGenerator, "linearise", linearise)
    elbos = [InjectiveELBO(2000, flag) for flag in (True, False)]
    for elbo in elbos:
        elbo.loss(model, guide)
    named = dict(pyro.get_param_store().named_parameters())
    if hasattr(guide, "named_parameters"):
        named = dict(guide.named_parameters())
    parameters = [p for name, p in named.items() if "frame_" not in name]
    samples = [
        torch.stack(
            [torch.cat([g.flatten() for g in gradients(elbo, model, guide, parameters, seed)])
             for seed in range(30)]
        )
        for elbo in elbos
    ]  # fmt: skip
    difference = samples[0] - samples[1]  # of the same draws
    error = difference.std(0) / 30**0.5
    assert (difference.mean(0).abs() < 5 * error + 1e-9).all()
    # and that is no empty statement
    assert (samples[1].mean(0).abs() > 10 * error).float().mean() > 0.3


def regression(x, y):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(x.shape[-1]), 10.0).to_event(1))
    pyro.sample("y", dist.Normal(x @ weight, 1.0).to_event(1), obs=y)


def test_recovers_a_linear_regression():
    size = 5
    pyro.set_rng_seed(size)
    x = torch.randn(100, size)
    y = x @ (5 + torch.rand(size)) + torch.randn(100)
    generator = ResidualGenerator(size, size, hidden=())
    guide = AutoImplicit(regression, generator, init_loc_fn=init_to_mean, frame=None)
    optim = pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.01 ** (1 / 400)})
    svi = SVI(regression, guide, optim, InjectiveELBO(8, compile="trace"))
    for _ in range(400):
        loss = svi.step(x, y)
    covariance = torch.linalg.inv(x.T @ x + torch.eye(size) / 100)
    mean = covariance @ x.T @ y
    with torch.no_grad():
        matrix = guide.generator.linearise(torch.zeros(size)).jacobian() * guide.scale[:, None]
        center = guide.loc + guide.scale * guide.generator(torch.zeros(size))
    relative = (matrix @ matrix.T - covariance).norm() / covariance.norm()
    assert relative < 1e-4
    assert (center - mean).norm() / mean.norm() < 1e-4
    # At the posterior every draw gives minus the log-evidence.
    evidence = dist.MultivariateNormal(torch.zeros(100), torch.eye(100) + 100 * x @ x.T).log_prob(y)
    assert loss == pytest.approx(-evidence.item(), abs=1e-3)


def test_amortised_in_plates():
    """Ten local latents by one generator of the data, each with its exact posterior."""
    pyro.set_rng_seed(0)
    y = 2 * torch.randn(10, 2)

    def model():
        with pyro.plate("rows", 10):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)

    generator = ResidualGenerator(2, 1, hidden=(), context_dim=2)

    def guide():
        pyro.module("generator", generator)
        with pyro.plate("rows", 10):
            pyro.sample("z", Implicit(generator, 2, context=y))

    optim = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.01 ** (1 / 300)})
    svi = SVI(model, guide, optim, InjectiveELBO(4, compile="trace"))
    for _ in range(300):
        loss = svi.step()
    with torch.no_grad():
        linearisation = generator.linearise(torch.zeros(10, 2), y)
        value, jacobian = linearisation.value, linearisation.jacobian()
    torch.testing.assert_close(value, 0.8 * y, rtol=0, atol=1e-3)
    expected = torch.eye(2).expand(10, 2, 2) * 0.2
    torch.testing.assert_close(jacobian @ jacobian.mT, expected, rtol=0, atol=1e-3)
    evidence = dist.Normal(0.0, 1.25**0.5).log_prob(y).sum()
    assert loss == pytest.approx(-evidence.item(), abs=1e-3)


@pytest.mark.parametrize("num_particles", [1, 4])
def test_events_that_are_no_vectors(num_particles):
    """A matrix from a generator without methods, and three independent scalars made one event."""
    matrix = torch.tensor([[1.0, 0.4, 0.0, 0.0], [0.0, 0.8, 0.0, 0.3]] * 2) + 0.5 * torch.eye(4)

    def model():
        pyro.sample("a", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def guide():
        pyro.sample("a", Implicit(lambda z: (z @ matrix.T).unflatten(-1, (2, 2)), 4))
        pyro.sample("b", Implicit(lambda z: 3 * z.squeeze(-1), 1).expand([3]).to_event(1))

    losses = [InjectiveELBO(num_particles, flag) for flag in (True, False, "auto")]
    a = dist.MultivariateNormal(torch.zeros(4), matrix @ matrix.T)
    entropy = a.entropy() + 3 * dist.Normal(0.0, 3.0).entropy()
    cross = -0.5 * (matrix.square().sum() + 27) - 3.5 * torch.tensor(2 * torch.pi).log()
    for elbo in losses:
        value = torch.tensor([elbo.differentiable_loss(model, guide).item() for _ in range(100)])
        error = (value.mean() + entropy + cross).abs()
        assert error < 5 * value.std() / 100**0.5


def test_refusals():
    def model():
        pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    class Dropout(nn.Linear):
        def forward(self, noise):
            return nn.functional.dropout(super().forward(noise), 0.5)

    normal = dist.Normal(torch.ones(3), 1.0).to_event(1)
    for q, message in [
        (Implicit(nn.Linear(2, 3), 2), "'x' turns 2 into 3. Cure.*AutoregressiveGenerator"),
        (SemiImplicit(affine(), 3, 0.1), "'x'.*SemiImplicit.*Cure"),
        (Implicit(affine(), normal), "InjectiveELBO needs standard normal.*'x'.*Cure"),
        (Implicit(Dropout(3, 3), 3), "'x'.*dropout.*Cure"),
    ]:
        with pytest.raises(ValueError, match=message):
            InjectiveELBO(4).differentiable_loss(model, lambda q=q: pyro.sample("x", q))
