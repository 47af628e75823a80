# SPDX-License-Identifier: Apache-2.0
"""The logarithm of the normal distribution function, and its derivatives far out."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import Target
from pyro_implicit.ops.log_space import log_ndtr


def derivatives(function, points):
    points = points.clone().requires_grad_()
    value = function(points)
    (first,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), points)
    return value.detach(), first.detach(), second


def test_twice_differentiable_near_zero():
    points = torch.linspace(-30.0, 8.0, 77, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_ndtr, points)
    assert torch.autograd.gradgradcheck(log_ndtr, points)
    assert (
        torch.func.vmap(torch.func.grad(torch.func.grad(log_ndtr)))(points.detach())
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_out(dtype):
    points = torch.tensor([-1e6, -1e4, -450.0, -400.0, -100.0, -15.0, -13.0], dtype=dtype)
    value, first, second = derivatives(log_ndtr, points)
    torch.testing.assert_close(value, torch.special.log_ndtr(points))
    # Mills' ratio as a continued fraction: x + 1 / (x + 2 / (x + 3 / ...)).
    x = -points.double()
    fraction = x
    for k in range(60, 0, -1):
        fraction = x + k / fraction
    torch.testing.assert_close(first.double(), fraction, rtol=1e-6, atol=0)
    excess = 1 / x  # h - x without the difference: the rest of the same fraction
    for k in range(60, 0, -1):
        excess = k / (x + excess)
    torch.testing.assert_close(second.double(), -fraction * excess, rtol=1e-4, atol=0)
    high = derivatives(log_ndtr, torch.tensor([20.0, 50.0, torch.inf], dtype=dtype))
    torch.testing.assert_close(torch.stack(high), torch.zeros(3, 3, dtype=dtype))


def test_models_have_it():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.factor("probit", torch.special.log_ndtr(1000.0 * x))

    points = torch.tensor([[-1.0], [-20.0]])
    _, score, hessian = Target(model).derivatives(points)
    torch.testing.assert_close(score, -1e6 * points - points / 100)
    torch.testing.assert_close(hessian.flatten(), torch.tensor([-1e6, -1e6]))
