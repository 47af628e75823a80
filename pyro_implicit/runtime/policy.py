# SPDX-License-Identifier: Apache-2.0
"""Limits of the display of progress, and default lengths of runs by minibatches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DISPLAY", "DisplayPolicy", "EpochPolicy"]


@dataclass(frozen=True)
class DisplayPolicy:
    """When progress is shown."""

    #: Seconds before a bar appears; shorter parts show none.
    delay: float = 1.0

    #: Estimated seconds of a part from which they are announced.
    worth_saying: float = 5.0


@dataclass(frozen=True)
class EpochPolicy:
    """Passes over the minibatches of trainings and chains, by default."""

    #: Passes, and the number of steps that they make at least: after the 100 steps of ten passes
    #: over 1,000 rows, means of a training are off by .4 sds.
    epochs: int = 10
    least_steps: int = 2000

    def epochs_of(self, epoch_length: int) -> int:
        """Return the default number of epochs of ``epoch_length`` minibatches."""
        return max(self.epochs, -(-self.least_steps // epoch_length))


DISPLAY = DisplayPolicy()
