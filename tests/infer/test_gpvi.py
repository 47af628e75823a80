# SPDX-License-Identifier: Apache-2.0
"""GPVI_ELBO: its gradient against the formula, its value, its helper, and short runs."""

from __future__ import annotations

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms as T
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

from pyro_implicit import AutoImplicit, Implicit, ResidualGenerator, SemiImplicit
from pyro_implicit.infer.gpvi import GPVI_ELBO, GPVIHelper
from pyro_implicit.infer.injective import InjectiveELBO
from tests.infer.helpers import PRECISION_3D as PRECISION
from tests.infer.helpers import check_finds_a_gaussian_roughly, curved, guide_of
from tests.infer.helpers import gaussian_3d as target

pytestmark = pytest.mark.usefixtures("double")


def positive_target():
    pyro.sample("x", dist.LogNormal(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])).to_event(1))


class Spy(GPVI_ELBO):
    """Keeps the two batches of the last step."""

    def score_parts(self, site, prior):
        if ("batches", site.name) in self.state.step:
            self.seen = self.state.step["batches", site.name]
        return super().score_parts(site, prior)


def by_definition(batches, kernel, log_target, push):
    """Eq 5 for every i, with J the Jacobian of all from noise to the values of ``push``.

    :returns: the velocity in the space of those values, for the sum over i of its product with
        them to have the gradient of the loss.
    """
    generator = batches.first.distribution.generator
    first, second = batches.first.noise, batches.second.noise
    distances = torch.pdist(second)
    bandwidth = distances.sort().values[(len(distances) - 1) // 2] / math.sqrt(
        2 * math.log(len(second))
    )
    velocity = torch.zeros(second.shape)
    whole = lambda z: push(generator(z))  # noqa: E731
    for point in first:
        jacobian = torch.autograd.functional.jacobian(whole, point)
        value = whole(point).detach().requires_grad_()
        (score,) = torch.autograd.grad(log_target(value), value)
        for i, other in enumerate(second):
            z = point.clone().requires_grad_()
            square = (z - other).square().sum() / bandwidth**2
            k = (-0.5 * square).exp() if kernel == "rbf" else 1 / (1 + square).sqrt()
            (slope,) = torch.autograd.grad(k, z)
            velocity[i] += -score * k.detach() - torch.linalg.inv(jacobian).T @ slope
    return velocity / len(first) / len(second)


def compare_with_definition(elbo, model, guide, parameters, log_target, push):
    elbo.loss(model, guide)
    loss = elbo.differentiable_loss(model, guide)
    found = torch.autograd.grad(loss, parameters)
    velocity = by_definition(elbo.seen, elbo.kernel, log_target, push)
    values = push(elbo.seen.first.distribution.generator(elbo.seen.second.noise))
    expected = torch.autograd.grad((velocity * values).sum(), parameters)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("kind", ["residual", "dense", "function"])
def test_gradient_is_the_functional_one(kind, kernel):
    generator = curved()
    if kind == "dense":
        generator = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    run = (lambda z: generator(z)) if kind == "function" else generator

    guide = guide_of(run, 3)
    log_p = dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION).log_prob
    elbo = Spy(4, kernel=kernel)
    compare_with_definition(
        elbo, target, guide, list(generator.parameters()), log_p, lambda value: value
    )


def test_gradient_through_a_frame_that_is_not_diagonal():
    gaussian = AutoMultivariateNormal(target)
    gaussian()
    guide = AutoImplicit(target, curved(), frame=gaussian)
    guide()
    lower = torch.tensor([[0.7, 0.0, 0.0], [-0.9, 1.2, 0.0], [0.4, 0.5, 0.3]])
    guide.frame_scale_tril.data.copy_(lower)
    guide.scale = torch.tensor([0.5, 1.0, 2.0])
    log_p = dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION).log_prob

    def push(value):
        return guide.frame_loc + (guide.loc + guide.scale * value) @ lower.T

    named = dict(guide.named_parameters())
    parameters = [p for name, p in named.items() if "frame_" not in name]
    compare_with_definition(Spy(4), target, guide, parameters, log_p, push)


def test_gradient_through_a_change_of_variables():
    """Before the exponential: the target is the log-normal's logarithm."""
    generator = curved()

    def guide():
        transforms = [T.ExpTransform()]
        pyro.sample("x", dist.TransformedDistribution(Implicit(generator, 3), transforms))

    log_p = dist.Normal(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0])).to_event(1).log_prob
    parameters = list(generator.parameters())
    compare_with_definition(Spy(4), positive_target, guide, parameters, log_p, lambda value: value)


def test_no_gradient_in_expectation_at_the_target():
    """With the second batch fixed, the sums over the first have expectation zero."""
    generator = curved()
    # the target is the guide's own distribution, known through its noise
    elbo = Spy(20)

    def score_of(batches):
        noise = batches.first.noise.detach().requires_grad_()
        log_q = -0.5 * noise.square().sum(-1) - generator.linearise(noise).log_abs_det()
        (slope,) = torch.autograd.grad(log_q.sum(), noise)
        return generator.linearise(noise).solve_transposed(slope)

    guide = guide_of(generator, 3)
    sums = []
    for _ in range(256):
        elbo.differentiable_loss(target, guide)
        batches = elbo.seen
        driving = batches.share(score_of(batches))
        repelled = elbo._repulsion(batches.first, batches)[0] / 20
        # Weighed by the noise where it acts, as in the gradient of a scale.
        sums.append([(part * batches.second.noise).mean(0) for part in (driving, repelled)])
    driving, repelled = (torch.stack(part) for part in zip(*sums, strict=True))
    total = driving + repelled
    error = total.std(0) / 256**0.5
    assert (total.mean(0).abs() < 4 * error).all()
    assert (driving.mean(0).abs() > 10 * error).all()


def test_value_is_the_exact_elbo_and_weights_apply():
    generator = curved()

    guide = guide_of(generator, 3)
    losses = []
    for elbo in (GPVI_ELBO(5), InjectiveELBO(5)):
        elbo.loss(target, guide)
        pyro.set_rng_seed(1)
        losses.append(elbo.loss(target, guide))
    assert losses[0] == losses[1]

    elbo = GPVI_ELBO(5)
    elbo.loss(target, guide)
    gradients = {}
    for weights in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (2.0, 3.0)]:
        elbo.prior_weight, elbo.entropy_weight = weights
        pyro.set_rng_seed(2)
        loss = elbo.differentiable_loss(target, guide)
        gradients[weights] = torch.autograd.grad(loss, generator.log_scale)[0]
    prior, entropy = gradients[1.0, 0.0], gradients[0.0, 1.0]
    torch.testing.assert_close(gradients[1.0, 1.0], prior + entropy)
    torch.testing.assert_close(gradients[2.0, 3.0], 2 * prior + 3 * entropy)


def test_plates_are_independent():
    """Rows with kernels of their own: the same gradient as that of one row alone."""
    context = torch.randn(3, 2)
    generator = ResidualGenerator(2, 1, (5,), context_dim=2, output_scale=1.0)

    def model(rows=3):
        with pyro.plate("rows", rows):
            pyro.sample("z", dist.Normal(torch.ones(2), 0.5).to_event(1))

    def guide(rows=3):
        with pyro.plate("rows", rows):
            pyro.sample("z", Implicit(generator, 2, context=context[:rows]))

    elbo = Spy(4)
    elbo.loss(model, guide)
    loss = elbo.differentiable_loss(model, guide)
    found = torch.autograd.grad(loss, generator.log_scale)[0]
    expected = torch.zeros(2)
    for row in range(3):
        batches = elbo.seen
        first, second = batches.first.noise[:, row], batches.second.noise[:, row]
        row_generator = lambda z: generator(z, context[row].expand(z.shape[:-1] + (2,)))  # noqa: E731,B023
        fixed = type("Batch", (), {})

        def site(noise, run=row_generator):
            q = type("Q", (), {"generator": staticmethod(run)})
            return type("Site", (), {"noise": noise, "distribution": q})

        fixed.first, fixed.second = site(first), site(second)
        log_p = dist.Normal(torch.ones(2), 0.5).to_event(1).log_prob
        velocity = by_definition(fixed, "rbf", log_p, lambda value: value)
        total = (velocity * row_generator(second)).sum()
        expected += torch.autograd.grad(total, generator.log_scale)[0]
    torch.testing.assert_close(found, expected)


class ExactHelper(nn.Module):
    """The inverse Jacobian of a linear generator."""

    matrix = torch.tensor([[1.0, 0.3, 0.0], [-0.5, 2.0, 0.4], [0.7, 0.0, 0.6]], dtype=torch.float64)

    def __init__(self, core_dim, value_dim):
        super().__init__()
        self.inverse = nn.Parameter(torch.linalg.inv(self.matrix).T.contiguous())

    def forward(self, core, gradients):
        return gradients @ self.inverse.T


def test_both_jacobians_give_one_gradient():
    generator = nn.Linear(3, 3)
    generator.weight.data.copy_(ExactHelper.matrix)

    guide = guide_of(generator, 3)
    gradients = []
    for options in ({}, {"jacobian": "helper", "helper": ExactHelper, "helper_optim": {"lr": 0.0}}):
        elbo = GPVI_ELBO(5, **options)
        elbo.loss(target, guide)
        pyro.set_rng_seed(1)
        loss = elbo.differentiable_loss(target, guide)
        gradients.append(torch.autograd.grad(loss, list(generator.parameters())))
    torch.testing.assert_close(*gradients)


def test_helper_learns_the_inverse():
    generator = nn.Linear(3, 3)
    generator.weight.data.copy_(ExactHelper.matrix)

    guide = guide_of(generator, 3)

    class Linear(ExactHelper):
        def __init__(self, core_dim, value_dim):
            super().__init__(core_dim, value_dim)
            nn.init.zeros_(self.inverse)

    elbo = GPVI_ELBO(10, "helper", helper=Linear, helper_optim={"lr": 0.03})
    for _ in range(300):
        elbo.differentiable_loss(target, guide)
    expected = torch.linalg.inv(ExactHelper.matrix).T
    torch.testing.assert_close(elbo.networks["x"].inverse.detach(), expected, rtol=0, atol=0.05)
    before = elbo.networks["x"].inverse.clone()
    elbo.loss(target, guide)
    assert elbo.networks["x"].inverse.equal(before)  # evaluation trains nothing


SMALL_HELPER = {
    "jacobian": "helper",
    "helper": partial(GPVIHelper, width=32),
    "helper_optim": {"lr": 3e-3},
}


@pytest.mark.parametrize("options", [{}, SMALL_HELPER])
def test_finds_a_gaussian_roughly(options):
    check_finds_a_gaussian_roughly(GPVI_ELBO(20, **options, compile="trace"))


def test_arguments_and_refusals():
    for arguments, message in [
        ({"num_particles": 1}, "num_particles must be at least 2"),
        ({"jacobian": "none"}, 'jacobian must be "exact" or "helper"'),
        ({"kernel": "linear"}, 'kernel must be "rbf" or "imq"'),
    ]:
        with pytest.raises(ValueError, match=message):
            GPVI_ELBO(**arguments)
    normal = dist.Normal(torch.ones(3), 1.0).to_event(1)
    amortised = ResidualGenerator(3, 1, context_dim=2)
    with_context = Implicit(amortised, 3, context=torch.zeros(2))
    for q, options, message in [
        (Implicit(nn.Linear(2, 3), 2), {}, "'x' turns 2 into 3. Cure.*AutoregressiveGenerator"),
        (SemiImplicit(nn.Linear(3, 3), 3, 0.1), {}, "'x'.*SemiImplicit.*Cure"),
        (Implicit(nn.Linear(3, 3), normal), {}, "GPVI_ELBO needs standard normal.*'x'.*Cure"),
        (with_context, {"jacobian": "helper"}, "'x' has a context.*Cure"),
    ]:
        with pytest.raises(ValueError, match=message):
            GPVI_ELBO(4, **options).differentiable_loss(target, lambda q=q: pyro.sample("x", q))

    def model():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(loc.sum(-1, keepdim=True).expand((3,)), 1.0).to_event(1))

    def guide():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", Implicit(amortised, 3, context=loc))

    with pytest.raises(ValueError, match="'x' depends on other latents.*Cure"):
        GPVI_ELBO(4).differentiable_loss(model, guide)
