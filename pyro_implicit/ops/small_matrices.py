# SPDX-License-Identifier: Apache-2.0
"""Factors and products of very many very small matrices, for which LAPACK is called too often.

Up to :data:`SMALL` rows they are written out by elements, whose kernels run over all matrices.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["cholesky", "matvec", "product", "solve_triangular"]

SMALL = 4


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
    given = _elements(matrix)
    factor: list[list[Tensor]] = []
    for i in range(size):
        row: list[Tensor] = []
        for j in range(i):
            row.append(_less(given[i][j], row, factor[j][:j]) / factor[j][j])
        factor.append([*row, _less(given[i][i], row, row).sqrt()])
    zero = torch.zeros_like(factor[0][0])
    return _matrix([row + [zero] * (size - len(row)) for row in factor])


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
    given, right = _elements(matrix), vector.unbind(-1)
    order = list(range(size))[:: -1 if upper else 1]
    found: list[Tensor] = []
    for count, i in enumerate(order):
        known = [given[i][j] for j in order[:count]]
        found.append(_less(right[i], known, found) / given[i][i])
    return torch.stack(found[:: -1 if upper else 1], -1)


def product(matrix: Tensor, other: Tensor) -> Tensor:
    """Matrices times matrices.

    **Example:**

    >>> product(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([[1.0], [3.0]])).mT
    tensor([[2., 7.]])

    :param matrix: ``(*batch, n, m)``.
    :param other: ``(*batch, m, k)``.
    :returns: ``(*batch, n, k)``.
    """
    if max(*matrix.shape[-2:], other.shape[-1]) > SMALL:
        return matrix @ other
    columns = _elements(other.mT)
    return _matrix([[_dot(row, column) for column in columns] for row in _elements(matrix)])


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices times vectors.

    **Example:**

    >>> matvec(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
    tensor([2., 7.])

    :param matrix: ``(*batch, n, m)``.
    :param vector: ``(*batch, m)``.
    :returns: ``(*batch, n)``.
    """
    return product(matrix, vector.unsqueeze(-1)).squeeze(-1)


def _elements(matrix: Tensor) -> list[tuple[Tensor, ...]]:
    return [row.unbind(-1) for row in matrix.unbind(-2)]


def _matrix(elements: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in elements], -2)


def _dot(one: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, map(operator.mul, one, other))


def _less(value: Tensor, one: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    """The value without the product of two vectors."""
    return functools.reduce(operator.sub, map(operator.mul, one, other), value)
