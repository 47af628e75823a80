# SPDX-License-Identifier: Apache-2.0
"""The number of chains that is cheapest on this machine, by the time of their score."""

from __future__ import annotations

import time

from torch import Tensor

from pyro_implicit.mcmc.policy import ChainPolicy
from pyro_implicit.ops.ensemble_hmc import Score

__all__ = ["cheapest_number", "seconds_of"]


def seconds_of(score: Score, white: Tensor) -> float:
    """Measure the seconds of the score of some chains, ``(num_chains, d)``."""
    times = []
    for _ in range(8):  # the shortest: the first calls of a size record it
        # Under a limit of CPU seconds (`ulimit -t`), Linux advances process_time by ticks.
        began = time.perf_counter()
        score(white)
        times.append(time.perf_counter() - began)
    return min(times)


def cheapest_number(score: Score, white: Tensor, policy: ChainPolicy) -> tuple[int, float]:
    """Halve the number of chains while this saves time; return it, and the seconds of its score.

    :param white: the positions of all chains, ``(num_chains, d)``.
    """
    number = len(white)
    best = seconds_of(score, white)
    while number >= 2 * policy.least_long_chains:
        found = seconds_of(score, white[: number // 2])
        if found > policy.max_halved_cost * best:
            break
        number, best = number // 2, found
    return number, best
