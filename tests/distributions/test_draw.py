# SPDX-License-Identifier: Apache-2.0
"""What a draw tells: its noise and, from the same pass, the generator's derivative there."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import MLP, AutoregressiveGenerator, Implicit, ResidualGenerator, SemiImplicit
from pyro_implicit.ops import batch_jacobian

KINDS = ["implicit", "semi_implicit"]
DOUBLE = torch.float64


def make(kind: str, generator, noise=3, **kwargs) -> Implicit:
    if kind == "implicit":
        return Implicit(generator, noise, **kwargs)
    return SemiImplicit(generator, noise, scale=0.1, **kwargs)


def spread(generator: nn.Module) -> nn.Module:
    for parameter in generator.parameters():
        nn.init.normal_(parameter, std=0.3)
    return generator.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linearise", [False, True])
def test_rsample_is_the_value_of_a_draw(kind, linearise):
    q = make(kind, spread(MLP(3, 2))).expand((4,))
    torch.manual_seed(1)
    value = q.rsample((5,))
    torch.manual_seed(1)
    draw = q.draw((5,), linearise=linearise)
    torch.testing.assert_close(draw.value, value)
    assert (draw.linearisation is not None) == linearise


@pytest.mark.parametrize("sample_shape", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("batch_shape", [(), (5, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_linearisation_at_the_noise_in_the_context(kind, batch_shape, sample_shape):
    torch.manual_seed(0)
    context = torch.randn(batch_shape + (2,), dtype=DOUBLE)
    q = make(kind, spread(MLP(3, 5, context_dim=2)), context=context)
    noise, value, linearisation = q.draw(sample_shape, linearise=True)
    expected, jacobian = batch_jacobian(q.generate, noise)
    torch.testing.assert_close(linearisation.value, expected)
    torch.testing.assert_close(linearisation.jacobian(), jacobian)
    assert value.shape == sample_shape + batch_shape + (5,)
    if kind == "implicit":
        assert value.equal(linearisation.value)
    else:  # around the linearised value
        assert 0 < (value - linearisation.value).abs().max() < 1.0


class Matrix(nn.Module):
    """A foreign module with matrix values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=DOUBLE)

    def forward(self, noise: Tensor) -> Tensor:
        return self.linear(noise).tanh().unflatten(-1, (2, 2))


@pytest.mark.parametrize("generator", [Matrix(), lambda z: z.exp().unsqueeze(-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_modules_and_functions(kind, generator):
    noise = dist.Normal(torch.zeros(3, dtype=DOUBLE), 1.0).to_event(1)
    q = make(kind, generator, noise).expand((4,))
    draw = q.draw((5,), linearise=True)
    assert draw.value.shape == (5, 4) + q.event_shape
    flat = lambda z: q.generate(z).flatten(-2)  # noqa: E731
    expected, jacobian = batch_jacobian(flat, draw.noise)
    torch.testing.assert_close(draw.linearisation.value, expected)
    torch.testing.assert_close(draw.linearisation.jacobian(), jacobian)


@pytest.mark.parametrize("generator_class", [AutoregressiveGenerator, "residual", "function"])
def test_log_abs_det_can_be_differentiated_in_the_noise(generator_class):
    torch.manual_seed(0)
    if generator_class == "residual":
        generator = spread(ResidualGenerator(3, 2))
    elif generator_class == "function":
        generator = lambda z: z.sinh() + z.sum(-1, keepdim=True)  # noqa: E731
    else:
        generator = spread(generator_class(3))
    noise = dist.Normal(torch.zeros(3, dtype=DOUBLE), 1.0).to_event(1)
    q = Implicit(generator, noise).expand((6,))
    noise, value, linearisation = q.draw(linearise=True, noise_gradient=True)
    assert noise.is_leaf and noise.requires_grad
    found = torch.autograd.grad(linearisation.log_abs_det().sum(), noise, retain_graph=True)[0]
    step = 1e-5
    for i in range(3):
        ends = []
        for sign in (1, -1):
            moved = noise.detach().clone()
            moved[:, i] += sign * step
            jacobian = batch_jacobian(q.generate, moved)[1]
            ends.append(torch.linalg.slogdet(jacobian).logabsdet)
        torch.testing.assert_close(found[:, i], (ends[0] - ends[1]) / (2 * step), rtol=0, atol=1e-7)
    # The value hangs on the same leaf.
    weight = torch.randn_like(value)
    (pulled,) = torch.autograd.grad(value, noise, weight)
    jacobian = batch_jacobian(q.generate, noise.detach())[1]
    torch.testing.assert_close(pulled, (jacobian.mT @ weight.unsqueeze(-1)).squeeze(-1))


def test_without_a_wish_the_noise_has_no_gradient():
    noise = Implicit(MLP(3, 2), 3).draw(linearise=True).noise
    assert not noise.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_noise_with_parameters_of_its_own(kind):
    """They get their gradient by the draw, unless the noise is made a leaf."""
    loc = torch.zeros(3, requires_grad=True)
    q = make(kind, MLP(3, 2), dist.Normal(loc, 1.0).to_event(1))
    (gradient,) = torch.autograd.grad(q.draw(linearise=True).value.sum(), loc)
    assert gradient.abs().max() > 0
    draw = q.draw(linearise=True, noise_gradient=True)
    assert torch.autograd.grad(draw.value.sum(), loc, allow_unused=True) == (None,)


class Half(nn.Module):
    """Says three values and returns two."""

    output_dim = 3

    def forward(self, noise: Tensor) -> Tensor:
        return noise[..., :2]


@pytest.mark.parametrize("linearise", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_refuses_values_of_another_size(kind, linearise):
    q = make(kind, Half())
    with pytest.raises(ValueError, match=r"shape \(4, 2\) .*must return \(4, 3\)"):
        q.draw((4,), linearise=linearise)
