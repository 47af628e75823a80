# SPDX-License-Identifier: Apache-2.0
"""When a training slows down and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """When to slow down and when to stop.

    **Example:**

    >>> schedule = Schedule(num_steps=100, lr=0.1)
    >>> [round(schedule.rate(step, decay_start=50), 3) for step in (0, 50, 75, 100)]
    [0.1, 0.1, 0.05, 0.0]

    :param num_steps: at most.
    :param lr: Adam's learning rate, until the smoothed loss stands still; then it falls to zero
        along a cosine in ``num_steps * decay`` steps.
    :param plateau: whether that begins it, else it begins so many steps before the end.
    :param decay: that share. With 1 the rate falls from the first step on.
    :param window: steps whose mean is one smoothed loss. It stands still when the last two did
        not fall below the lowest before them by more than their standard error.
    :param max_gap: an exact density's loss may stop at once when the guide is so near, in nats:
        half the variance of the log-weights, by the spread of the last 25 losses.
    :param clip_norm: gradients are cut to this norm.
    """

    num_steps: int = 3000
    lr: float = 0.01
    decay: float = 0.5
    plateau: bool = True
    window: int = 100
    max_gap: float = 0.0005
    clip_norm: float = 10.0

    def rate(self, step: int, decay_start: int) -> float:
        """The learning rate of a step whose decay began, or will not have begun, at another."""
        return self._fall((step - decay_start) / max(1, round(self.num_steps * self.decay)))

    def rate_by_clock(self, share: float) -> float:
        """The highest learning rate when this share of the time is over."""
        return self._fall(2 * share - 1)

    def _fall(self, progress: float) -> float:
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def stands_still(self, losses: list[float]) -> bool:
        """Whether the smoothed loss has stopped falling; asked at the end of a window."""
        if not self.plateau or len(losses) % self.window or len(losses) < 4 * self.window:
            return False
        windows = torch.tensor(losses, dtype=torch.float64).reshape(-1, self.window)
        means = windows.nanmean(-1)
        latest = windows[-2:].flatten()
        error = latest[latest.isfinite()].std() / math.sqrt(2 * self.window)
        return bool(means[-2:].mean() > means[:-2].min() - error)

    def is_exact(self, losses: list[float], num_particles: int) -> bool:
        """Whether an exact density's loss shows the guide to be the posterior."""
        if len(losses) % 25 or not losses:
            return False
        spread = torch.tensor(losses[-25:], dtype=torch.float64).var()
        return bool(0.5 * num_particles * spread < self.max_gap)
