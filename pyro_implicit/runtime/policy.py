# SPDX-License-Identifier: Apache-2.0
"""Limits of the display of progress."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DISPLAY", "DisplayPolicy"]


@dataclass(frozen=True)
class DisplayPolicy:
    """When progress is shown."""

    #: Seconds before a bar appears; shorter parts show none.
    delay: float = 1.0

    #: Estimated seconds of a part from which they are announced.
    worth_saying: float = 5.0


DISPLAY = DisplayPolicy()
