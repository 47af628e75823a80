# SPDX-License-Identifier: Apache-2.0
"""Log-determinants that never store the Jacobian against the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_implicit.ops import (
    batch_jacobian,
    covariance_log_det,
    jacobian_products,
    smallest_singular_log_det,
    stochastic_log_det,
)


def products(jacobian: Tensor):
    """``v -> J v`` and ``u -> J^T u`` of a dense Jacobian."""
    return (
        lambda v: (jacobian @ v.unsqueeze(-1)).squeeze(-1),
        lambda u: (jacobian.mT @ u.unsqueeze(-1)).squeeze(-1),
    )


def problem(batch_shape: tuple[int, ...], m: int, d: int) -> tuple[Tensor, Tensor]:
    jacobian = torch.randn(batch_shape + (m, d), dtype=torch.double)
    scale = 0.2 + torch.rand(batch_shape + (m,), dtype=torch.double)
    return jacobian.requires_grad_(), scale.requires_grad_()


def smallest_bound(jacobian: Tensor, scale: Tensor) -> Tensor:
    """L'' by a dense singular value decomposition."""
    smallest = torch.linalg.svdvals(jacobian / scale.unsqueeze(-1))[..., -1]
    return jacobian.shape[-1] * smallest.square().log1p() + 2 * scale.log().sum(-1)


def random_signs(*shape: int) -> Tensor:
    return torch.randint(2, shape).double() * 2 - 1


def hadamard(size: int) -> Tensor:
    """Orthogonal vectors of signs: as probes they make the mean of v^T M v the trace of M."""
    matrix = torch.ones(1, 1, dtype=torch.double)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("m,d", [(1, 1), (5, 1), (4, 2), (3, 3), (20, 8), (12, 12)])
@pytest.mark.parametrize("batch_shape", [(), (4,), (2, 3)])
def test_smallest_bound_matches_dense_and_lies_below(batch_shape, m, d):
    jacobian, scale = problem(batch_shape, m, d)
    start = torch.randn(batch_shape + (d,), dtype=torch.double)
    found, residual = smallest_singular_log_det(*products(jacobian), scale, start, 500)
    assert found.shape == residual.shape == batch_shape and (residual <= 1e-3).all()
    torch.testing.assert_close(found, smallest_bound(jacobian, scale), rtol=1e-3, atol=1e-3)
    assert (found <= covariance_log_det(jacobian, scale) + 1e-3).all()


@pytest.mark.parametrize("m,d", [(6, 6), (9, 4)])
def test_smallest_bound_is_tight_for_equal_singular_values(m, d):
    jacobian = 3 * torch.linalg.qr(torch.randn(5, m, d, dtype=torch.double)).Q
    scale = torch.full((5, m), 0.3, dtype=torch.double)
    start = torch.randn(5, d, dtype=torch.double)
    found, residual = smallest_singular_log_det(*products(jacobian), scale, start)
    torch.testing.assert_close(found, covariance_log_det(jacobian, scale), rtol=1e-12, atol=1e-12)
    assert (residual < 1e-10).all()


def test_smallest_bound_is_reported_unconverged():
    jacobian, scale = problem((8,), 30, 30)
    start = torch.randn(8, 30, dtype=torch.double)
    found, residual = smallest_singular_log_det(*products(jacobian), scale, start, num_steps=2)
    assert (residual > 0.1).all()
    assert (found > smallest_bound(jacobian, scale)).all()


@pytest.mark.parametrize("m,d", [(2, 2), (3, 3), (6, 3)])
def test_envelope_gradient_against_finite_differences(m, d):
    # Up to three dimensions the search space is everything: LOBPCG converges to rounding.
    jacobian, scale = problem((2,), m, d)
    start = torch.randn(2, d, dtype=torch.double)

    def bound(jacobian: Tensor, scale: Tensor) -> Tensor:
        return smallest_singular_log_det(*products(jacobian), scale, start)[0]

    assert torch.autograd.gradcheck(bound, (jacobian, scale), eps=1e-6, atol=1e-4)


def test_envelope_gradient_matches_the_singular_values():
    jacobian, scale = problem((4,), 25, 12)
    start = torch.randn(4, 12, dtype=torch.double)
    found, _ = smallest_singular_log_det(*products(jacobian), scale, start, 500)
    gradients = torch.autograd.grad(found.sum(), (jacobian, scale))
    expected = torch.autograd.grad(smallest_bound(jacobian, scale).sum(), (jacobian, scale))
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("m", [20, 32, 45])
@pytest.mark.parametrize("batch_shape", [(), (3,)])
def test_stochastic_is_exact_with_orthogonal_probes(batch_shape, m):
    """Value and gradient, through a nonlinear generator, without any Monte Carlo error."""
    d = 32
    first = torch.randn(d, d, dtype=torch.double).div(d**0.5).requires_grad_()
    last = torch.randn(d, m, dtype=torch.double).div(d**0.5).requires_grad_()
    scale = (0.2 + torch.rand(batch_shape + (m,), dtype=torch.double)).requires_grad_()
    generator = lambda z: torch.tanh(z @ first) @ last  # noqa: E731
    z = torch.randn(batch_shape + (d,), dtype=torch.double)
    probes = hadamard(d).view((d,) + (1,) * len(batch_shape) + (d,)).expand((d,) + z.shape)
    found, residual = stochastic_log_det(
        *jacobian_products(generator, z.expand_as(probes).contiguous()), scale, probes, num_steps=d
    )
    expected = covariance_log_det(batch_jacobian(generator, z)[1], scale)
    assert found.shape == batch_shape and residual.shape == (d,) + batch_shape
    assert (residual < 1e-9).all()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weight = 1 + torch.rand_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((weight * found).sum(), (first, last, scale)),
        torch.autograd.grad((weight * expected).sum(), (first, last, scale)),
        rtol=1e-7,
        atol=1e-7,
    )


def test_stochastic_is_exact_in_one_dimension():
    jacobian, scale = problem((5,), 4, 1)
    found, _ = stochastic_log_det(*products(jacobian), scale, random_signs(2, 5, 1))
    torch.testing.assert_close(found, covariance_log_det(jacobian, scale))


def test_stochastic_at_1000_dimensions():
    """Each of 64 batch elements has one probe and leaf tensors of its own: independent replicates
    of the value and of the gradient, whose spread is the Monte Carlo error."""
    d, m, num_replicates, num_groups = 1000, 1050, 64, 10
    affine = torch.randn(d, m, dtype=torch.double) / d**0.5
    first = torch.randn(d, 50, dtype=torch.double) / d**0.5
    last = torch.randn(50, m, dtype=torch.double) / 50**0.5
    z = torch.randn(d, dtype=torch.double)
    # Groups of coordinates share a size and a conditional scale.
    parameters = torch.rand(2, num_groups, dtype=torch.double).add(0.1).mul(0.2).requires_grad_()

    def unpack(parameters: Tensor) -> Tensor:
        return parameters.repeat_interleave(m // num_groups, -1)

    def generator(z: Tensor, size: Tensor) -> Tensor:
        return size * (z @ affine + torch.tanh(z @ first) @ last)

    size, scale = unpack(parameters)
    exact = covariance_log_det(batch_jacobian(lambda z: generator(z, size), z)[1], scale)
    (expected,) = torch.autograd.grad(exact, parameters)

    replicates = parameters.detach().repeat(num_replicates, 1, 1).requires_grad_()
    sizes, scales = unpack(replicates).unbind(1)
    times, transposed_times = jacobian_products(
        lambda z: generator(z, sizes), z.repeat(1, num_replicates, 1)
    )
    probes = random_signs(1, num_replicates, d)
    value, residual = stochastic_log_det(times, transposed_times, scales, probes, num_steps=50)
    assert residual.max() < 1e-3  # so that what is left is Monte Carlo error
    assert abs(value.mean() - exact) < 4 * value.std() / num_replicates**0.5
    assert abs(value.mean() - exact) < 0.01 * abs(exact)

    (found,) = torch.autograd.grad(value.sum(), replicates)
    error = found.mean(0) - expected
    z_score = error / (found.std(0) / num_replicates**0.5)
    assert z_score.abs().max() < 4
    assert 0.5 < z_score.square().mean().sqrt() < 1.6
    assert error.norm() < 0.06 * expected.norm()
    assert (error.sum(-1).abs() < 0.02 * expected.sum(-1).abs()).all()


def test_nothing_is_left_in_the_graph_by_the_solver():
    """Under no_grad, and with gradients: the value is the same."""
    jacobian, scale = problem((2,), 6, 4)
    probes = random_signs(3, 2, 4)
    start = torch.randn(2, 4, dtype=torch.double)
    with_grad = (
        stochastic_log_det(*products(jacobian), scale, probes)[0],
        smallest_singular_log_det(*products(jacobian), scale, start)[0],
    )
    with torch.no_grad():
        without = (
            stochastic_log_det(*products(jacobian), scale, probes)[0],
            smallest_singular_log_det(*products(jacobian), scale, start)[0],
        )
    assert all(value.requires_grad for value in with_grad)
    torch.testing.assert_close(with_grad, without)
