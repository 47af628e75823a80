# SPDX-License-Identifier: Apache-2.0
"""HSIVI: its gradient by definition, its critic against exact Gaussians, and its layers."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import HSIVI_ELBO, MLP, SemiImplicit
from pyro_implicit.infer import LayeredGenerator
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from tests.infer.helpers import PRECISION, FramedGuide, check_finds_a_correlated_gaussian, quartic
from tests.infer.helpers import quartic_model as model

pytestmark = pytest.mark.usefixtures("double")


def framed_guide(num_layers: int) -> FramedGuide:
    layers = [MLP(2, 2, hidden=(4,), activation="tanh") for _ in range(num_layers)]
    return FramedGuide(layers[0] if num_layers == 1 else LayeredGenerator(layers, 0.6))


def critic(value_dim: int, context_dim: int) -> nn.Module:
    pyro.set_rng_seed(7)
    return MLP(value_dim, value_dim, hidden=(3,), activation="tanh", context_dim=context_dim)


def score(value: Tensor, factor: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda v: quartic(1 + factor * v)))(value)


def explicit(guide: FramedGuide, num_particles: int, num_layers: int) -> Tensor:
    """The objective as a function of the parameters, from the noise of seed 1."""
    network = critic(2, num_layers if num_layers > 1 else 0)
    pyro.set_rng_seed(1)
    noise = torch.randn(num_particles, 2 * num_layers)
    eta = torch.randn(num_particles, 2)
    total = torch.zeros(())
    for k in range(num_particles):
        if num_layers == 1:
            scale = guide.log_scale.exp()
            value, error = guide.generator(noise[k]), eta[k]
        else:
            value, layer = noise[k, :2], k % num_layers
            for t in range(layer + 1):
                value = guide.generator.layers[t](value.detach())
                last = t == num_layers - 1
                scale = guide.log_scale.exp() if last else guide.generator.log_scales[t].exp()
                error = eta[k] if last else noise[k, 2 * t + 2 : 2 * t + 4]
                if t < layer:
                    value = value + scale * error
        value = value + scale * error
        s, inputs = score(value[None], guide.factor)[0], []
        if num_layers > 1:
            beta = (layer + 1) / num_layers
            s = beta * s - (1 - beta) * value
            inputs = [nn.functional.one_hot(torch.tensor(layer), num_layers).double()]
        f = s - network(value, *inputs)
        total = total + (2 * f * (s + error / scale) - f.square()).sum() / num_particles
    return total


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("mode", ["vmap", "plate", False])
def test_gradient_is_that_of_the_objective(num_layers, mode):
    guide = framed_guide(num_layers)
    parameters = list(guide.parameters())
    elbo = HSIVI_ELBO(6, critic, critic_optim={"lr": 0.0}, vectorize_particles=mode)
    elbo.differentiable_loss(model, guide)  # the first step draws for its checks
    expected = torch.autograd.grad(explicit(guide, 6, num_layers), parameters)
    pyro.set_rng_seed(1)
    found = torch.autograd.grad(elbo.differentiable_loss(model, guide), parameters)
    torch.testing.assert_close(found, expected)


def test_the_divergence_is_fisher_s_with_a_trained_critic():
    """q = N(b, A A^T + s^2) and a linear critic, which represents its score."""
    q = SemiImplicit(nn.Linear(2, 2), 2, torch.tensor([0.6, 0.9])).expand((4000,))
    linear = lambda value_dim, context_dim: nn.Linear(value_dim, value_dim)  # noqa: E731
    elbo = HSIVI_ELBO(4000, linear, critic_steps=4, critic_optim={"lr": 0.05})
    weight, bias = q.generator.weight.detach(), q.generator.bias.detach()
    covariance = weight @ weight.T + q.scale.square().diag()
    found = []
    for _ in range(100):
        noise, value, _ = q.draw()
        value = value.detach()
        site = ImplicitSite("x", q, noise, value, value)
        conditional = (value - q.generate(noise)).detach() / q.scale.square()
        scores = -(value - 1) @ PRECISION
        found.append(elbo.divergence(site, value, scores, conditional).sum().item())
    # s_p - s_q = M (x - b) + v under q
    matrix = covariance.inverse() - PRECISION
    shift = -(bias - 1) @ PRECISION
    expected = shift @ shift + (matrix @ covariance @ matrix).trace()
    assert sum(found[-20:]) / 20 == pytest.approx(expected.item(), rel=0.05)
    network = elbo.networks["x"]
    torch.testing.assert_close(network.weight.detach(), -covariance.inverse(), rtol=0, atol=0.08)


def test_layers_are_a_semi_implicit_distribution_of_their_noise():
    generator = LayeredGenerator([MLP(3, 2), MLP(2, 2), MLP(2, 2)], 0.3)
    noise = torch.randn(5, 7)
    first = generator.layers[0](noise[:, :3]) + 0.3 * noise[:, 3:5]
    second = generator.layers[1](first) + 0.3 * noise[:, 5:]
    torch.testing.assert_close(generator(noise), generator.layers[2](second))
    with pytest.raises(ValueError, match="must turn 2 numbers into 2"):
        LayeredGenerator([MLP(3, 2), MLP(3, 2)])


def test_finds_a_correlated_gaussian():
    generator = LayeredGenerator([MLP(2, 2, hidden=(40,), activation="relu") for _ in range(2)])
    elbo = HSIVI_ELBO(128, critic_steps=2, critic_optim={"lr": 1e-2}, num_mixing=1, compile="trace")
    check_finds_a_correlated_gaussian(generator, elbo, 300, atol=0.1)


def test_refusals():
    for name in ("critic_steps", "num_mixing"):
        with pytest.raises(ValueError, match=name):
            HSIVI_ELBO(4, **{name: 0})
    with pytest.raises(ValueError, match="'x' has 3 layers, but HSIVI_ELBO has 2.*Cure"):
        HSIVI_ELBO(2).loss_and_grads(model, framed_guide(3))
    generator = LayeredGenerator([MLP(2, 2), MLP(2, 2)]).double()

    def positive() -> None:
        pyro.sample("x", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))

    def constrained() -> None:
        q = SemiImplicit(generator, 4, 0.5)
        exp = dist.transforms.ExpTransform()
        pyro.sample("x", dist.TransformedDistribution(q, [exp]))

    with pytest.raises(ValueError, match=r"affine maps only, but site 'x'.*ExpTransform.*Cure"):
        HSIVI_ELBO(4).loss_and_grads(positive, constrained)
