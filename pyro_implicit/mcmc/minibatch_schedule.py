# SPDX-License-Identifier: Apache-2.0
"""When chains that see minibatches choose their step, how it varies, and when they leave draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Schedule"]

PEAK = 4.0  # of cyclical steps, which are below a quarter of it in the last third of a cycle


@dataclass(frozen=True)
class Schedule:
    """When what happens.

    :param steps: in all.
    :param warmup: so many of them; the step is chosen anew after a quarter, a half and all of
        them.
    :param cycles: in which the step falls along a cosine, after the warm-up; 0 for a constant step.
    :param max_draws: of each chain.
    """

    steps: int
    warmup: int
    cycles: int
    max_draws: int

    @property
    def sampling(self) -> int:
        """Steps after the warm-up."""
        return self.steps - self.warmup

    @property
    def windows(self) -> set[int]:
        """Ends of the windows of the warm-up."""
        return {max(1, self.warmup >> shift) for shift in (2, 1, 0)}

    def __post_init__(self) -> None:
        most = min(self.max_draws, self.sampling // 3)
        if self.cycles > most:
            raise ValueError(
                f"cycles must be at most {most}, with {self.sampling} steps after the warm-up and "
                f"{self.max_draws} draws, but got {self.cycles}. Cure: more max_epochs or max_draws"
            )

    def factor(self, step: int) -> float:
        """By which the chosen step size is multiplied, before it is made stable."""
        if step < self.warmup:
            return min(1.0, 4 * (step + 1) / self.warmup)
        if not self.cycles:
            return 1.0
        place, length = self._place(step)
        return PEAK * 0.5 * (math.cos(math.pi * place / length) + 1)

    def keeps(self, step: int) -> bool:
        """Whether positions after this step are draws."""
        if step < self.warmup:
            return False
        if not self.cycles:
            return (self.steps - 1 - step) % -(-self.sampling // self.max_draws) == 0
        place, length = self._place(step)
        interval = -(-length // (3 * (self.max_draws // self.cycles)))
        return 3 * place >= 2 * length and (length - 1 - place) % interval == 0

    def _place(self, step: int) -> tuple[int, int]:
        """How far it is from the start of its cycle, and how long that is."""
        cycle = ((step - self.warmup) * self.cycles) // self.sampling
        start, end = (-(-(cycle + k) * self.sampling // self.cycles) for k in (0, 1))
        return step - self.warmup - start, end - start
