# SPDX-License-Identifier: Apache-2.0
"""One thread at a time: Pyro's handlers and parameters, and random numbers, are the process's."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_turn"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_lock = threading.RLock()


def in_turn(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that waits until no other thread is in one of these.

    Else sites of one thread's model are seen by the handlers of another's.

    **Example:**

    >>> @in_turn
    ... def half(x: float) -> float:
    ...     return x / 2
    >>> half(3.0)
    1.5

    :param function: that runs models.
    """

    @functools.wraps(function)
    def waiting(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _lock:
            return function(*args, **kwargs)

    return waiting


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "fork"):  # a thread that is no more in the child may have held it
    os.register_at_fork(after_in_child=_renew)
