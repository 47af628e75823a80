# SPDX-License-Identifier: Apache-2.0
"""Jacobians of batches, dense and as products, against reverse mode row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian as row_jacobian

from pyro_implicit.ops import batch_jacobian, jacobian_products

BATCH_SHAPES = [(), (5,), (3, 2)]
SIZES = [(4, 3), (3, 3), (2, 5), (1, 4), (4, 1)]


def network(z: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return torch.tanh(z @ first) @ last + z[..., :1].sin()


def weights(d: int, m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(d, 6, dtype=torch.double, generator=generator)
    return first, torch.randn(6, m, dtype=torch.double, generator=generator)


def expected_jacobian(z: Tensor, first: Tensor, last: Tensor) -> Tensor:
    rows = [row_jacobian(lambda x: network(x, first, last), row) for row in z.view(-1, z.shape[-1])]
    return torch.stack(rows).view(z.shape[:-1] + rows[0].shape)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("d,m", SIZES)
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_batch_jacobian_matches_rows(batch_shape, d, m, grad):
    first, last = weights(d, m)
    z = torch.randn(batch_shape + (d,), dtype=torch.double)
    with torch.set_grad_enabled(grad):
        value, jacobian = batch_jacobian(lambda x: network(x, first, last), z)
    torch.testing.assert_close(value, network(z, first, last), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(jacobian, expected_jacobian(z, first, last), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("d,m", SIZES)
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_products_match_rows(batch_shape, d, m, grad):
    first, last = weights(d, m)
    z = torch.randn(batch_shape + (d,), dtype=torch.double)
    jacobian = expected_jacobian(z, first, last)
    with torch.set_grad_enabled(grad):
        times, transposed_times = jacobian_products(lambda x: network(x, first, last), z)
        for _ in range(2):  # an iterative solver calls each of them many times
            v = torch.randn_like(z)
            u = torch.randn(batch_shape + (m,), dtype=torch.double)
            expected = (jacobian @ v.unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(times(v), expected, rtol=1e-12, atol=1e-12)
            expected = (jacobian.mT @ u.unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(transposed_times(u), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_batch_jacobian_is_differentiable(batch_shape):
    first, last = weights(3, 2, seed=1)
    z = torch.randn(batch_shape + (3,), dtype=torch.double, requires_grad=True)

    def nonlinear_function_of_jacobian(z: Tensor, first: Tensor, last: Tensor) -> Tensor:
        _, jacobian = batch_jacobian(lambda x: network(x, first, last), z)
        return jacobian.pow(3).sum() + jacobian.prod(-1).sum()

    inputs = (z, first.requires_grad_(), last.requires_grad_())
    assert torch.autograd.gradcheck(nonlinear_function_of_jacobian, inputs)


def test_products_are_differentiable():
    first, last = weights(3, 2, seed=2)
    z, v = torch.randn(2, 4, 3, dtype=torch.double)
    u = torch.randn(4, 2, dtype=torch.double)

    def products(z: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        times, transposed_times = jacobian_products(lambda x: network(x, first, last), z)
        return times(v), transposed_times(u)

    inputs = (z.requires_grad_(), first.requires_grad_(), last.requires_grad_())
    assert torch.autograd.gradcheck(products, inputs)


def test_gradient_reaches_module_parameters():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    parameters = [module[0].weight, module[0].bias, module[2].weight]
    z = torch.randn(5, 3)
    found = batch_jacobian(module, z)[1]
    expected = torch.stack([row_jacobian(module, row, create_graph=True) for row in z])
    found = torch.autograd.grad(found.square().sum(), parameters)
    expected = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_float32_stays_float32():
    value, jacobian = batch_jacobian(torch.sin, torch.zeros(2, 3))
    assert value.dtype == jacobian.dtype == torch.float32


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_constant_function_has_a_zero_jacobian(batch_shape):
    z = torch.randn(batch_shape + (3,))
    _, jacobian = batch_jacobian(lambda x: torch.ones(x.shape[:-1] + (2,)), z)
    assert jacobian.equal(torch.zeros(batch_shape + (2, 3)))
