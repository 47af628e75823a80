# SPDX-License-Identifier: Apache-2.0
"""Simultaneous bands of the ranks' distribution function, by simulation.

Säilynoja, Bürkner and Vehtari (2022), *Graphical test for discrete uniformity and its applications
in goodness-of-fit evaluation and multiple sample comparison*.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy.stats import binom

__all__ = ["band", "p_value"]

NUM_SIMULATIONS = 10_000


def _least(counts: np.ndarray, num_ranks: int, grid: np.ndarray) -> np.ndarray:
    """Return the smallest two-sided probability of a count on the grid, for each row of counts."""
    below = binom.cdf(counts, num_ranks, grid)
    above = 1 - binom.cdf(counts - 1, num_ranks, grid)
    return 2 * np.minimum(below, above).min(-1)


def _counts(ranks: np.ndarray, num_draws: int) -> np.ndarray:
    """Count the ranks, from 0 to ``num_draws``, that are at most 0, 1, ..., ``num_draws`` - 1."""
    shape = (*ranks.shape[:-1], num_draws + 1)
    counts = np.zeros(shape, dtype=int)
    for index in np.ndindex(ranks.shape[:-1]):
        counts[index] = np.bincount(ranks[index], minlength=num_draws + 1)
    return counts.cumsum(-1)[..., :-1]


@functools.cache
def _simulated(num_ranks: int, num_draws: int) -> np.ndarray:
    """Return the statistic of uniform ranks, sorted."""
    rng = np.random.default_rng(0)
    ranks = rng.integers(num_draws + 1, size=(NUM_SIMULATIONS, num_ranks))
    return np.sort(_least(_counts(ranks, num_draws), num_ranks, _grid(num_draws)))


def _grid(num_draws: int) -> np.ndarray:
    return np.arange(1, num_draws + 1) / (num_draws + 1)


def p_value(ranks: np.ndarray, num_draws: int) -> float:
    """Return the p-value of uniform ranks; below 0.01 the ranks leave the 99 % band.

    :param ranks: ``(num_ranks,)``, from 0 to ``num_draws``.
    """
    found = _least(_counts(ranks, num_draws), len(ranks), _grid(num_draws))
    simulated = _simulated(len(ranks), num_draws)
    return float((simulated <= found * (1 + 1e-9)).mean())


def band(num_ranks: int, num_draws: int, level: float = 0.99) -> tuple[np.ndarray, np.ndarray]:
    """Return the band of the distribution function minus its expectation, ``(num_draws,)``."""
    grid = _grid(num_draws)
    tail = np.quantile(_simulated(num_ranks, num_draws), 1 - level) / 2
    low = binom.ppf(tail, num_ranks, grid) / num_ranks
    high = binom.ppf(1 - tail, num_ranks, grid) / num_ranks
    return low - grid, high - grid
