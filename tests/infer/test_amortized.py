# SPDX-License-Identifier: Apache-2.0
"""Amortised SVGD and KSD: their gradients by definition, their values, and short runs."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import transforms as T
from torch import nn

from pyro_implicit import MLP, Implicit, ResidualGenerator, SemiImplicit
from pyro_implicit.infer import AmortizedKSD_ELBO, AmortizedSVGD_ELBO
from tests.infer.helpers import PRECISION_3D as PRECISION
from tests.infer.helpers import check_finds_a_gaussian_roughly, guide_of
from tests.infer.helpers import gaussian_3d as target

pytestmark = pytest.mark.usefixtures("double")


def score(x):
    return -(x - 1) @ PRECISION


def loss_gradients(elbo, model, guide, parameters, seed):
    pyro.set_rng_seed(seed)
    loss = elbo.differentiable_loss(model, guide)
    return torch.autograd.grad(loss, parameters)


def stein_velocity(first, second, kernel):
    """By the definition, pair by pair."""
    distances = torch.pdist(second).sort().values
    bandwidth = distances[(len(distances) - 1) // 2] / math.sqrt(2 * math.log(len(second)))
    velocity = torch.zeros(second.shape)
    for theta in first:
        for i, other in enumerate(second):
            point = theta.clone().requires_grad_()
            square = (point - other).square().sum() / bandwidth**2
            k = (-0.5 * square).exp() if kernel == "rbf" else 1 / (1 + square).sqrt()
            (slope,) = torch.autograd.grad(k, point)
            velocity[i] -= (score(theta) * k.detach() + slope) / len(first)
    return velocity


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("framed", [False, True])
def test_svgd_gradient_is_the_velocity(kernel, framed):
    generator = MLP(2, 3, (5,))
    draws = {}

    def model():
        draws["x"] = pyro.sample(
            "x", dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION)
        )

    guide = guide_of(generator)
    push = lambda value: value  # noqa: E731
    if framed:
        matrix = torch.tensor([[0.7, 0.0, 0.0], [-0.9, 1.2, 0.0], [0.4, 0.5, 0.3]])
        transform = T.LowerCholeskyAffine(torch.ones(3), matrix)
        push = lambda value: 1 + value @ matrix.T  # noqa: E731

        def guide():
            q = dist.TransformedDistribution(Implicit(generator, 2), [transform])
            pyro.sample("x", q)

    elbo = AmortizedSVGD_ELBO(6, kernel, vectorize_particles="plate")
    elbo.loss(model, guide)
    parameters = list(generator.parameters())
    found = loss_gradients(elbo, model, guide, parameters, 1)
    pyro.set_rng_seed(1)
    first, second = (push(generator(torch.randn(6, 2))) for _ in range(2))
    torch.testing.assert_close(draws["x"], first)
    velocity = stein_velocity(first.detach(), second.detach(), kernel)
    expected = torch.autograd.grad((velocity * second).sum() / 6, parameters)
    torch.testing.assert_close(found, expected)


def test_svgd_weights_and_plates():
    generator = ResidualGenerator(2, 1, (5,), context_dim=2, output_scale=1.0)
    context = torch.randn(3, 2)

    def pair(rows):
        def model():
            with pyro.plate("rows", len(rows)):
                pyro.sample("z", dist.Normal(torch.ones(2), 0.5).to_event(1))

        def guide():
            with pyro.plate("rows", len(rows)):
                noise = dist.Normal(torch.zeros(2), 1.0).to_event(1)
                pyro.sample("z", Implicit(generator, Fixed(noise, rows), context=context[rows]))

        return model, guide

    fixed = torch.randn(2, 4, 3, 2)
    calls = []

    class Fixed(dist.Independent):
        """Standard normal noise that is the same in every run of several particles."""

        def __init__(self, noise, rows):
            self.rows = rows
            super().__init__(noise.base_dist, 1)

        def expand(self, batch_shape, _instance=None):
            new = super().expand(batch_shape, self._get_checked_instance(Fixed, _instance))
            new.rows = self.rows
            return new

        def rsample(self, sample_shape=torch.Size()):  # noqa: B008
            shape = sample_shape + self.batch_shape
            if shape[0] != 4:
                return torch.zeros(shape + (2,))
            calls.append(shape)
            return fixed[len(calls) % 2, :, self.rows]

    def gradient(rows, **weights):
        elbo = AmortizedSVGD_ELBO(4, **weights)
        model, guide = pair(rows)
        elbo.loss(model, guide)
        calls.clear()
        return loss_gradients(elbo, model, guide, [generator.log_scale], 1)[0]

    whole = gradient([0, 1, 2])
    torch.testing.assert_close(whole, sum(gradient([row]) for row in range(3)))
    prior, entropy = gradient([0, 1, 2], entropy_weight=0.0), gradient([0, 1, 2], prior_weight=0.0)
    torch.testing.assert_close(whole, prior + entropy)
    assert (prior.abs() > 0.1).any() and (entropy.abs() > 0.1).any()


@pytest.mark.parametrize("elbo_class", [AmortizedSVGD_ELBO, AmortizedKSD_ELBO])
@pytest.mark.parametrize("count, exact", [(200, True), (5, False)])
def test_value_has_the_entropy_of_the_moments(elbo_class, count, exact):
    matrix = torch.tensor([[1.0, 0.3, 0.0], [-0.5, 2.0, 0.4], [0.7, 0.0, 0.6]])
    guide = guide_of(lambda z: z @ matrix.T, 3)
    elbo = elbo_class(count)
    losses = torch.tensor([elbo.loss(target, guide) for _ in range(50)])
    variances = (matrix @ matrix.T).diagonal()
    covariance = matrix @ matrix.T if exact else variances.diag()
    q = dist.MultivariateNormal(torch.zeros(3), covariance)
    p = dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION)
    second = matrix @ matrix.T + torch.ones(3, 3)
    cross = -0.5 * (PRECISION * second).sum() + p.log_prob(torch.ones(3))
    error = losses.mean() + q.entropy() + cross
    assert error.abs() < 4 * losses.std() / 50**0.5


class Affine(nn.Module):
    """The critic that a Gaussian and an affine generator want."""

    def __init__(self, value_dim, context_dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(value_dim, value_dim))
        self.bias = nn.Parameter(torch.zeros(value_dim))

    def forward(self, values, context=None):
        return values @ self.weight.T + self.bias


@pytest.mark.parametrize("framed", [False, True])
def test_critic_learns_the_difference_of_scores(framed):
    """In the space of the generator's values, where the frame belongs to the target."""
    matrix = torch.tensor([[1.0, 0.3, 0.0], [-0.5, 2.0, 0.4], [0.7, 0.0, 0.6]])
    generator = nn.Linear(3, 3, bias=False)
    generator.weight.data.copy_(matrix)
    frame = torch.tensor([[0.7, 0.0, 0.0], [-0.9, 1.2, 0.0], [0.4, 0.5, 0.3]])
    frame = frame if framed else torch.eye(3)
    transform = T.LowerCholeskyAffine(torch.zeros(3), frame)

    def guide():
        pyro.sample("x", dist.TransformedDistribution(Implicit(generator, 3), [transform]))

    elbo = AmortizedKSD_ELBO(200, Affine, 10, {"lr": 0.05})
    for _ in range(40):
        elbo.differentiable_loss(target, guide).backward()
        elbo.optimisers["x"].param_groups[0]["lr"] *= 0.93
    weight = -frame.T @ PRECISION @ frame + torch.linalg.inv(matrix @ matrix.T)
    critic = elbo.networks["x"]
    torch.testing.assert_close(critic.weight.detach(), weight, rtol=0.1, atol=0.15)
    torch.testing.assert_close(critic.bias.detach(), frame.T @ PRECISION.sum(0), rtol=0.1, atol=0.1)


def test_critic_of_a_change_of_variables_and_of_a_context():
    """Log-normal in the model, logarithms at the generator; the mean of each row in its context."""
    loc = torch.tensor([[-1.0], [2.0]])

    def model():
        with pyro.plate("rows", 2):
            pyro.sample("x", dist.LogNormal(loc.squeeze(-1), 0.5))

    def guide():
        with pyro.plate("rows", 2):
            q = Implicit(lambda z, c: z.squeeze(-1) * scale, 1, context=loc)
            pyro.sample("x", dist.TransformedDistribution(q, T.ExpTransform()))

    class Conditional(nn.Module):
        def __init__(self, value_dim, context_dim):
            super().__init__()
            self.of_value = nn.Parameter(torch.zeros(value_dim))
            self.of_context = nn.Parameter(torch.zeros(context_dim))

        def forward(self, values, context):
            return values * self.of_value + context * self.of_context

    scale = torch.tensor(1.0, requires_grad=True)
    elbo = AmortizedKSD_ELBO(100, Conditional, 10, {"lr": 0.05})
    for _ in range(40):
        elbo.differentiable_loss(model, guide).backward()
        elbo.optimisers["x"].param_groups[0]["lr"] *= 0.93
    critic = elbo.networks["x"]  # -(v - c) / 0.25 of the target and v of q
    assert critic.of_value.item() == pytest.approx(-3, abs=0.2)
    assert critic.of_context.item() == pytest.approx(4, abs=0.2)


def test_ksd_gradient_is_the_critic_and_weighs_as_the_entropy():
    generator = MLP(2, 3, (5,))
    parameters = list(generator.parameters())

    def masked_target():
        with poutine.scale(scale=3.0):
            target()

    def masked_guide():
        with poutine.scale(scale=3.0):
            guide_of(generator)()

    class Known(Affine):
        def __init__(self, value_dim, context_dim):
            super().__init__(value_dim, context_dim)
            self.weight.data.copy_(PRECISION.tril())

    pyro.set_rng_seed(1)
    x = generator(torch.randn(6, 2))
    change = x.detach() @ PRECISION.tril().T
    expected = torch.autograd.grad(-(change * x).sum() / 6, parameters)
    for model, guide, factor, weights in [
        (target, guide_of(generator), 1.0, {}),
        (masked_target, masked_guide, 3.0, {}),
        (target, guide_of(generator), 0.5, {"entropy_weight": 0.5}),
    ]:
        elbo = AmortizedKSD_ELBO(6, Known, 1, {"lr": 0.0}, **weights)
        elbo.loss(model, guide)
        found = loss_gradients(elbo, model, guide, parameters, 1)
        torch.testing.assert_close(found, tuple(factor * g for g in expected))
    elbo = AmortizedKSD_ELBO(6, Known, entropy_weight=0.0)  # nothing left but the target's score
    guide = guide_of(generator)
    elbo.loss(target, guide)
    found = loss_gradients(elbo, target, guide, parameters, 1)
    expected = torch.autograd.grad(
        -(score(x.detach()) * generator_again(generator)).sum() / 6, parameters
    )
    torch.testing.assert_close(found, expected)


def generator_again(generator):
    pyro.set_rng_seed(1)
    return generator(torch.randn(6, 2))


@pytest.mark.parametrize("method", ["svgd", "ksd"])
def test_finds_a_gaussian_roughly(method):
    elbo = {
        "svgd": lambda: AmortizedSVGD_ELBO(20, compile="trace"),
        "ksd": lambda: AmortizedKSD_ELBO(
            20, critic_steps=2, critic_optim={"lr": 1e-2}, compile="trace"
        ),
    }[method]()
    check_finds_a_gaussian_roughly(elbo)


def test_semi_implicit_sites_and_refusals():
    def guide():
        pyro.sample("x", SemiImplicit(MLP(2, 3), 2, 0.1))

    for elbo in (AmortizedSVGD_ELBO(4), AmortizedKSD_ELBO(4)):
        assert torch.isfinite(elbo.differentiable_loss(target, guide))
    for elbo_class, arguments, message in [
        (AmortizedSVGD_ELBO, {"num_particles": 1}, "num_particles must be at least 2"),
        (AmortizedSVGD_ELBO, {"kernel": "linear"}, 'kernel must be "rbf" or "imq"'),
        (AmortizedKSD_ELBO, {"num_particles": 1}, "num_particles must be at least 2"),
        (AmortizedKSD_ELBO, {"critic_steps": 0}, "critic_steps must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            elbo_class(**arguments)
    generator = MLP(2, 3, context_dim=2)

    def model():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(loc.sum(-1, keepdim=True).expand((3,)), 1.0).to_event(1))

    def conditional():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", Implicit(generator, 2, context=loc))

    with pytest.raises(ValueError, match="'x' depends on other latents.*Cure"):
        AmortizedSVGD_ELBO(4).differentiable_loss(model, conditional)
    pyro.clear_param_store()
    AmortizedKSD_ELBO(4).differentiable_loss(model, conditional).backward()
    assert generator.layers[0].weight.grad.ne(0).any()


@pytest.mark.parametrize("elbo_class", [AmortizedKSD_ELBO, AmortizedSVGD_ELBO])
def test_collapsed_guides_say_so(elbo_class):
    flat = guide_of(lambda z: z * torch.tensor([1.0, 1.0, 0.0]), noise_dim=3)
    with pytest.raises(ValueError, match="site 'x' lie on a hyperplane.*Cure: a smaller"):
        elbo_class(10).loss(target, flat)
