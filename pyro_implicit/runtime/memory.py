# SPDX-License-Identifier: Apache-2.0
"""Freed memory that stays in the process."""

from __future__ import annotations

import ctypes
import os
import sys
from enum import IntEnum
from functools import cache

__all__ = ["keep_freed_memory"]


class _Parameter(IntEnum):
    """As in glibc's header ``malloc.h``."""

    TRIM_THRESHOLD = -1
    TOP_PAD = -2
    MMAP_THRESHOLD = -3


@cache
def keep_freed_memory(most: int, largest: int, step: int) -> bool:
    """Let glibc keep freed memory for the next tensor instead of returning it to the system.

    By default glibc returns free memory at the end of its heap as soon as it exceeds 128 KiB, and
    each page of the next tensor is then a fault of 2 microseconds. Whether a program with tensors
    of 50 KiB is slowed down by this, by a factor of up to three, depends on the addresses.

    The setting is that of the process, and stays. Other systems and other allocators are left
    alone, as are programs whose environment has settings of its own (``MALLOC_TRIM_THRESHOLD_``,
    ``MALLOC_TOP_PAD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).

    :param most: bytes of free memory at the end of the heap that are kept.
    :param largest: bytes of a tensor from which it has pages of its own, at most 32 MiB.
    :param step: bytes by which the heap grows at least.
    :returns: whether it was set.
    """
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_Parameter.MMAP_THRESHOLD, largest),
        (_Parameter.TRIM_THRESHOLD, most),
        (_Parameter.TOP_PAD, step),
    )
    return all(mallopt(*setting) == 1 for setting in settings)
