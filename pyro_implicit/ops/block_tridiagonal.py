# SPDX-License-Identifier: Apache-2.0
r"""Cholesky factors of symmetric block-tridiagonal matrices, and what follows from them.

A matrix A of m blocks of b rows has diagonal blocks :math:`D_1, \dots, D_m` and blocks
:math:`E_1, \dots, E_{m-1}` below them. Its factor L has the diagonal blocks :math:`L_i`, and
:math:`B_i = E_i L_i^{-\top}` below them, with

.. math:: L_i L_i^\top = D_i - B_{i-1} B_{i-1}^\top.

Matrices of bandwidth b have this form. Every function takes about :math:`m b^3` operations for each
matrix of a batch. Vectors are ``(*batch, m, b)``, diagonal blocks ``(*batch, m, b, b)``, and blocks
below ``(*batch, m - 1, b, b)``, or None for a block-diagonal matrix, whose blocks are processed at
once. See Rue and Held (2005), *Gaussian Markov Random Fields*, sections 2.4 and 2.6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_implicit.ops.matrices import cholesky, solve_triangular
from pyro_implicit.ops.policy import SMALL_MATRIX

__all__ = ["BlockFactor"]


class BlockFactor:
    """The Cholesky factor L of block-tridiagonal matrices.

    **Example:**

    >>> diagonal, below = torch.full((3, 1, 1), 2.0), torch.full((2, 1, 1), -1.0)
    >>> factor = BlockFactor(diagonal, below)
    >>> f"{factor.log_det().exp():.1f}"  # of a matrix with 2 on and -1 beside the diagonal
    '4.0'
    >>> factor.solve(torch.tensor([[1.0], [0.0], [0.0]])).flatten()
    tensor([0.7500, 0.5000, 0.2500])

    :param diagonal: the blocks on the diagonal, ``(*batch, m, b, b)``.
    :param below: the blocks below, ``(*batch, m - 1, b, b)``; None if they are zero.
    """

    def __init__(self, diagonal: Tensor, below: Tensor | None = None) -> None:
        self._num_blocks = diagonal.shape[-3]
        self._below: list[Tensor] | None = None
        self._fails = torch.zeros(diagonal.shape[:-3], dtype=torch.bool, device=diagonal.device)
        if below is None:
            self._diagonal = [self._factor(diagonal)]
            return
        current, self._diagonal, self._below = diagonal[..., 0, :, :], [], []
        for index in range(self._num_blocks):
            lower = self._factor(current)
            self._diagonal.append(lower)
            if index + 1 < self._num_blocks:
                step = torch.linalg.solve_triangular(lower, below[..., index, :, :].mT, upper=False)
                self._below.append(step.mT)
                current = diagonal[..., index + 1, :, :] - step.mT @ step

    def _factor(self, matrix: Tensor) -> Tensor:
        if matrix.shape[-1] <= SMALL_MATRIX:
            return cholesky(matrix)
        factor, info = torch.linalg.cholesky_ex(matrix)
        fails = info != 0
        self._fails = self._fails | (fails.any(-1) if self._below is None else fails)
        return factor

    def pivots(self) -> Tensor:
        """Return the diagonal of L, ``(*batch, m, b)``; NaN for a matrix without a factor."""
        found = [one.diagonal(dim1=-2, dim2=-1) for one in self._diagonal]
        pivots = found[0] if self._below is None else torch.stack(found, -2)
        return pivots.masked_fill(self._fails[..., None, None], math.nan)

    def log_det(self) -> Tensor:
        """Return the log-determinants ``(*batch,)``; NaN for a matrix without a factor."""
        return 2 * self.pivots().log().sum((-1, -2))

    def solve(self, right: Tensor) -> Tensor:
        """Return x with A x = ``right``, ``(*batch, m, b)``."""
        return self.solve_transposed(self.whiten(right))

    def whiten(self, right: Tensor) -> Tensor:
        """Return x with L x = ``right``, ``(*batch, m, b)``."""
        if self._below is None:
            return solve_triangular(self._diagonal[0], right, upper=False)
        found: list[Tensor] = []
        for index, lower in enumerate(self._diagonal):
            rest = right[..., index, :].unsqueeze(-1)
            if index:
                rest = rest - self._below[index - 1] @ found[-1]
            found.append(torch.linalg.solve_triangular(lower, rest, upper=False))
        return torch.stack(found, -3).squeeze(-1)

    def solve_transposed(self, right: Tensor) -> Tensor:
        """Return x with L^T x = ``right``, ``(*batch, m, b)``: from standard normal noise, a draw
        of N(0, A^-1)."""
        if self._below is None:
            return solve_triangular(self._diagonal[0].mT, right, upper=True)
        found: list[Tensor] = []
        for index in reversed(range(self._num_blocks)):
            rest = right[..., index, :].unsqueeze(-1)
            if found:
                rest = rest - self._below[index].mT @ found[-1]
            found.append(torch.linalg.solve_triangular(self._diagonal[index].mT, rest, upper=True))
        return torch.stack(found[::-1], -3).squeeze(-1)

    def selected_inverse(self) -> tuple[Tensor, Tensor | None]:
        """Return the blocks of A^-1 that lie where A has blocks.

        They are the gradient of the log-determinant by the blocks on the diagonal, and half of
        that by the blocks below, each of which stands for two.

        :returns: ``(*batch, m, b, b)``, and ``(*batch, m - 1, b, b)`` or None; NaN for a singular
            matrix.
        """
        if self._below is None:
            return _inverse(self._diagonal[0]), None
        current = _inverse(self._diagonal[-1])
        diagonal, below = [current], []
        for lower, step in zip(self._diagonal[-2::-1], self._below[::-1], strict=True):
            right = torch.linalg.solve_triangular(lower, step, upper=False, left=False)
            below.append(-current @ right)
            current = _inverse(lower) - right.mT @ below[-1]
            diagonal.append(current)
        inverse = torch.stack(diagonal[::-1], -3)
        if not below:
            return inverse, inverse[..., :0, :, :]
        return inverse, torch.stack(below[::-1], -3)


def _inverse(lower: Tensor) -> Tensor:
    """Return inverses by Cholesky factors; NaN for singular ones, where torch raises an error."""
    is_singular = (lower.diagonal(dim1=-2, dim2=-1) == 0).any(-1)[..., None, None]
    safe = torch.where(is_singular, torch.eye(lower.shape[-1]).to(lower), lower)
    return torch.cholesky_inverse(safe).masked_fill(is_singular, math.nan)
