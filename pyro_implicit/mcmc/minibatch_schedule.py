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

    def factor(self, step: int) -> float:
        """By which the chosen step size is multiplied, before it is made stable."""
        if step < self.warmup:
            return min(1.0, 4 * (step + 1) / self.warmup)
        return PEAK * 0.5 * (math.cos(math.pi * self._phase(step)) + 1) if self.cycles else 1.0

    def keeps(self, step: int) -> bool:
        """Whether positions after this step are draws."""
        left = self.steps - 1 - step
        if step < self.warmup:
            return False
        if not self.cycles:
            return left % -(-self.sampling // self.max_draws) == 0
        length = -(-self.sampling // self.cycles)
        interval = -(-length // (3 * max(1, self.max_draws // self.cycles)))
        place = (step - self.warmup) % length
        return self._phase(step) >= 2 / 3 and (length - 1 - place) % interval == 0

    def _phase(self, step: int) -> float:
        length = -(-self.sampling // self.cycles)
        return ((step - self.warmup) % length) / length
