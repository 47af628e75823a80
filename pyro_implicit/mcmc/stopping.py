# SPDX-License-Identifier: Apache-2.0
"""When chains may stop: nothing drifts, and every chain has forgotten where it began."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Drift", "Tracked", "drift", "pooled", "tracked"]

MAX_MEAN_DRIFT = 0.05  # sds
MAX_SD_DRIFT = 0.05  # as a share
MAX_R_HAT = 1.1
ERRORS = 2.0


class Tracked(NamedTuple):
    """What the rule looks at: ``values``, ``(num_chains, num_quantities)``, the log-density last.

    ``group``, ``(num_quantities,)``, numbers the quantities of one unit from 0 on: the root mean
    square of their sds, so that of many predictions those that hardly vary do not matter.
    """

    values: Tensor
    group: Tensor


def tracked(parts: list[Tensor], log_density: Tensor) -> Tracked:
    """Quantities and the log-density side by side.

    **Example:**

    >>> tracked([torch.zeros(5, 1), torch.zeros(5, 2, 1)], torch.zeros(5)).group
    tensor([0, 1, 1, 2])

    :param parts: each of one unit, ``(num_chains, *shape)``.
    :param log_density: ``(num_chains,)``.
    """
    rows = [part.reshape(len(log_density), -1).to(log_density) for part in (*parts, log_density)]
    sizes = torch.tensor([row.shape[-1] for row in rows], device=log_density.device)
    groups = torch.arange(len(rows), device=log_density.device)
    return Tracked(torch.cat(rows, -1), groups.repeat_interleave(sizes))


class Drift(NamedTuple):
    """What a stretch of chains says; each number is of the worst quantity.

    ``mean`` is the most that a mean may have moved from the first half to the second, in sds;
    ``sd`` the same of standard deviations, as a share; both with two standard errors added.
    ``r_hat`` is the greatest R-hat of values and squares.
    """

    mean: float
    sd: float
    r_hat: float

    @property
    def settled(self) -> bool:
        """Whether all three are small enough to stop."""
        return self.mean <= MAX_MEAN_DRIFT and self.sd <= MAX_SD_DRIFT and self.r_hat <= MAX_R_HAT


def drift(powers: Tensor, group: Tensor) -> Drift:
    r"""Compare the second half of a stretch with the first, chain by chain.

    Each chain gives the difference of its two means. They are independent of the other chains', so
    that their standard error needs no autocorrelations. The variance about the common mean does
    the same for standard deviations.

    A slow drift hides in noise, and a chain that has not moved does not drift at all. So the chains
    must also have forgotten their starts: R-hat of the stretch, of values and of squares, asks each
    chain for five effective draws at least (:math:`\hat R^2 - 1 \approx 1 / n`), after which the
    memory of the start is gone. It is not asked for more, as of long chains, because noise is
    averaged over chains.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 256, 3)
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).settled
    True
    >>> x = x + torch.linspace(0, 0.5, 200)[:, None, None]
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).settled
    False

    :param powers: means over successive batches of transitions of the quantities, their squares
        and their fourth powers, ``(3, num_batches, num_chains, num_quantities)``. Of the last of
        them, the log-density, the mean alone counts.
    :param group: see :class:`Tracked`.
    :returns: that of the worst quantity.

    **References:**

    1. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    """
    half = powers.shape[1] // 2
    values, squares, fourths = powers[:, -2 * half :]
    mean = values.mean((0, 1))
    about_mean = squares - 2 * mean * values + mean.square()
    variance = about_mean.mean((0, 1))
    unit = pooled(variance, group)
    r_hat = _r_hat(values.mean(0), squares.mean(0), group)
    r_hat_of_squares = _r_hat(squares.mean(0), fourths.mean(0), group)
    return Drift(
        (_bound(values, half) / unit.sqrt()).max().item(),
        (0.5 * _bound(about_mean, half) / unit)[:-1].max().item(),
        torch.cat([r_hat, r_hat_of_squares[:-1]]).max().item(),
    )


def pooled(values: Tensor, group: Tensor) -> Tensor:
    """Each quantity's mean over its group, ``(num_quantities,)``, and 1 instead of 0."""
    zeros = values.new_zeros(len(values))
    total = zeros.index_add(0, group, values)
    mean = (total / zeros.index_add(0, group, torch.ones_like(values)).clamp(min=1))[group]
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _bound(values: Tensor, half: int) -> Tensor:
    """The drift of each quantity's mean, plus its errors: ``(num_quantities,)``."""
    differences = values[half:].mean(0) - values[:half].mean(0)
    error = differences.std(0) / math.sqrt(len(differences))
    return differences.mean(0).abs() + ERRORS * error


def _r_hat(means: Tensor, mean_squares: Tensor, group: Tensor) -> Tensor:
    """Of chains that are not split, because their halves are compared already.

    :param means: of each chain, as ``mean_squares``, ``(num_chains, num_quantities)``.
    """
    within = (mean_squares - means.square()).mean(0)
    between = means.var(0)
    constant = between + within.clamp(min=0) == 0
    ratio = torch.where(constant, 0.0, between) / pooled(within.clamp(min=0), group)
    return (1 + ratio).sqrt()
