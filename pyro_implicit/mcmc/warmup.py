# SPDX-License-Identifier: Apache-2.0
"""The windows of a warm-up: what the chains did in the last one, and when the next one ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from pyro_implicit.mcmc.policy import ChainPolicy, WarmupPolicy

__all__ = ["WarmUp"]


@dataclass
class WarmUp:
    """Transitions of all chains in windows, each twice as long as the last one.

    :param num_windows: windows so far whose draws had spread enough for a frame.
    :param gradients: gradients of each chain before the warm-up; ``seconds`` is the wall time,
        ``cpu_seconds`` that of one core.
    """

    num_windows: int = 0
    gradients: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    _positions: list[Tensor] = field(default_factory=list, repr=False)
    _log_densities: list[Tensor] = field(default_factory=list, repr=False)
    _failed: list[float] = field(default_factory=list, repr=False)

    def append(self, position: Tensor, log_density: Tensor, failed: float) -> None:
        """Append a transition.

        :param position: in the frame of the window, ``(num_chains, d)``.
        :param failed: the share of chains whose trajectories failed.
        """
        self._positions.append(position)
        self._log_densities.append(log_density)
        self._failed.append(failed)

    def next_window(self, counts: bool = True) -> None:
        """Begin another window.

        :param counts: whether the last one had a right frame, so that this one is longer.
        """
        self._positions, self._log_densities, self._failed = [], [], []
        self.num_windows += counts

    def copy(self) -> WarmUp:
        """Return a copy that goes on independently."""
        lists = [*self._positions], [*self._log_densities], [*self._failed]
        return replace(self, _positions=lists[0], _log_densities=lists[1], _failed=lists[2])

    def is_full(self, limits: WarmupPolicy) -> bool:
        """Return whether the window has all its transitions."""
        return len(self._positions) >= limits.first_window << self.num_windows

    def share(
        self, gradients: int, max_gradients: float, seconds: float, max_seconds: float | None
    ) -> float:
        """Return the share of the budget left at the beginning that the warm-up has spent."""
        # A callback may end the chains before a second warm-up takes its first gradient.
        share = (gradients - self.gradients) / max(1, max_gradients - self.gradients)
        if max_seconds is not None:
            share = max(share, (seconds - self.seconds) / max(max_seconds - self.seconds, 1e-9))
        return share

    @property
    def late(self) -> list[Tensor]:
        """The positions of the second half of the window."""
        return self._positions[self._half :]

    @property
    def _half(self) -> int:
        return len(self._positions) // 2

    def moving(self, policy: ChainPolicy) -> Tensor | None:
        """Return which chains moved and are not lost, ``(num_chains,)``; None if a window is too
        short to tell, or if no chain moved."""
        path, log_densities = torch.stack(self._positions), torch.stack(self._log_densities)
        lost = _lost(log_densities[self._half :], policy)
        moving = (path.amax(0) > path.amin(0)).any(-1) & ~lost
        return moving if len(path) >= policy.warmup.first_window and moving.any() else None

    def recent(self, limits: WarmupPolicy, moving: Tensor | None = None) -> Tensor:
        """Return positions of the second half of the window, ``(n, d)``, the last ones first.

        :param moving: the chains that count; by default all.
        """
        late = self.late[::-1]
        stride = max(1, -(-len(late) * len(late[0]) // limits.max_pool))
        return torch.cat([one if moving is None else one[moving] for one in late[::stride]])

    def is_stationary(self, limits: WarmupPolicy) -> bool:
        """Return whether the mean log-density is the same in both halves of the window."""
        log_densities = torch.stack(self._log_densities)
        late = log_densities[self._half :]
        change = late.mean(0) - log_densities[: self._half].mean(0)
        error = change.std() / math.sqrt(len(change))
        allowed = torch.maximum(limits.drift_errors * error, limits.drift_sd * late.std())
        return bool(change.mean().abs() <= allowed)

    def is_stiff(self, limits: WarmupPolicy) -> bool:
        """Return whether trajectories fail in the second half of the window."""
        return fmean(self._failed[self._half :]) > limits.max_failed


def _lost(log_densities: Tensor, policy: ChainPolicy) -> Tensor:
    """Return which chains stay where there is next to no mass: too few to be another mode, with
    log-densities ``(num_transitions, num_chains)`` far below all others."""
    ordered = log_densities.flatten().sort().values
    low, middle, high = (ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3))
    reach = (policy.frame.outlier_ranges * (high - low)).clamp(min=policy.warmup.least_lost)
    lost = log_densities.amax(0) < middle - reach
    return lost & (lost.double().mean() <= policy.warmup.max_lost)
