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

    def sd_ratios_by_difference(self) -> tuple[float, float]:
        """The guide's standard deviation over the posterior's, smallest and largest, where the
        excess is the difference of variances over the guide's."""
        low, high = (
            (1 - excess) ** -0.5 if excess < 1 else math.inf
            for excess in (self.smallest_excess, self.largest_excess)
        )
        return low, high


@torch.no_grad()
def moment_errors(
    shifts: Tensor,
    products: list[Product],
    axes: Tensor,
    false_alarm: float,
    constants: Tensor | None = None,
) -> MomentErrors:
    r"""Tests that shifts and products are 0 in the mean, along axes and in the worst directions.

    The worst directions are found on one half of the draws and tested on the other, so that
    correlations count without a test for each pair of coordinates.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(2000, 2)
    >>> y = x @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])  # variances right, correlation 0.8
    >>> moment_errors(y - x, [(1.0, y, y), (-1.0, x, x)], torch.eye(2), 0.01).largest_excess > 0.6
    True

    :param shifts: one for each draw, ``(n, m)``, in the guide's standard deviations.
    :param products: with ``constants`` times the identity their sum is the excess of the guide's
        covariance, one matrix for each draw.
    :param constants: ``(n,)``, by default 0.
    :param axes: unit columns, ``(m, m)``: what to look at in any case.
    :param false_alarm: probability that any error is significant where there is none.
    :returns: what is significant; infinite errors where numbers leave their range.
    """
    terms = [shifts, *(part for _, left, right in products for part in (left, right))]
    if not all(_is_tame(part) for part in terms):
        return MomentErrors(math.inf, 0.0, math.inf)
    num_draws, dim = shifts.shape
    threshold = _critical_value(false_alarm / (2 * dim + 6))
    constants = shifts.new_zeros(num_draws) if constants is None else constants
    means, squares = [shifts @ axes], [_quadratic(products, constants, axes)]
    halves = slice(0, num_draws, 2), slice(1, num_draws, 2)
    for train, test in (halves, halves[::-1]):
        direction = torch.nn.functional.normalize(shifts[train].mean(0), dim=0)
        means.append(shifts[test] @ direction.unsqueeze(-1))
        parts = [(weight, left[train], right[train]) for weight, left, right in products]
        matrix = torch.stack([weight * left.mT @ right for weight, left, right in parts]).sum(0)
        vectors = torch.linalg.eigh(matrix + matrix.mT).eigenvectors[:, [0, -1]]
        tested = [(weight, left[test], right[test]) for weight, left, right in products]
        squares.append(_quadratic(tested, constants[test], vectors))
    excess = torch.cat([_significant(terms, threshold) for terms in squares])
    return MomentErrors(
        torch.cat([_significant(terms, threshold) for terms in means]).abs().max().item(),
        excess.min().clamp(max=0.0).item(),
        excess.max().clamp(min=0.0).item(),
    )


def _is_tame(terms: Tensor) -> bool:
    """Whether fourth powers, the variances of squares, stay in the range of numbers."""
    return bool((terms.abs().amax() < torch.finfo(terms.dtype).max ** 0.2).item())


def _quadratic(products: list[Product], constants: Tensor, directions: Tensor) -> Tensor:
    """Each draw's matrix along unit directions ``(m, k)``: ``(n, k)``."""
    total = constants.unsqueeze(-1).expand(-1, directions.shape[-1])
    for weight, left, right in products:
        total = total + weight * (left @ directions) * (right @ directions)
    return total


def _significant(terms: Tensor, threshold: float) -> Tensor:
    """The means of columns ``(n, k)`` that are too far from 0 for chance, else 0."""
    mean, error = terms.mean(0), terms.std(0) / math.sqrt(len(terms))
    # Where draws are the posterior's up to rounding, there is no error to divide by.
    floor = 100 * torch.finfo(terms.dtype).eps
    return torch.where(mean.abs() > threshold * error + floor, mean, torch.zeros_like(mean))


def _critical_value(false_alarm: float) -> float:
    level = torch.tensor(1 - false_alarm / 2, dtype=torch.double)
    return Normal(level.new_zeros(()), level.new_ones(())).icdf(level).item()
