# SPDX-License-Identifier: Apache-2.0
"""Triangular factors of very many very small matrices, for which LAPACK is called too often."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cholesky", "product", "solve_triangular"]

SMALL = 6


def cholesky(matrix: Tensor) -> Tensor:
    """The lower triangular factor of symmetric positive definite matrices.

    **Example:**

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])

    :param matrix: ``(*batch, n, n)``.
    """
    size = matrix.shape[-1]
    if size > SMALL:
        return torch.linalg.cholesky(matrix)
    columns: list[Tensor] = []
    for index in range(size):
        column = matrix[..., index:, index]
        for other in columns:
            column = column - other[..., index:] * other[..., index : index + 1]
        column = column / column[..., :1].sqrt()
        columns.append(torch.nn.functional.pad(column, (index, 0)))
    return torch.stack(columns, -1)


def solve_triangular(matrix: Tensor, vector: Tensor, upper: bool) -> Tensor:
    """Solve a triangular system for one vector.

    **Example:**

    >>> solve_triangular(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([2.0, 5.0]), False)
    tensor([1., 2.])

    :param matrix: ``(*batch, n, n)``.
    :param vector: ``(*batch, n)``.
    """
    size = matrix.shape[-1]
    if size > SMALL:
        column = torch.linalg.solve_triangular(matrix, vector.unsqueeze(-1), upper=upper)
        return column.squeeze(-1)
    parts: list[Tensor] = []
    order = list(reversed(range(size))) if upper else list(range(size))
    for count, row in enumerate(order):
        part = vector[..., row]
        for done, column in zip(parts, order[:count], strict=True):
            part = part - matrix[..., row, column] * done
        parts.append(part / matrix[..., row, row])
    return torch.stack(parts[::-1] if upper else parts, -1)


def product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices times vectors.

    :param matrix: ``(*batch, n, m)``.
    :param vector: ``(*batch, m)``.
    :returns: ``(*batch, n)``.
    """
    if matrix.shape[-1] > SMALL:
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    return (matrix * vector.unsqueeze(-2)).sum(-1)
