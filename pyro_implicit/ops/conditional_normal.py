# SPDX-License-Identifier: Apache-2.0
"""Draws of a normal posterior from standard normals, whose scales are other latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["from_standard", "to_standard"]


def from_standard(
    standard: Tensor, scale: Tensor, precision: Tensor, told: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Draws of :math:`N(A^{-1} t, A^{-1})`, where :math:`A = I + D W D = L L^\top`.

    .. math:: z = L^{-\top} (x + L^{-1} t)

    Its gradient is that of the Cholesky factor (Murray 2016, "Differentiation of the Cholesky
    decomposition"), in half of the operations that autograd takes for it.

    **Example:**

    >>> one = torch.ones(1, 1)
    >>> from_standard(0 * one, 2 * one, torch.tensor([[2.0]]), 18 * one)  # A = 9
    (tensor([[2.]]), tensor([[-1.0986]]))

    :param standard: x, ``(num_draws, n)``.
    :param scale: the diagonal of D, ``(num_draws, n)``.
    :param precision: W, ``(n, n)``.
    :param told: t, ``(num_draws, n)``.
    :returns: z, and the logarithm of the diagonal of :math:`L^{-1}`, the sum of which is the
        log-determinant, both ``(num_draws, n)``; NaN where A has no factor.
    """
    return _FromStandard.apply(standard, scale, precision, told)


def to_standard(values: Tensor, scale: Tensor, precision: Tensor, told: Tensor) -> Tensor:
    """The other way, x of z, without a gradient."""
    factor = _factor(scale, precision)
    return _times(factor.mT, values) - _solve(factor, told)


class _FromStandard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, standard: Tensor, scale: Tensor, precision: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        factor = _factor(scale, precision)
        pull = _solve(factor, told)
        values = _solve(factor, standard + pull, transposed=True)
        ctx.save_for_backward(factor, scale, precision, pull, values)
        return values, -factor.diagonal(dim1=-2, dim2=-1).log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_values: Tensor, by_log_det: Tensor) -> tuple[Tensor | None, ...]:
        factor, scale, precision, pull, values = ctx.saved_tensors
        by_standard = _solve(factor, by_values)
        by_told = _solve(factor, by_standard, transposed=True)
        sides = torch.stack([values, by_told], -1), torch.stack([by_standard, pull], -2)
        by_factor = (sides[0] @ sides[1]).tril_()
        diagonal = by_factor.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(by_log_det / factor.diagonal(dim1=-2, dim2=-1))
        middle = (factor.mT @ by_factor).tril_()
        middle.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        left = torch.linalg.solve_triangular(factor.mT, middle, upper=True)
        by_matrix = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
        # Its symmetric part is the gradient, and W is symmetric.
        weighed = by_matrix.mul_(precision)
        by_scale = _times(weighed, scale) + _times(weighed.mT, scale)
        return by_standard, -by_scale, None, by_told


def _factor(scale: Tensor, precision: Tensor) -> Tensor:
    matrix = precision * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor.masked_fill_((failed != 0)[:, None, None], torch.nan)


def _solve(factor: Tensor, vector: Tensor, transposed: bool = False) -> Tensor:
    matrix = factor.mT if transposed else factor
    column = vector.unsqueeze(-1)
    return torch.linalg.solve_triangular(matrix, column, upper=transposed).squeeze(-1)


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
