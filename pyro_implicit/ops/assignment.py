# SPDX-License-Identifier: Apache-2.0
"""Permutations: the best one, and how probable one is."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["linear_assignment", "permutation_log_prob"]

#: Powers of the balanced weights, and what each has in the mixture. The first power is best where
#: many rows compete for a column, the second for single pairs; the zeroth bounds the loss.
POWERS = ((0.0, 0.01), (1.0, 0.33), (1.5, 0.33), (2.0, 0.33))
NUM_BALANCINGS = 5


def permutation_log_prob(log_weights: Tensor, permutation: Tensor) -> Tensor:
    r"""The log-probability of permutations by a distribution near
    :math:`p(\pi) \propto \prod_i w_{i \pi(i)}`.

    That distribution's own constant is a permanent, which nobody can compute. This one is
    normalised: the weights are brought to unit sums of rows and columns, then the rows, the surest
    first, take one of the columns that are left, in proportion to a power of their weights; all
    powers of ``POWERS`` are mixed. It loses little (for seven rows, a few hundredths of the
    information), and nothing where one permutation outweighs all others or all weigh the same.

    **Example:**

    >>> log_weights = torch.tensor([[0.0, -3.0], [-3.0, 0.0]])
    >>> both = torch.tensor([[0, 1], [1, 0]])
    >>> permutation_log_prob(log_weights.expand(2, 2, 2), both).exp()
    tensor([0.9..., 0.0...])

    :param log_weights: ``(*batch, n, n)``, finite.
    :param permutation: the column of each row, ``(*batch, n)``.
    :returns: ``(*batch)``, differentiable in the weights.

    **References:**

    1. Sinkhorn (1964), *A Relationship Between Arbitrary Positive Matrices and Doubly Stochastic
       Matrices*.
    """
    for _ in range(NUM_BALANCINGS):
        log_weights = log_weights.log_softmax(-1).log_softmax(-2)
    order = log_weights.detach().amax(-1).argsort(dim=-1, descending=True, stable=True)
    rows = log_weights.gather(-2, order.unsqueeze(-1).expand_as(log_weights))
    columns = permutation.gather(-1, order).unsqueeze(-2).expand_as(rows)
    # In the order in which they are taken: left are those on the diagonal and to its right.
    rows = rows.gather(-1, columns)
    taken = torch.ones_like(rows, dtype=torch.bool).tril(-1)
    parts = []
    for power, share in POWERS:
        left = (power * rows).masked_fill(taken, -torch.inf)
        chosen = left.diagonal(dim1=-2, dim2=-1) - left.logsumexp(-1)
        parts.append(chosen.sum(-1) + math.log(share))
    return torch.stack(parts).logsumexp(0)


@torch.no_grad()
def linear_assignment(cost: Tensor) -> Tensor:
    """The permutation of least cost, for each of some matrices.

    **Example:**

    >>> linear_assignment(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]]))
    tensor([1, 0, 2])

    :param cost: of giving a column to a row, ``(*batch, n, n)``, finite.
    :returns: the column of each row, ``(*batch, n)``, on the device of ``cost``.

    **References:**

    1. Jonker and Volgenant (1987), *A Shortest Augmenting Path Algorithm for Dense and Sparse
       Linear Assignment Problems*.
    """
    size = cost.shape[-1]
    matrices = cost.double().cpu().reshape(-1, size, size).numpy()
    columns = np.array([_assign(matrix) for matrix in matrices], dtype=np.int64)
    return torch.as_tensor(columns.reshape(cost.shape[:-1]), device=cost.device)


def _assign(cost: np.ndarray) -> np.ndarray:
    """The column of each row, by shortest paths in costs less the prices of columns."""
    size = len(cost)
    price = cost.min(0)
    column_of, row_of = np.full(size, -1), np.full(size, -1)
    for column, row in enumerate(cost.argmin(0)):  # where no two columns want the same row
        if column_of[row] < 0:
            column_of[row], row_of[column] = column, row
    for new in np.flatnonzero(column_of < 0):
        reduced, closed = cost - price, np.zeros(size)
        reach, before = np.full(size, np.inf), np.full(size, new)
        final = np.full(size, np.nan)
        row, own, least = new, 0.0, 0.0
        while row >= 0:  # to the nearest column that has no row
            through = reduced[row] + closed + (least - own)
            better = through < reach
            reach[better], before[better] = through[better], row
            column = int(reach.argmin())
            least, row = reach[column], row_of[column]
            final[column], closed[column], reach[column] = least, np.inf, np.inf
            own = reduced[row, column]
        price = price + np.where(np.isnan(final), 0.0, final - least)
        row = -1
        while row != new:
            row = before[column]
            row_of[column] = row
            column_of[row], column = column, column_of[row]
    return column_of
