# SPDX-License-Identifier: Apache-2.0
"""The clock of a call with ``max_seconds``."""

from __future__ import annotations

import math
import time

__all__ = ["NO_LIMIT", "TimeLimit"]


class TimeLimit:
    """Remaining wall time of a call, from which all its stages read.

    **Example:**

    >>> TimeLimit(None).left()
    inf

    :param max_seconds: the limit in seconds from now, or None for no limit.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.end = math.inf if max_seconds is None else time.perf_counter() + max_seconds

    def left(self, share: float = 1.0) -> float:
        """Return a share of the remaining seconds, at least a nanosecond."""
        return max(1e-9, share * (self.end - time.perf_counter()))

    def seconds(self) -> float | None:
        """Return the remaining seconds as ``max_seconds`` of another call."""
        left = self.left()
        return left if math.isfinite(left) else None

    def is_over(self) -> bool:
        """Return whether no time is left."""
        return time.perf_counter() >= self.end


NO_LIMIT = TimeLimit(None)
