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
    MMAP_THRESHOLD = -3


@cache
def keep_freed_memory(most: int, largest: int) -> bool:
    """Let glibc keep freed memory for the next tensor instead of returning it to the system.

    By default, glibc returns the free memory at the end of its heap when there are more than
    128 KiB of it. The next tensor then causes a page fault for each of its pages, about 2
    microseconds each on a virtual machine. This made programs with tensors of 50 KiB up to three
    times slower, or not at all, depending on their addresses.

    The setting applies to the whole process, and is never undone. Nothing is set on other systems,
    or if the environment has settings of its own (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_TOP_PAD_``,
    ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``). Other allocators ignore it.

    :param most: bytes of free memory at the end of the heap that are kept.
    :param largest: bytes of a tensor above which its memory is returned at once, at most 32 MiB.
    :returns: whether it was set.
    """
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one of the two fixes the other at 128 KiB, which glibc otherwise adapts.
    settings = ((_Parameter.MMAP_THRESHOLD, largest), (_Parameter.TRIM_THRESHOLD, most))
    return all(mallopt(*setting) == 1 for setting in settings)
