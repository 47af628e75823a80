# SPDX-License-Identifier: Apache-2.0
"""Values whose gradient goes elsewhere, and second batches, which the gradient goes to."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms as T

from pyro_implicit import MLP, Implicit
from pyro_implicit.distributions import draw_through
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    second_batch,
    send_gradient,
    send_gradients,
)

pytestmark = pytest.mark.usefixtures("double")

MATRIX = torch.tensor([[0.7, 0.0, 0.0], [-0.9, 1.2, 0.0], [0.4, 0.5, 0.3]], dtype=torch.float64)


def test_gradient_goes_elsewhere():
    draw, value = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    sent = send_gradient(value, draw, lambda gradient: gradient.flip(0))
    assert sent.equal(value)
    sent.square().sum().backward()
    assert value.grad is None
    torch.testing.assert_close(draw.grad, 2 * value.detach().flip(0), rtol=0, atol=0)


def test_two_gradients_arrive_together():
    draw = torch.randn(4, 3, requires_grad=True)
    sent, zeros = send_gradients(draw, torch.zeros(4), lambda a, b: a + b.unsqueeze(-1))
    assert sent.equal(draw) and zeros.equal(torch.zeros(4))
    (sent.square().sum() + (zeros * torch.arange(4.0)).sum()).backward()
    expected = 2 * draw.detach() + torch.arange(4.0).unsqueeze(-1)
    torch.testing.assert_close(draw.grad, expected)


def drawn() -> ImplicitSite:
    transforms = [T.LowerCholeskyAffine(torch.ones(3), MATRIX, cache_size=1), T.ExpTransform(1)]
    fn = dist.TransformedDistribution(Implicit(MLP(2, 3), 2).expand([5]), transforms)
    through = draw_through(fn, lambda q: q.draw())
    return ImplicitSite(
        "x",
        through.distribution,
        through.draw.noise,
        through.draw.value,
        through.value,
        through.transforms,
        through.log_abs_det,
        batch_shape=fn.batch_shape,
    )


def test_second_batch():
    site = drawn()
    second = second_batch(site)
    assert second.noise.shape == site.noise.shape and (second.noise != site.noise).all()
    torch.testing.assert_close(second.value, site.distribution.generator(second.noise))
    torch.testing.assert_close(second.draw, (1 + second.value @ MATRIX.T).exp())
    assert second.draw.requires_grad


def test_gradient_at_draw():
    """What it gives arrives at the generator as it was."""
    site = drawn()
    gradient = torch.randn(5, 3)
    (arrived,) = torch.autograd.grad(site.draw, site.value, site.gradient_at_draw(gradient))
    torch.testing.assert_close(arrived, gradient)
