# SPDX-License-Identifier: Apache-2.0
"""The sinh-arcsinh transformation: its formula, its derivatives, its inverse and its density."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.ops.sinh_arcsinh import (
    sinh_arcsinh,
    sinh_arcsinh_inverse,
    sinh_arcsinh_log_derivative,
    sinh_arcsinh_slopes,
)

# (skew, tail), with the bounds of AutoregressiveGenerator at the end.
SHAPES = [(0.0, 0.0), (0.7, 0.0), (0.0, 0.5), (-1.2, 0.8), (0.9, -0.6), (3.0, 1.5), (-3.0, -1.5)]
shapes = pytest.mark.parametrize("skew, tail", SHAPES)


def double(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor(number, dtype=torch.float64) for number in numbers]


def points() -> torch.Tensor:
    return torch.linspace(-8, 8, 1001, dtype=torch.float64)


@shapes
def test_formula(skew, tail):
    def jones_pewsey(z):
        return math.sinh(math.exp(tail) * math.asinh(z) + skew)

    expected = [
        (jones_pewsey(z) - jones_pewsey(0.0)) / (math.exp(tail) * math.cosh(skew))
        for z in points().tolist()
    ]
    torch.testing.assert_close(
        sinh_arcsinh(points(), *double(skew, tail)), torch.tensor(expected, dtype=torch.float64)
    )


def test_is_the_identity_at_zero():
    torch.testing.assert_close(sinh_arcsinh(points(), *double(0.0, 0.0)), points())


@shapes
def test_derivatives(skew, tail):
    arguments = [points(), *(number.expand(1001).clone() for number in double(skew, tail))]
    for argument in arguments:
        argument.requires_grad_()
    expected = torch.autograd.grad(sinh_arcsinh(*arguments).sum(), arguments)
    torch.testing.assert_close(sinh_arcsinh_slopes(*arguments), expected)
    log_derivative = sinh_arcsinh_log_derivative(*arguments)
    torch.testing.assert_close(log_derivative, expected[0].log())
    assert expected[0].min() > 0
    origin = sinh_arcsinh_log_derivative(*double(0.0, skew, tail))
    torch.testing.assert_close(origin, torch.zeros_like(origin))

    # Second derivatives too: the log-determinant is differentiated in turn.
    slope = torch.autograd.grad(sinh_arcsinh(*arguments).sum(), arguments[0], create_graph=True)[0]
    torch.testing.assert_close(
        torch.autograd.grad(log_derivative.sum(), arguments),
        torch.autograd.grad(slope.log().sum(), arguments),
    )


@shapes
def test_inverse(skew, tail):
    z, shape = points(), double(skew, tail)
    torch.testing.assert_close(sinh_arcsinh_inverse(sinh_arcsinh(z, *shape), *shape), z)


@shapes
def test_density_integrates_to_one_and_is_unimodal(skew, tail):
    # On a grid of values, wherever the mass is: even in z, the integral one of values.
    shape = double(skew, tail)
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    value = sinh_arcsinh(z, *shape)
    noise = sinh_arcsinh_inverse(value, *shape)
    log_normal = torch.distributions.Normal(*double(0.0, 1.0)).log_prob(noise)
    log_q = log_normal - sinh_arcsinh_log_derivative(noise, *shape)
    torch.testing.assert_close(torch.trapezoid(log_q.exp(), value).item(), 1.0, rtol=0, atol=1e-5)
    rises = log_q.diff() > 0
    assert (rises[1:] & ~rises[:-1]).sum() == 0  # never up again


@shapes
def test_float32_far_out(skew, tail):
    z = torch.tensor([-8.0, -1.0, -1e-3, 1e-3, 1.0, 8.0], requires_grad=True)
    shape = [number.float() for number in double(skew, tail)]
    exact = [z.detach().double(), *double(skew, tail)]
    value, log_derivative = sinh_arcsinh(z, *shape), sinh_arcsinh_log_derivative(z, *shape)
    options = {"rtol": 1e-4, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(value, sinh_arcsinh(*exact), **options)
    torch.testing.assert_close(log_derivative, sinh_arcsinh_log_derivative(*exact), **options)
    (gradient,) = torch.autograd.grad(value.square().sum() + log_derivative.sum(), z)
    assert gradient.isfinite().all()
