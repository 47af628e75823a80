# SPDX-License-Identifier: Apache-2.0
"""How much of everything a model can afford, by what one evaluation of it costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pyro_implicit.density.cost import nearby, seconds_near
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target

__all__ = ["ChainPlan", "Plan", "TimeLimit", "affordable_chains", "make_plan"]

SEARCH_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 20.0, 10, 1600
TRAINING_SECONDS, LEAST_STEPS = 10.0, 200
CHAIN_SECONDS, LEAST_CHAINS, MOST_CHAINS = 40.0, 32, 256
LEAST_GRADIENTS, LONG_ENOUGH, MOST_GRADIENTS = 800, 1200, 4000
WORTH = 0.7  # of the gradients of the fewest chains
PATIENCE = 2  # times as long, for chains that have not settled


class ChainPlan(NamedTuple):
    """How many chains, and ``max_gradients`` of each."""

    num_chains: int
    max_gradients: int


class Plan(NamedTuple):
    """``search_iterations`` of Newton's in all, 0 for none, and the chains."""

    search_iterations: int
    chains: ChainPlan


class TimeLimit:
    """Seconds of wall time that are left.

    **Example:**

    >>> TimeLimit(None).left()
    inf

    :param max_seconds: from now on; None for any number.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.end = math.inf if max_seconds is None else time.perf_counter() + max_seconds

    def left(self, share: float = 1.0) -> float:
        """So much of what is left, never negative."""
        return max(0.0, share * (self.end - time.perf_counter()))


def affordable_chains(
    score: Callable[[Tensor], Any], point: Tensor, one_by_one: bool = False
) -> ChainPlan:
    """Chains that can be had: fewer of them where they would else be too short, and fewer make a
    gradient cheaper, as they hardly do in a Python loop. Most settle long before the gradients that
    those that do not are given.

    :param score: of points ``(num_chains, dim)``.
    :param point: one of them, ``(dim,)``.
    :param one_by_one: whether the model runs once for each chain.
    """

    def affordable_gradients(num_chains: int) -> int:
        seconds = seconds_near(score, point, num_chains, one_by_one)
        return max(1, min(MOST_GRADIENTS, int(CHAIN_SECONDS / seconds)))

    num_chains, gradients = MOST_CHAINS, affordable_gradients(MOST_CHAINS)
    if gradients < LONG_ENOUGH:
        wanted = min(LONG_ENOUGH, WORTH * affordable_gradients(LEAST_CHAINS))
        while gradients < wanted and num_chains > LEAST_CHAINS:
            num_chains //= 2
            gradients = affordable_gradients(num_chains)
    return ChainPlan(num_chains, max(LEAST_GRADIENTS, min(MOST_GRADIENTS, PATIENCE * gradients)))


def make_plan(density: Target) -> Plan:
    """The plan for a model that sees all its data.

    :param density: of the model; it is evaluated a few times at its start.
    """
    point = density.init_loc
    try:
        density.log_prob(nearby(point, 2))  # how the model can be run is found out here
        chains = affordable_chains(density.score, point, not density.is_vectorized)
        if density.latent_dim > MAX_DENSE_DIM:
            return Plan(0, chains)
        iterations = min(MOST_ITERATIONS, int(SEARCH_SECONDS / seconds_of_climb(density)))
    except Exception:  # the model's own, at its start: the search has others
        return Plan(MOST_ITERATIONS, ChainPlan(MOST_CHAINS, MOST_GRADIENTS))
    return Plan(iterations if iterations >= LEAST_ITERATIONS else 0, chains)
