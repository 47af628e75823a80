# SPDX-License-Identifier: Apache-2.0
"""Block-tridiagonal factors against dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_implicit.ops.block_tridiagonal import BlockFactor


def dense(diagonal: Tensor, below: Tensor | None) -> Tensor:
    num_blocks, size = diagonal.shape[-3:-1]
    whole = diagonal.new_zeros(*diagonal.shape[:-3], num_blocks * size, num_blocks * size)
    for i in range(num_blocks):
        here = slice(i * size, (i + 1) * size)
        whole[..., here, here] = diagonal[..., i, :, :]
        if below is not None and i + 1 < num_blocks:
            after = slice((i + 1) * size, (i + 2) * size)
            whole[..., after, here] = below[..., i, :, :]
            whole[..., here, after] = below[..., i, :, :].mT
    return whole


def blocks(num_blocks: int, size: int, is_chain: bool) -> tuple[Tensor, Tensor | None]:
    root = torch.randn(2, num_blocks, size, size).double()
    diagonal = root @ root.mT + 4 * size * torch.eye(size).double()
    below = torch.randn(2, num_blocks - 1, size, size).double() if is_chain else None
    return diagonal, below


@pytest.mark.parametrize(
    ("num_blocks", "size", "is_chain"),
    [(4, 3, True), (3, 6, True), (1, 5, True), (5, 1, False), (3, 6, False)],
)
def test_against_dense_algebra(num_blocks: int, size: int, is_chain: bool) -> None:
    diagonal, below = blocks(num_blocks, size, is_chain)
    matrix, factor = dense(diagonal, below), BlockFactor(diagonal, below)
    right = torch.randn(2, num_blocks, size).double()
    column = right.flatten(1).unsqueeze(-1)
    lower = torch.linalg.cholesky(matrix)
    torch.testing.assert_close(factor.log_det(), torch.logdet(matrix))
    solution = torch.linalg.solve(matrix, column).reshape(right.shape)
    torch.testing.assert_close(factor.solve(right), solution)
    white = torch.linalg.solve(lower, column).reshape(right.shape)
    torch.testing.assert_close(factor.whiten(right), white)
    drawn = torch.linalg.solve(lower.mT, column).reshape(right.shape)
    torch.testing.assert_close(factor.solve_transposed(right), drawn)
    pivots = lower.diagonal(dim1=-2, dim2=-1).reshape(right.shape)
    torch.testing.assert_close(factor.pivots(), pivots)


@pytest.mark.parametrize("is_chain", [True, False])
def test_selected_inverse_is_the_gradient_of_the_log_determinant(is_chain: bool) -> None:
    diagonal, below = blocks(4, 3, is_chain)
    parts = [one.requires_grad_() for one in (diagonal, below) if one is not None]
    slopes = torch.autograd.grad(torch.logdet(dense(diagonal, below)).sum(), parts)
    factor = BlockFactor(diagonal.detach(), None if below is None else below.detach())
    on_diagonal, beside = factor.selected_inverse()
    torch.testing.assert_close(on_diagonal, slopes[0])
    if below is None:
        assert beside is None
    else:
        torch.testing.assert_close(2 * beside, slopes[1])


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("is_chain", [True, False])
def test_only_the_indefinite_matrix_has_no_factor(size: int, is_chain: bool) -> None:
    diagonal, below = blocks(3, size, is_chain)
    diagonal[0, 1] = -diagonal[0, 1]
    log_det = BlockFactor(diagonal, below).log_det()
    assert log_det.isnan().tolist() == [True, False]


@pytest.mark.parametrize("size", [2, 20])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_singular_matrix_has_no_inverse_beside_those_that_have(size: int, is_chain: bool) -> None:
    good = torch.diag_embed(torch.rand(3, size, dtype=torch.float64) + 1.0)
    singular = torch.diag_embed(torch.ones(3, size, dtype=torch.float64))
    singular[1, 0, 0] = 0.0
    below = torch.zeros(2, 2, size, size, dtype=torch.float64) if is_chain else None
    found = BlockFactor(torch.stack([good, singular]), below).selected_inverse()[0]
    torch.testing.assert_close(found[0], good.inverse())
    assert not found[1, 1].isfinite().all()
