# SPDX-License-Identifier: Apache-2.0
r"""Factors and products of batches of matrices, and normal draws by their precision.

Matrices of up to :data:`~pyro_implicit.ops.policy.SMALL_MATRIX` rows are factored elementwise: one
kernel for all matrices of the batch instead of a LAPACK call for each.

A precision may also be the identity plus a matrix of known eigenvectors: with orthonormal columns V
and gains g, :math:`A = I + V \mathrm{diag}(g) V^\top`. If only the gains change from point to
point, no matrix is factored: a point costs two products with V. The symmetric root of A leaves
directions without gain as they are.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.policy import SMALL_MATRIX

__all__ = [
    "LinearTerm",
    "cholesky",
    "eigenbasis",
    "from_standard",
    "from_symmetric_root",
    "geometric_mean",
    "lower_factor",
    "normal_by_precision",
    "product",
    "root_of_inverse",
    "small_matvec",
    "solve_triangular",
    "to_standard",
    "to_symmetric_root",
]


def root_of_inverse(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return F with F F^T = |H|^-1, by eigenvalues at unit diagonal, and whether H < 0."""
    hessian = torch.nan_to_num(hessian)
    # A coordinate without curvature keeps its scale.
    is_flat = (hessian == 0).all(-1)
    hessian = hessian - torch.diag_embed(is_flat.to(hessian))
    scale = hessian.diagonal(dim1=-2, dim2=-1).abs().clamp(min=1e-20).rsqrt()
    scaled = scale.unsqueeze(-1) * hessian * scale.unsqueeze(-2)
    values, vectors = _eigh(scaled)
    is_concave = (values < 0).all(-1)
    values = values.abs().clamp(min=10 * torch.finfo(values.dtype).eps)
    return scale.unsqueeze(-1) * vectors * values.rsqrt().unsqueeze(-2), is_concave


def geometric_mean(first: Tensor, second: Tensor) -> Tensor:
    r"""Return the geometric mean of A and the inverse of B: the positive definite X with X B X = A.

    **Example:**

    >>> geometric_mean(torch.diag(torch.tensor([4.0, 9.0])), torch.eye(2)).round(decimals=3)
    tensor([[2., 0.],
            [0., 3.]])

    :param first: A, positive semidefinite, ``(n, n)``.
    :param second: B, positive definite, ``(n, n)``.
    """
    values, vectors = _eigh(second)
    root = values.sqrt()
    inner = root * (vectors.mT @ first @ vectors) * root.unsqueeze(-1)
    values, inner_vectors = _eigh(inner)
    half = vectors / root @ (inner_vectors * values.clamp(min=0).pow(0.25))
    return half @ half.mT


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose in float64 if float32 does not converge, for entries of very different sizes."""
    try:
        return tuple(torch.linalg.eigh(matrix))
    except torch.linalg.LinAlgError:
        largest = torch.finfo(matrix.dtype).max ** 0.5
        values, vectors = torch.linalg.eigh(matrix.double().clamp(-largest, largest))
        return values.to(matrix), vectors.to(matrix)


def normal_by_precision(offset: Tensor, precision: Tensor) -> Tensor:
    r"""Return the log-density of a normal with precision P, :math:`-\frac12 (x^\top P x -
    \log |P| + n \log 2 \pi)`, without an inverse.

    **Example:**

    >>> normal_by_precision(torch.zeros(2), 4.0 * torch.eye(2)).exp()
    tensor(0.6366)

    :param offset: x, the value minus the mean, ``(*batch, n)``.
    :param precision: P, ``(*batch, n, n)``.
    """
    root = torch.linalg.cholesky(precision)
    half_log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    square = (offset * (precision @ offset.unsqueeze(-1)).squeeze(-1)).sum(-1)
    return half_log_det - 0.5 * (square + offset.shape[-1] * math.log(2 * math.pi))


def lower_factor(root: Tensor) -> Tensor:
    """Return the Cholesky factor of R R^T by a QR decomposition, which also exists for singular R.

    :param root: ``(*batch, dim, num_columns)``, with at least as many columns as rows.
    :returns: ``(*batch, dim, dim)``.
    """
    factor = torch.linalg.qr(root.mT).R.mT
    sign = torch.where(factor.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(factor)
    return (factor * sign.unsqueeze(-2)).tril()


def cholesky(matrix: Tensor) -> Tensor:
    """Return the lower triangular factor of symmetric positive definite matrices.

    **Example:**

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    tensor([[2., 0.],
            [1., 2.]])

    :param matrix: ``(*batch, n, n)``.
    """
    size = matrix.shape[-1]
    if size > SMALL_MATRIX:
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
    if size > SMALL_MATRIX:
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
    """Multiply matrices by matrices.

    **Example:**

    >>> product(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([[1.0], [3.0]])).mT
    tensor([[2., 7.]])

    :param matrix: ``(*batch, n, m)``.
    :param other: ``(*batch, m, k)``.
    :returns: ``(*batch, n, k)``.
    """
    if max(*matrix.shape[-2:], other.shape[-1]) > SMALL_MATRIX:
        return matrix @ other
    columns = _elements(other.mT)
    return _matrix([[_dot(row, column) for column in columns] for row in _elements(matrix)])


def small_matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply matrices by vectors.

    **Example:**

    >>> small_matvec(torch.tensor([[2.0, 0.0], [1.0, 2.0]]), torch.tensor([1.0, 3.0]))
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
    return functools.reduce(operator.sub, map(operator.mul, one, other), value)


def from_standard(standard: Tensor, precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    r"""Transform standard normals to draws of :math:`N(A^{-1} t, A^{-1})`, :math:`A = L L^\top`.

    .. math:: z = L^{-\top} (x + L^{-1} t)

    The gradient is that of the Cholesky factor (Murray 2016, "Differentiation of the Cholesky
    decomposition") with one matrix product less than by autograd. With
    :math:`y = L^{-1} \partial z`, the gradient of L is the lower triangle of
    :math:`-(z y^\top + L^{-\top} y (L^{-1} t)^\top)`, and the backward pass needs the lower
    triangle of its product with :math:`L^\top`: that of
    :math:`-((x + L^{-1} t) y^\top + y (L^{-1} t)^\top)`.

    **Example:**

    >>> from_standard(torch.zeros(1, 1), torch.full((1, 1, 1), 9.0), torch.full((1, 1), 18.0))
    (tensor([[2.]]), tensor([[-1.0986]]))

    :param standard: x, ``(*batch, n)``.
    :param precision: A, ``(*batch, n, n)``, symmetric.
    :param linear: t, ``(*batch, n)``.
    :returns: z, and the logarithm of the diagonal of :math:`L^{-1}`, whose sum is the
        log-determinant, both ``(*batch, n)``; NaN if A has no factor.
    """
    if standard.shape[-1] <= SMALL_MATRIX:
        return _from_factor(standard, cholesky(precision), linear)
    batch = torch.broadcast_shapes(standard.shape[:-1], precision.shape[:-2], linear.shape[:-1])
    size = standard.shape[-1:]
    given = standard.expand(batch + size), precision.expand(batch + size + size)
    values, log_diagonal, _ = _FromStandard.apply(*given, linear.expand(batch + size))
    return values, log_diagonal


def to_standard(values: Tensor, precision: Tensor, linear: Tensor) -> Tensor:
    """Invert :func:`from_standard`: x of z."""
    factor = _factor(precision)
    return small_matvec(factor.mT, values) - solve_triangular(factor, linear, upper=False)


class _FromStandard(torch.autograd.Function):
    """Returns the factor only for second derivatives."""

    @staticmethod
    def forward(
        standard: Tensor, precision: Tensor, linear: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        factor = _factor(precision)
        return *_from_factor(standard, factor, linear), factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        standard, _, linear = inputs
        ctx.save_for_backward(standard, linear, output[-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *given: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        batched = [
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip(given, in_dims, strict=True)
        ]
        return _FromStandard.apply(*batched), (0, 0, 0)

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        by_values, by_log_diagonal, by_factor = by
        standard, linear, factor = ctx.saved_tensors
        if by_values is None:
            by_values = torch.zeros_like(standard)
        pull = solve_triangular(factor, linear, upper=False)
        by_standard = solve_triangular(factor, by_values, upper=False)
        by_told = solve_triangular(factor.mT, by_standard, upper=True)
        sides = [standard + pull, by_standard], [by_standard, pull]
        middle = -torch.stack(sides[0], -1) @ torch.stack(sides[1], -2)
        if by_factor is not None:
            middle = middle + factor.mT @ by_factor
        middle = middle.tril()
        diagonal = middle.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        if by_log_diagonal is not None:
            diagonal.sub_(by_log_diagonal / 2)
        left = torch.linalg.solve_triangular(factor.mT, middle, upper=True)
        by_precision = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
        return by_standard, by_precision, by_told  # the symmetric part of A's counts


def _from_factor(standard: Tensor, factor: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    pull = solve_triangular(factor, linear, upper=False)
    values = solve_triangular(factor.mT, standard + pull, upper=True)
    return values, -factor.diagonal(dim1=-2, dim2=-1).log()


def _factor(precision: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(precision)
    return factor.masked_fill((failed != 0)[..., None, None], torch.nan)


class LinearTerm(NamedTuple):
    """A vector t as ``V inner + outer``, with ``outer`` orthogonal to V."""

    inner: Tensor
    outer: Tensor


def from_symmetric_root(
    standard: Tensor, vectors: Tensor | None, gains: Tensor, linear: LinearTerm
) -> tuple[Tensor, Tensor]:
    r"""Transform standard normals x to draws of :math:`N(A^{-1} t, A^{-1})`.

    .. math:: z = A^{-1/2} x + A^{-1} t

    **Example:**

    >>> linear = LinearTerm(torch.tensor([[18.0]]), torch.zeros(1, 2))
    >>> from_symmetric_root(torch.ones(1, 2), torch.eye(2)[:, :1], torch.tensor([[8.0]]), linear)
    (tensor([[2.3333, 1.0000]]), tensor([-1.0986]))

    :param standard: x, ``(num_points, n)``.
    :param vectors: V, ``(n, rank)``; None for the identity.
    :param gains: g, ``(num_points, rank)``, above -1.
    :param linear: t, with ``inner`` ``(num_points, rank)`` and ``outer`` ``(num_points, n)``.
    :returns: z, and the log-determinants ``(num_points,)``.
    """
    stretch = (1 + gains).sqrt()
    inner = standard if vectors is None else standard @ vectors
    moved = inner * (1 / stretch - 1) + linear.inner / (1 + gains)
    moved = moved if vectors is None else moved @ vectors.mT
    return standard + linear.outer + moved, -stretch.log().sum(-1)


def to_symmetric_root(
    values: Tensor, vectors: Tensor | None, gains: Tensor, linear: LinearTerm
) -> Tensor:
    """Invert :func:`from_symmetric_root`: x of z."""
    stretch = (1 + gains).sqrt()
    inner = values if vectors is None else values @ vectors
    moved = inner * (stretch - 1) - linear.inner / stretch
    moved = moved if vectors is None else moved @ vectors.mT
    return values - linear.outer + moved


def eigenbasis(matrix: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors ``(n, rank)`` and eigenvalues ``(rank,)`` above a limit.

    **Example:**

    >>> eigenbasis(torch.diag(torch.tensor([3.0, 1e-3, -1.0])), least=0.01)[1]
    tensor([3.])

    :param matrix: symmetric, ``(n, n)``.
    :param least: the limit.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values > least
    return vectors[:, kept], values[kept]
