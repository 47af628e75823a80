# SPDX-License-Identifier: Apache-2.0
"""Where a guide's draws drift under Hamiltonian Monte Carlo, which keeps the posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import FALSE_ALARM, Fault, Resolution, moment_errors
from pyro_implicit.diagnostics.whitening import Whitened
from pyro_implicit.ops.ensemble_hmc import ChainState, ensemble_move, score_of
from pyro_implicit.runtime.printing import steps_of

__all__ = ["NUM_LEAPFROG", "DriftCheck", "drift_check"]

NUM_LEAPFROG = 8  # steps of each transition
LEAST_MOVES = 0.1  # of the transitions, accepted


class DriftCheck(NamedTuple):
    """What :func:`drift_check` found: drifts of means and standard deviations as errors of the
    guide, the share of accepted moves, ``acceptance``, and the share ``escaped`` of chains that end
    farther out than any draw of the guide, 0 where that may be chance.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    acceptance: float
    faults: tuple[Fault, ...] = ()
    resolution: Resolution = Resolution()
    escaped: float = 0.0


@torch.no_grad()
def drift_check(
    draws: Whitened,
    log_prob: Callable[[Tensor], Tensor],
    num_transitions: int = 20,
    chunk_size: int = 500,
    observe: Callable[[Tensor], Tensor] | None = None,
    others: Tensor | None = None,
) -> DriftCheck:
    r"""Moves all draws of a guide by a few transitions that leave the posterior as it is.

    Were the draws the posterior's, their distribution would stay. What drifts is wrong, and by at
    least so much: a neck of a funnel or a tail that the guide has cut off fills again. The chains
    are far too short to reach a mode that lies apart, or to right the weights of two of them.

    Moments of heavy tails are noisy, and importance weights do not see a tail that has no draws.
    So chains are counted that end farther from the centre than all of many other draws: of n chains
    and m others, all from the posterior, the k outermost are all chains in a share of
    :math:`\binom{n}{k} / \binom{n+m}{k}` of all cases.

    The frame is that of the draws' covariance. Each move of each chain draws its own step, up to
    the largest one of which about 80 % are accepted and down to a thirtieth of it, so that narrow
    places can be entered. A step to where there is no density is rejected.

    **Example:**

    >>> from pyro_implicit.diagnostics.whitening import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> log_prob = lambda u: -0.5 * u.square().sum(-1)
    >>> drift_check(whiten_draws(0.7 * torch.randn(1000, 2)), log_prob).sd_ratios[0] < 0.85
    True

    :param draws: independent, in unconstrained space, whitened: ``(num_draws, latent_dim)``.
    :param log_prob: of ``(num_points, latent_dim)`` the model's log-density, ``(num_points,)``,
        differentiable.
    :param num_transitions: of Hamiltonian Monte Carlo for each draw.
    :param chunk_size: draws at a time, to bound the memory.
    :param observe: of ``(num_points, latent_dim)`` quantities ``(num_points, q)`` in units of their
        standard deviations, whose drift is looked at in place of the latents'.
    :param others: more draws of the guide in the frame of ``draws``, ``(num_others, latent_dim)``.
    :returns: the drift, and the share of accepted moves.

    **References:**

    1. Neal (2011), *MCMC using Hamiltonian dynamics*.
    2. Cook, Gelman and Rubin (2006), *Validation of Software for Bayesian Models Using Posterior
       Quantiles* (what leaves the posterior invariant tests it).
    """
    center = draws.white.mean(0)  # of some of the draws, it is not quite 0
    white = draws.white - center

    def white_log_prob(points: Tensor) -> Tensor:
        latent = draws.unwhiten(points + center)
        # No force where there is no number: a trajectory that has left the domain stays finite.
        latent.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
        value = log_prob(latent)
        return torch.where(value.isfinite(), value, -math.inf)

    def move(states: list[ChainState], step: float) -> tuple[list[ChainState], float]:
        """One transition of all chains, and the mean probability of acceptance."""
        moved, acceptances = [], []
        for state in states:
            sizes = step * 30 ** -torch.rand_like(state.log_density).unsqueeze(-1)
            found = ensemble_move(score, state, sizes, NUM_LEAPFROG)
            moved.append(found.state)
            acceptances.append(found.acceptance)
        return moved, torch.cat(acceptances).mean().item()

    score = score_of(white_log_prob)
    start = [ChainState(part, *score(part)) for part in white.split(chunk_size)]
    step = 1.0
    for _ in range(8):
        if move(start, step)[1] > 0.8:
            break
        step /= 2
    states, accepted = start, 0.0
    for _ in steps_of(range(num_transitions), num_transitions, "short HMC"):
        states, acceptance = move(states, step)
        accepted += acceptance / num_transitions
    before, after, axes = white, torch.cat([state.position for state in states]), draws.axes
    escaped = 0.0 if others is None else _escaped(after, others - center)
    if observe is not None:
        before, after = (observe(draws.unwhiten(part + center)) for part in (before, after))
        before, after, axes = before - before.mean(0), after - before.mean(0), None
    centered = after - after.mean(0)
    products = [(1.0, before, before), (-1.0, centered, centered)]
    unit = before if axes is None else None
    errors = moment_errors(after - before, products, axes, FALSE_ALARM, unit=unit)
    # Chains that stand still show nothing.
    resolution = errors.resolution if accepted > LEAST_MOVES else Resolution(math.inf, math.inf)
    return DriftCheck(
        errors.mean_error, errors.sd_ratios, accepted, errors.faults, resolution, escaped
    )


def _escaped(ends: Tensor, others: Tensor) -> float:
    """The share of rows that are farther out than all others, 0 where chance may have put them."""
    if len(others) == 0:
        return 0.0
    number = int((ends.square().sum(-1) > others.square().sum(-1).max()).sum())
    total = len(ends) + len(others)
    p_value = math.prod((len(ends) - k) / (total - k) for k in range(number))
    return number / len(ends) if p_value < FALSE_ALARM else 0.0
