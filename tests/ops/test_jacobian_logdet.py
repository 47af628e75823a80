# SPDX-License-Identifier: Apache-2.0
"""Exact log-determinants and densities of the linearised generator against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_implicit.ops import covariance_log_det, linearised_log_density

SIZES = [(5, 2), (4, 4), (3, 6), (1, 1), (1, 3), (3, 1)]
BATCH_SHAPES = [(), (4,), (2, 3)]


def problem(batch_shape: tuple[int, ...], m: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    jacobian = torch.randn(batch_shape + (m, d), dtype=torch.double)
    scale = 0.2 + torch.rand(batch_shape + (m,), dtype=torch.double)
    residual = torch.randn(batch_shape + (m,), dtype=torch.double)
    return residual.requires_grad_(), jacobian.requires_grad_(), scale.requires_grad_()


def covariance(jacobian: Tensor, scale: Tensor) -> Tensor:
    return jacobian @ jacobian.mT + torch.diag_embed(scale.square())


def assert_same_gradient(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    weight = 1 + torch.rand_like(expected)  # so that no element's gradient hides another's
    torch.testing.assert_close(
        torch.autograd.grad((weight * found).sum(), inputs),
        torch.autograd.grad((weight * expected).sum(), inputs),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("m,d", SIZES)
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_covariance_log_det_matches_dense(batch_shape, m, d):
    _, jacobian, scale = problem(batch_shape, m, d)
    found = covariance_log_det(jacobian, scale)
    expected = torch.linalg.slogdet(covariance(jacobian, scale)).logabsdet
    assert found.shape == batch_shape
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert_same_gradient(found, expected, (jacobian, scale))


@pytest.mark.parametrize("m,d", SIZES)
def test_covariance_log_det_gradcheck(m, d):
    _, jacobian, scale = problem((2,), m, d)
    assert torch.autograd.gradcheck(covariance_log_det, (jacobian, scale))


@pytest.mark.parametrize("m,d", SIZES)
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_linearised_log_density_matches_the_gaussian(batch_shape, m, d):
    residual, jacobian, scale = problem(batch_shape, m, d)
    found = linearised_log_density(residual, jacobian, scale)
    expected = torch.distributions.MultivariateNormal(
        torch.zeros(m, dtype=torch.double), covariance(jacobian, scale)
    ).log_prob(residual)
    assert found.shape == batch_shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_same_gradient(found, expected, (residual, jacobian, scale))


@pytest.mark.parametrize("m,d", [(40, 7), (7, 40)])
def test_scales_of_different_sizes(m, d):
    """Per-coordinate scales over four orders of magnitude, where a mixed-up index shows."""
    residual, jacobian, _ = problem((), m, d)
    scale = torch.logspace(-3, 1, m, dtype=torch.double)
    dense = covariance(jacobian, scale)
    expected = torch.linalg.slogdet(dense).logabsdet
    torch.testing.assert_close(covariance_log_det(jacobian, scale), expected, rtol=1e-9, atol=1e-9)
    quadratic = residual @ torch.linalg.solve(dense, residual)
    expected = -0.5 * (quadratic + expected + m * math.log(2 * math.pi))
    found = linearised_log_density(residual, jacobian, scale)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("m,d", [(60, 20), (20, 60)])
def test_float32_is_accurate(m, d):
    residual, jacobian, scale = problem((3,), m, d)
    single = [tensor.detach().float() for tensor in (residual, jacobian, scale)]
    for function, inputs in (
        (covariance_log_det, (jacobian, scale)),
        (linearised_log_density, (residual, jacobian, scale)),
    ):
        found = function(*single[-len(inputs) :])
        assert found.dtype == torch.float
        torch.testing.assert_close(found.double(), function(*inputs), rtol=1e-4, atol=1e-3)


def steep(integers: bool) -> Tensor:
    """A Jacobian of rank 3, in float32, whose Gram matrix float32 cannot factorise.

    The products of integers are exact in float32, so that there only the factorisation fails.
    """
    for seed in range(100):
        torch.manual_seed(seed)
        left, right = torch.randn(100, 3), torch.randn(3, 80)
        jacobian = (8 * left).round() @ (17 * right).round() if integers else 1e3 * left @ right
        gram = jacobian.mT @ jacobian + torch.eye(80)
        exact = gram.double().equal(jacobian.double().mT @ jacobian.double() + torch.eye(80))
        if exact == integers and torch.linalg.cholesky_ex(gram).info > 0:
            return jacobian
    raise AssertionError("no such matrix")


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("tall", [True, False])
def test_float32_falls_back_to_float64(integers, tall):
    jacobian = steep(integers) if tall else steep(integers).mT
    scale = torch.ones(jacobian.shape[0])
    found = covariance_log_det(jacobian, scale)
    assert found.dtype == torch.float
    expected = covariance_log_det(jacobian.double(), scale.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("tall", [True, False])
def test_gradient_after_falling_back_to_float64(integers, tall):
    jacobian = (steep(integers) if tall else steep(integers).mT).requires_grad_()
    scale = torch.ones(jacobian.shape[0], requires_grad=True)
    found = torch.autograd.grad(covariance_log_det(jacobian, scale), (jacobian, scale))
    precise = jacobian.detach().double().requires_grad_(), scale.detach().double().requires_grad_()
    expected = torch.autograd.grad(covariance_log_det(*precise), precise)
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient.double() - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("m,d", [(4, 2), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_input_gives_nan_where_it_is(bad, dtype, m, d):
    residual, jacobian, scale = (tensor.detach().to(dtype) for tensor in problem((3,), m, d))
    good = covariance_log_det(jacobian, scale), linearised_log_density(residual, jacobian, scale)
    jacobian[1, 0, 0] = bad
    found = covariance_log_det(jacobian, scale), linearised_log_density(residual, jacobian, scale)
    for after, before in zip(found, good, strict=True):
        assert not after[1].isfinite()
        torch.testing.assert_close(after[[0, 2]], before[[0, 2]])
    assert found[0][1].isnan() or bad == math.inf
