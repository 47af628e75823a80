# SPDX-License-Identifier: Apache-2.0
"""Draws of a guide with an exact density, righted by importance weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.cost import seconds_near
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import exact_log_weights
from pyro_implicit.ops.pareto import describe_weights, pareto_smoothed

__all__ = ["Reliability", "corrected_draws", "reliability"]

OVERSAMPLING, LEAST_PROPOSALS = 4, 1000
NUM_WEIGHED, NUM_WEIGHED_AGAIN = 2000, 8000
NUM_TIMED, SECONDS_AGAIN = 100, 3.0
MAX_KHAT, LEAST_EFFICIENCY, EVEN = 0.5, 0.5, 0.99
AGREES = 0.75  # of the efficiency seen before: that of good weights hangs on their number less


class Reliability(NamedTuple):
    """``khat``, the tail index of a guide's importance weights, infinite where these have no tail,
    and ``efficiency``, their effective sample size as a share of the draws.
    """

    khat: float
    efficiency: float

    @property
    def suffices(self) -> bool:
        """Whether draws can be resampled by such weights."""
        # The tail of even weights is that of rounding.
        return self.efficiency > EVEN or (
            self.efficiency > LEAST_EFFICIENCY and self.khat < MAX_KHAT
        )

    def __str__(self) -> str:
        return describe_weights(self.khat, self.efficiency)


def reliability(guide: Any, density: Target) -> Reliability:
    """Of the smoothed weights of 2,000 new draws.

    Where these are good, up to 8,000 more have to agree, as many as a few seconds allow: a mode
    that the guide only touches is met by one draw in a thousand, and no weight tells of it before.

    :param guide: with an exact density, see
        :func:`~pyro_implicit.guides.exactness.has_exact_density`.
    :param density: of the model.
    """
    log_weights = exact_log_weights(guide, density, NUM_WEIGHED)[1]
    found = _judge(log_weights)
    number = _affordable(density) if found.suffices else 0
    if number > NUM_WEIGHED:
        more = exact_log_weights(guide, density, number)[1]
        again = _judge(torch.cat([log_weights, more]))
        if again.efficiency < AGREES * found.efficiency:
            return again
    return found


def _affordable(density: Target) -> int:
    """How many more draws are weighed."""
    one_by_one = not density.is_vectorized
    seconds = seconds_near(density.log_prob, density.init_loc, NUM_TIMED, one_by_one)
    return min(NUM_WEIGHED_AGAIN, int(SECONDS_AGAIN * NUM_TIMED / seconds))


def _judge(log_weights: Tensor) -> Reliability:
    smoothed = pareto_smoothed(log_weights.double())
    squares = smoothed.log_weights.mul(2).exp().sum().item()
    return Reliability(smoothed.khat, 1 / (len(log_weights) * squares))


def corrected_draws(guide: Any, density: Target, num_samples: int) -> dict[str, Tensor]:
    """Draws resampled by their smoothed weights, one out of four.

    :param guide: as for :func:`reliability`.
    :returns: constrained, by site, ``(num_samples, *site_shape)``, in random order.
    """
    number = max(OVERSAMPLING * num_samples, LEAST_PROPOSALS)
    draws, log_weights = exact_log_weights(guide, density, number)
    weights = pareto_smoothed(log_weights.double()).log_weights.exp()
    # Systematic resampling: as even as the weights allow.
    ticks = (torch.arange(num_samples).to(weights) + torch.rand(()).to(weights)) / num_samples
    index = torch.searchsorted(weights.cumsum(0), ticks).clamp(max=number - 1)
    return density.constrain(draws[index[torch.randperm(num_samples)]])
