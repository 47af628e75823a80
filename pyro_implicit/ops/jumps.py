# SPDX-License-Identifier: Apache-2.0
"""Jumps of a log-density, as at a change point or at the end of its support."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.ops.ensemble_hmc import ChainState, Score, chosen
from pyro_implicit.ops.policy import JUMPS

__all__ = ["jump_share"]


@torch.no_grad()
def jump_share(white: Tensor, score: Score, generator: torch.Generator | None = None) -> float:
    """Return the share of short steps over which a log-density jumps.

    Gradients do not show a jump: Stein's identities do not hold, and trajectories of Hamiltonian
    Monte Carlo are rejected. The search halves each step and keeps the half over which the
    log-density differs more from the trapezoidal rule of its scores. For a smooth density this
    difference falls by a factor of eight, at a kink by two, and at a jump it stays. The end of a
    support is a jump unless the density vanishes there.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> draws = torch.randn(2000, 1)
    >>> jump_share(draws, lambda u: (-0.5 * u.square().sum(-1), -u))
    0.0
    >>> jump_share(draws, lambda u: ((u > 0).double().sum(-1), torch.zeros_like(u))) > 0.05
    True

    :param white: draws of about unit covariance, ``(n, d)``.
    :param score: the log-density ``(n,)`` and its gradient at points ``(n, d)``.
    :param generator: the random stream of the directions; by default torch's own.
    """

    def at(points: Tensor) -> ChainState:
        return ChainState(points, *score(points))

    def difference(one: ChainState, other: ChainState) -> Tensor:
        way = other.position - one.position
        slope = 0.5 * ((one.gradient + other.gradient) * way).sum(-1)
        slope = slope.nan_to_num(0.0, 0.0, 0.0)  # outside of the support
        return (other.log_density - one.log_density - slope).abs().nan_to_num(0.0)

    def moved(one: ChainState) -> Tensor:
        # Far out, where gradients are large, rounding of a position changes the log-density. If
        # the product overflows, no difference is a jump.
        size = (one.position.abs() + JUMPS.step) * one.gradient.abs()
        size = JUMPS.num_roundings * size.sum(-1)
        return torch.where(one.log_density.isinf(), 0.0, size).nan_to_num(0.0, torch.inf, 0.0)

    way = torch.randn(white.shape, generator=generator, dtype=white.dtype, device=white.device)
    way = JUMPS.step * way / way.norm(dim=-1, keepdim=True)
    first, last = at(white), at(white + way)
    log_density = first.log_density
    for _ in range(JUMPS.num_halvings):
        middle = at(0.5 * (first.position + last.position))
        is_first = difference(first, middle) > difference(middle, last)
        first, last = chosen(is_first, first, middle), chosen(is_first, middle, last)
    size = first.log_density.abs() / JUMPS.step + moved(first) + moved(last)
    rounding = torch.finfo(white.dtype).eps * size
    is_jump = difference(first, last) > JUMPS.least_jump + rounding
    vanishes = torch.minimum(first.log_density, last.log_density).isinf() & (
        torch.maximum(first.log_density, last.log_density) < log_density - JUMPS.vanishing
    )
    return (is_jump & ~vanishes).double().mean().item()
