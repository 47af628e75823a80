# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.diagnostics.diagnose` can afford, before it begins."""

from __future__ import annotations

import math
from typing import NamedTuple

from pyro_implicit.density.cost import nearby, seconds_near
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.drift import NUM_LEAPFROG

__all__ = ["NUM_CHAINS", "NUM_OBSERVED_CHAINS", "Effort", "plan_effort"]

NUM_SCORES = 4  # times the draws, of guides that draw in parallel
MAX_NUMBERS = 10_000_000  # of all draws that are scored
NUM_CHAINS, NUM_OBSERVED_CHAINS = 500, 1000  # of latents, of quantities
NUM_TUNING = 4
LEAST_DRAWS, LEAST_TRANSITIONS, LEAST_ITERATIONS = 500, 5, 10
USUAL_ITERATIONS = 40  # of the search
FEW = 10


class Effort(NamedTuple):
    """``num_samples`` to be weighed, ``extra`` times as many to be scored beside them,
    ``num_transitions`` of HMC, ``search_iterations`` of Newton's (None without a limit, 0 for no
    search), all of which take about ``seconds`` of one core; what was ``spared``, in words; and
    ``unweighed``, why there are to be no weights, if so.
    """

    num_samples: int
    extra: int
    num_transitions: int
    search_iterations: int | None
    seconds: float
    spared: tuple[str, ...] = ()
    unweighed: str = ""


def plan_effort(
    density: Target,
    num_samples: int,
    least_samples: int,
    num_transitions: int,
    can_search: bool,
    chunk_size: int,
    max_seconds: float,
    num_chains: int = NUM_CHAINS,
    weight: float = 0.0,
) -> Effort:
    """Cut what was asked for to a budget, by the operations of the model's log-density.

    Scores and weights, HMC and the search for modes may take a third of the budget each, and the
    first two a half where there is no search.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> plan_effort(Target(model), 2000, 100, 20, False, 500, 60.0)[:3]
    (2000, 4, 20)

    :param density: of the model; it is evaluated a few times at its start.
    :param num_samples: wanted.
    :param least_samples: so many in any case.
    :param num_transitions: wanted.
    :param can_search: whether modes are to be searched for.
    :param chunk_size: draws at a time.
    :param max_seconds: of one core, as counted.
    :param num_chains: of HMC, at most.
    :param weight: seconds of the guide's density at one draw.
    """
    extra = max(0, min(NUM_SCORES, MAX_NUMBERS // (num_samples * density.latent_dim) - 1))
    full = Effort(num_samples, extra, num_transitions, None, math.nan)
    try:
        point = density.init_loc
        density.log_prob(nearby(point, 2))  # how the model can be run
        one_by_one = not density.is_vectorized
        rows = min(chunk_size, FEW) if one_by_one else chunk_size
        score = seconds_near(density.score, point, rows, one_by_one) / rows
        iteration = seconds_of_climb(density) if can_search else 0.0
    except Exception:  # the model's own, at its start: the draws have others
        return full
    share, spared, unweighed = max_seconds / (3 if can_search else 2), [], ""
    least = max(least_samples, min(num_samples, LEAST_DRAWS))
    if weight * least > share:
        cost = f"{weight * least:,.1f} s, more than max_seconds grants"
        unweighed = f"{least} of them would take {cost}"
        spared.append("importance weights")
        weight = 0.0
    affordable = int(share / (score + weight / 2))
    if affordable < 2 * num_samples:
        number = max(least, min(num_samples, affordable // 2))
        if number < num_samples:
            spared.append(f"{number} draws of {num_samples}")
        num_samples, extra = number, 0
    extra = min(extra, max(0, affordable // num_samples - 2))
    per_transition = score * min(num_chains, num_samples) * NUM_LEAPFROG
    if num_transitions and density.is_vectorized:
        number = min(num_transitions, int(share / per_transition) - NUM_TUNING)
        if number < num_transitions:
            number = number if number >= LEAST_TRANSITIONS else 0
            spared.append(f"{number} transitions of HMC of {num_transitions}")
        num_transitions = number
    iterations: int | None = 0
    if can_search:
        iterations = int(share / iteration)
        if iterations < LEAST_ITERATIONS:
            iterations = 0
            spared.append("no search for modes")
        elif iterations >= USUAL_ITERATIONS:
            iterations = None
    seconds = (score * (2 + extra) + weight) * num_samples
    if num_transitions and density.is_vectorized:
        seconds += per_transition * (num_transitions + NUM_TUNING)
    if can_search:
        seconds += iteration * (USUAL_ITERATIONS if iterations is None else iterations)
    return Effort(
        num_samples, extra, num_transitions, iterations, seconds, tuple(spared), unweighed
    )
