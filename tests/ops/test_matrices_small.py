# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops import matrices as small_matrices


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_against_lapack(size):
    torch.manual_seed(size)
    root = torch.randn(2, 5, size, size, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(size)
    vector = torch.randn(2, 5, size, dtype=torch.float64)
    factor = small_matrices.cholesky(matrix)
    assert torch.allclose(factor, torch.linalg.cholesky(matrix), rtol=1e-10, atol=1e-12)
    for triangle, upper in ((factor, False), (factor.mT, True)):
        expected = torch.linalg.solve(triangle, vector)
        found = small_matrices.solve_triangular(triangle, vector, upper=upper)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    expected = torch.einsum("...ij,...jk->...ik", matrix, root[..., :2])
    assert torch.allclose(small_matrices.product(matrix, root[..., :2]), expected)


def test_gradients():
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def solved(root):
        factor = small_matrices.cholesky(root @ root.mT + torch.eye(3))
        return small_matrices.solve_triangular(factor, root[0], upper=False)

    assert torch.autograd.gradcheck(solved, root)
