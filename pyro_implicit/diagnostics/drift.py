# SPDX-License-Identifier: Apache-2.0
"""Where a guide's draws drift under Hamiltonian Monte Carlo, which keeps the posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import moment_errors
from pyro_implicit.diagnostics.stein import whiten_scores

__all__ = ["DriftCheck", "drift_check"]

Score = Callable[[Tensor], tuple[Tensor, Tensor]]


class DriftCheck(NamedTuple):
    """What :func:`drift_check` found.

    ``mean_error`` is the largest significant drift of a mean in the guide's standard deviations, 0
    if there is none; ``sd_ratios`` the smallest and largest significant ratio of a standard
    deviation before to after, 1 if there is none; ``acceptance`` the share of accepted moves.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    acceptance: float


@torch.no_grad()
def drift_check(
    draws: Tensor,
    score: Score,
    num_transitions: int = 20,
    num_leapfrog: int = 8,
    false_alarm: float = 0.003,
) -> DriftCheck:
    r"""Moves all draws of a guide by a few transitions that leave the posterior as it is.

    Were the draws the posterior's, their distribution would stay. What drifts is wrong, and by at
    least so much: a neck of a funnel or a tail that the guide has cut off fills again. The chains
    are far too short to reach a mode that lies apart, or to right the weights of two of them.

    The frame is that of the draws' covariance. Each move of each chain draws its own step, up to
    the largest one of which about 80 % are accepted and down to a thirtieth of it, so that narrow
    places can be entered.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> score = lambda u: (-0.5 * u.square().sum(-1), -u)
    >>> drift_check(0.7 * torch.randn(1000, 2), score).sd_ratios[0] < 0.85
    True

    :param draws: independent, in unconstrained space, ``(num_draws, latent_dim)``.
    :param score: of ``(num_draws, latent_dim)`` the model's log-density, ``(num_draws,)``, and its
        gradient.
    :param num_transitions: of Hamiltonian Monte Carlo for each draw.
    :param num_leapfrog: steps of each transition.
    :param false_alarm: probability that a perfect guide shows any drift.
    :returns: the drift, and the share of accepted moves.
    :raises ValueError: for draws that lie on a hyperplane.

    **References:**

    1. Neal (2011), *MCMC using Hamiltonian dynamics*.
    2. Cook, Gelman and Rubin (2006), *Validation of Software for Bayesian Models Using Posterior
       Quantiles* (what leaves the posterior invariant tests it).
    """
    white, _, axes = whiten_scores(draws, draws)
    frame, loc = _affine(draws, white)

    def white_score(points: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, gradient = score(loc + points @ frame)
        gradient = gradient @ frame.mT
        # A step into the void is rejected.
        finite = log_prob.isfinite() & gradient.isfinite().all(-1)
        log_prob = log_prob.masked_fill(~finite, -math.inf)
        return log_prob, gradient.masked_fill(~finite.unsqueeze(-1), 0.0)

    step = 1.0
    for _ in range(8):
        _, accepted = _transitions(white, white_score, step, 1, num_leapfrog)
        if accepted > 0.8:
            break
        step /= 2
    after, acceptance = _transitions(white, white_score, step, num_transitions, num_leapfrog)
    centered = after - after.mean(0)
    products = [(1.0, white, white), (-1.0, centered, centered)]
    errors = moment_errors(after - white, products, axes, false_alarm)
    return DriftCheck(errors.mean_error, errors.sd_ratios_by_difference(), acceptance)


def _affine(draws: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
    """The frame F ``(m, m)`` and location with draws = loc + white @ F."""
    loc = draws.mean(0)
    return white.mT @ (draws - loc) / (len(draws) - 1), loc


def _transitions(
    start: Tensor, score: Score, step: float, num_transitions: int, num_leapfrog: int
) -> tuple[Tensor, float]:
    """The points after so many transitions, and the share of accepted ones."""
    point, (log_prob, gradient) = start, score(start)
    accepted = 0.0
    for _ in range(num_transitions):
        sizes = step * 30 ** -torch.rand_like(log_prob).unsqueeze(-1)
        momentum = torch.randn_like(point)
        new, new_log_prob, new_gradient = point, log_prob, gradient
        energy = log_prob - 0.5 * momentum.square().sum(-1)
        for _ in range(num_leapfrog):
            momentum = momentum + 0.5 * sizes * new_gradient
            new = new + sizes * momentum
            new_log_prob, new_gradient = score(new)
            momentum = momentum + 0.5 * sizes * new_gradient
        change = new_log_prob - 0.5 * momentum.square().sum(-1) - energy
        accept = torch.rand_like(change).log() < change
        accepted += accept.to(change).mean().item() / num_transitions
        point = torch.where(accept.unsqueeze(-1), new, point)
        log_prob = torch.where(accept, new_log_prob, log_prob)
        gradient = torch.where(accept.unsqueeze(-1), new_gradient, gradient)
    return point, accepted
