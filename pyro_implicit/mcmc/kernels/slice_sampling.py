# SPDX-License-Identifier: Apache-2.0
"""Slice sampling along random directions, for densities that end or jump."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.kernels.hmc import init
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, SlicePolicy
from pyro_implicit.ops.ensemble_hmc import ChainState, Score, chosen

__all__ = ["Info", "Settings", "SliceTuning", "adaptation", "init", "step"]


class Settings(NamedTuple):
    """Width of the first interval, directions of a transition, most points of an interval."""

    width: float
    num_directions: int
    max_shrinks: int


class Info(NamedTuple):
    """Share of the directions along which a chain moved, ``(num_chains,)``, and the evaluations of
    the log-density by each chain."""

    acceptance: Tensor
    num_gradients: int


def step(state: ChainState, score: Score, settings: Settings) -> tuple[ChainState, Info]:
    r"""Make one transition that leaves the density invariant.

    Along each direction u, uniform on the sphere, the next point is uniform among the points
    :math:`z + t u` of an interval whose density exceeds :math:`p(z) \, v`, with v uniform on
    (0, 1). The interval of the given width lies around t = 0 at random. It shrinks towards 0 at
    each point that is too low. Neither gradients nor a step size matter, so that a wall of the
    density costs little. A chain begins its next direction when it has moved, and waits
    for the others only at the end of the transition.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> def score(z):  # an exponential distribution
    ...     return torch.where(z > 0, -z, -torch.inf).squeeze(-1), -torch.ones_like(z)
    >>> state = init(torch.ones(2000, 1), score)
    >>> for _ in range(20):
    ...     state, info = step(state, score, Settings(4.0, 1, 50))
    >>> f"{state.position.mean():.1f} {state.position.std():.1f}"
    '1.0 1.0'

    :param score: log-densities and gradients of points ``(num_chains, d)``. Points at which one of
        them is not finite are rejected.
    :param settings: interval and number of directions.
    :returns: the next state and the info. A chain stays where it is along a direction for which
        ``max_shrinks`` points were too low.

    **References:**

    1. Neal (2003), *Slice Sampling*, section 4 (shrinkage) and figure 8 (hit and run).
    """
    left = torch.full_like(state.log_density, settings.num_directions, dtype=torch.long)
    tries, moved = torch.zeros_like(left), torch.zeros_like(left)
    line, evaluations = _line(state, settings), 0
    while (left > 0).any():
        length = torch.lerp(line.low, line.high, torch.rand_like(line.low))
        found = init(state.position + length.unsqueeze(-1) * line.direction, score)
        evaluations, tries = evaluations + 1, tries + 1
        is_high = (found.log_density > line.level) & found.gradient.isfinite().all(-1)
        taken = is_high & (left > 0)
        state = chosen(taken, found, state)
        ended = taken | (tries >= settings.max_shrinks)
        left, moved = left - ended.long(), moved + taken.long()
        tries = tries.masked_fill(ended, 0)
        is_left = length < 0
        shrunk = line._replace(
            low=torch.where(is_left, length, line.low), high=torch.where(is_left, line.high, length)
        )
        line = chosen(ended, _line(state, settings), shrunk)
    return state, Info(moved.to(state.log_density) / settings.num_directions, evaluations)


class _Line(NamedTuple):
    """Unit vectors ``(num_chains, d)``, log-densities that points must exceed, and intervals."""

    direction: Tensor
    level: Tensor
    low: Tensor
    high: Tensor


def _line(state: ChainState, settings: Settings) -> _Line:
    direction = torch.randn_like(state.position)
    level = state.log_density + torch.rand_like(state.log_density).log()
    low = -settings.width * torch.rand_like(level)
    unit = direction / direction.norm(dim=-1, keepdim=True)
    return _Line(unit, level, low, low + settings.width)


@dataclass(frozen=True)
class SliceTuning:
    """The constant settings of a slice sampler, whose chains adapt their frame only.

    :param policy: the width and the limit of the shrinkage.
    :param num_directions: directions of a transition.
    """

    policy: SlicePolicy = field(default_factory=SlicePolicy)
    num_directions: int = DEFAULT.slice.num_directions

    is_stiff: ClassVar[bool] = False  # there are no trajectories that could fail
    is_at_limit: ClassVar[bool] = False  # longer transitions would only be rarer

    def settings(self, state: ChainState) -> Settings:
        """Return the settings of the next transition, which do not depend on the state."""
        return Settings(self.policy.width, self.num_directions, self.policy.max_shrinks)

    def update(self, *_: Any) -> SliceTuning:
        """Return the same settings."""
        return self

    frozen = unfrozen = with_step_size_spread = update

    def restart(self, score: Score, state: ChainState) -> tuple[ChainState, SliceTuning, int]:
        """Return the same state and settings, without an evaluation."""
        return state, self, 0

    def limited(self, max_gradients: int) -> SliceTuning:
        """Limit the evaluations of a transition."""
        most = max(1, max_gradients // self.policy.usual_shrinks)
        return replace(self, num_directions=min(self.policy.num_directions, most))

    @property
    def max_gradients(self) -> int:
        """The evaluations of a transition, about."""
        return self.num_directions * self.policy.usual_shrinks

    @property
    def step_size(self) -> float:
        """The width of the first interval."""
        return self.policy.width

    trajectory_length = step_size


def adaptation(policy: ChainPolicy = DEFAULT, max_gradients: int = 64) -> SliceTuning:
    """Return the settings of a run."""
    return SliceTuning(policy.slice).limited(max_gradients)
