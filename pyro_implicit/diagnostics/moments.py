# SPDX-License-Identifier: Apache-2.0
"""Errors of means and standard deviations, as far as they are no chance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

__all__ = ["MomentErrors", "Product", "moment_errors"]

#: A weight, and two sets of vectors ``(n, m)``: each draw stands for weight * left right^T.
Product = tuple[float, Tensor, Tensor]


class MomentErrors(NamedTuple):
    """The worst significant errors of a guide's moments, in any direction that was tested.

    ``mean_error`` is in standard deviations of the guide, 0 where none is significant;
    ``smallest_excess`` and ``largest_excess`` are relative errors of its variances, or 0.
    """

    mean_error: float
    smallest_excess: float
    largest_excess: float


@torch.no_grad()
def moment_errors(
    shifts: Tensor,
    products: list[Product],
    axes: Tensor,
    false_alarm: float,
    constant: float = 0.0,
) -> MomentErrors:
    r"""Tests that shifts and products are 0 in the mean, along the axes and in the worst directions.

    The worst directions are found on one half of the draws and tested on the other, so that
    correlations count without a test for each pair of coordinates.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(2000, 2)
    >>> y = x @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])  # variances right, correlation 0.8
    >>> moment_errors(y - x, [(1.0, y, y), (-1.0, x, x)], torch.eye(2), 0.01).largest_excess > 0.6
    True

    :param shifts: one for each draw, ``(n, m)``, in the guide's standard deviations.
    :param products: with ``constant`` times the identity their sum is the excess of the guide's
        covariance, one matrix for each draw.
    :param axes: unit columns, ``(m, m)``: what to look at in any case.
    :param false_alarm: probability that any error is significant where there is none.
    :returns: what is significant.
    """
    num_draws, dim = shifts.shape
    threshold = _critical_value(false_alarm / (2 * dim + 6))
    means, squares = [shifts @ axes], [constant + _quadratic(products, axes)]
    halves = slice(0, num_draws, 2), slice(1, num_draws, 2)
    for train, test in (halves, halves[::-1]):
        direction = torch.nn.functional.normalize(shifts[train].mean(0), dim=0)
        means.append(shifts[test] @ direction.unsqueeze(-1))
        parts = [(weight, left[train], right[train]) for weight, left, right in products]
        matrix: Tensor = sum(weight * left.mT @ right for weight, left, right in parts)  # type: ignore[assignment]
        vectors = torch.linalg.eigh(matrix + matrix.mT).eigenvectors[:, [0, -1]]
        tested = [(weight, left[test], right[test]) for weight, left, right in products]
        squares.append(constant + _quadratic(tested, vectors))
    excess = torch.cat([_significant(terms, threshold) for terms in squares])
    return MomentErrors(
        torch.cat([_significant(terms, threshold) for terms in means]).abs().max().item(),
        excess.min().clamp(max=0.0).item(),
        excess.max().clamp(min=0.0).item(),
    )


def _quadratic(products: list[Product], directions: Tensor) -> Tensor:
    """Each draw's matrix along directions ``(m, k)``: ``(n, k)``."""
    terms = [
        weight * (left @ directions) * (right @ directions) for weight, left, right in products
    ]
    return torch.stack(terms).sum(0)


def _significant(terms: Tensor, threshold: float) -> Tensor:
    """The means of columns ``(n, k)`` that are too far from 0 for chance, else 0."""
    mean, error = terms.mean(0), terms.std(0) / math.sqrt(len(terms))
    # Where draws are the posterior's up to rounding, there is no error to divide by.
    floor = 100 * torch.finfo(terms.dtype).eps
    return torch.where(mean.abs() > threshold * error + floor, mean, torch.zeros_like(mean))


def _critical_value(false_alarm: float) -> float:
    level = torch.tensor(1 - false_alarm / 2, dtype=torch.double)
    return Normal(level.new_zeros(()), level.new_ones(())).icdf(level).item()
