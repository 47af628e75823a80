# SPDX-License-Identifier: Apache-2.0
"""Bars for people who watch, and nothing in logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from tqdm.auto import tqdm

__all__ = ["announce", "progress_bar", "showing_progress", "steps_of"]

Item = TypeVar("Item")

DELAY = 1.0  # seconds, before which no bar appears
WORTH_SAYING = 5.0  # seconds

_wanted: ContextVar[bool] = ContextVar("progress", default=False)


@contextmanager
def showing_progress(wanted: bool) -> Iterator[None]:
    """Whether what is called in here shows bars."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def progress_bar(total: float, name: str, progress: bool, **options: Any) -> Any:
    """A tqdm bar, if it is wanted and someone may be watching: in a terminal or a notebook.

    **Example:**

    >>> with progress_bar(10, "refine", progress=False) as bar:
    ...     _ = bar.update(3)

    :param total: of its units.
    :param name: of what is going on.
    :param progress: whether it is wanted.
    :param options: of tqdm.
    """
    disable = not (progress and _is_watched())
    return tqdm(total=total, desc=name, disable=disable, delay=DELAY, **options)


def steps_of(steps: Iterable[Item], total: int, name: str) -> Iterator[Item]:
    """Steps with a bar that goes away, inside of a function that shows its progress.

    **Example:**

    >>> list(steps_of(range(3), 3, "search"))
    [0, 1, 2]

    :param steps: to be taken one after the other.
    :param total: how many these are at most.
    :param name: of what is going on.
    """
    with progress_bar(total, name, _wanted.get(), leave=False) as bar:
        for step in steps:
            yield step
            bar.update()


def announce(name: str, seconds: float) -> None:
    """Say how long something is going to take, if that is long and someone watches.

    :param name: of what is going to happen.
    :param seconds: as estimated.
    """
    if _wanted.get() and _is_watched() and seconds > WORTH_SAYING:
        tqdm.write(f"{name}: about {seconds:.0f} s of one core", file=sys.stderr)


def _is_watched() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
