# SPDX-License-Identifier: Apache-2.0
"""Draws of a normal posterior from standard normals, whose precision other latents decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_implicit.ops.small_matrices import SMALL, cholesky, matvec, solve_triangular

__all__ = ["from_standard", "to_standard"]


def from_standard(standard: Tensor, precision: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    r"""Draws of :math:`N(A^{-1} t, A^{-1})`, where :math:`A = L L^\top`.

    .. math:: z = L^{-\top} (x + L^{-1} t)

    Its gradient is that of the Cholesky factor (Murray 2016, "Differentiation of the Cholesky
    decomposition"), without the product of matrices that autograd takes for it: the gradient of L
    is the lower triangle of :math:`-(z y^\top + L^{-\top} y (L^{-1} t)^\top)`, where
    :math:`y = L^{-1} \partial z`, and what is asked of it is the lower triangle of its product with
    :math:`L^\top`, which is that of :math:`-((x + L^{-1} t) y^\top + y (L^{-1} t)^\top)`.

    **Example:**

    >>> from_standard(torch.zeros(1, 1), torch.full((1, 1, 1), 9.0), torch.full((1, 1), 18.0))
    (tensor([[2.]]), tensor([[-1.0986]]))

    :param standard: x, ``(*batch, n)``.
    :param precision: A, ``(*batch, n, n)``, symmetric.
    :param told: t, ``(*batch, n)``.
    :returns: z, and the logarithm of the diagonal of :math:`L^{-1}`, the sum of which is the
        log-determinant, both ``(*batch, n)``; NaN where A has no factor.
    """
    if standard.shape[-1] <= SMALL:
        factor = cholesky(precision)
        pull = solve_triangular(factor, told, upper=False)
        values = solve_triangular(factor.mT, standard + pull, upper=True)
        return values, -factor.diagonal(dim1=-2, dim2=-1).log()
    batch = torch.broadcast_shapes(standard.shape[:-1], precision.shape[:-2], told.shape[:-1])
    size = standard.shape[-1:]
    given = standard.expand(batch + size), precision.expand(batch + size + size)
    values, log_diagonal, _ = _FromStandard.apply(*given, told.expand(batch + size))
    return values, log_diagonal


def to_standard(values: Tensor, precision: Tensor, told: Tensor) -> Tensor:
    """The other way, x of z."""
    factor = _factor(precision)
    return matvec(factor.mT, values) - solve_triangular(factor, told, upper=False)


class _FromStandard(torch.autograd.Function):
    """The factor is returned for second derivatives alone."""

    @staticmethod
    def forward(standard: Tensor, precision: Tensor, told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor = _factor(precision)
        pull = solve_triangular(factor, told, upper=False)
        values = solve_triangular(factor.mT, standard + pull, upper=True)
        return values, -factor.diagonal(dim1=-2, dim2=-1).log(), factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        standard, _, told = inputs
        ctx.save_for_backward(standard, told, output[-1])
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
        standard, told, factor = ctx.saved_tensors
        if by_values is None:
            by_values = torch.zeros_like(standard)
        pull = solve_triangular(factor, told, upper=False)
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


def _factor(precision: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(precision)
    return factor.masked_fill((failed != 0)[..., None, None], torch.nan)
