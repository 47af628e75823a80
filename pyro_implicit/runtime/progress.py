# SPDX-License-Identifier: Apache-2.0
"""Progress of stages: bars, callbacks and the log ``pyro_implicit``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tqdm.auto import tqdm

from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.policy import DISPLAY

__all__ = [
    "Callback",
    "Stage",
    "Step",
    "Watch",
    "announce",
    "new_stage",
    "progress_is_shown",
    "steps_of",
    "watch",
    "watching",
]

LOG = logging.getLogger("pyro_implicit")
LOG.addHandler(logging.NullHandler())


@dataclass
class Stage:
    """One stage of :func:`~pyro_implicit.fit`, or a whole training or run of chains.

    ``name``, duration in ``seconds``, and ``outcome`` in words: the result, or the reason of a
    failure. ``error`` is the error of a failed stage.
    """

    name: str
    seconds: float = 0.0
    outcome: str = ""
    error: Exception | None = None


@dataclass(frozen=True)
class Step:
    """One step of a stage, as a :class:`Callback` sees it.

    :param stage: the name of the training, search or chains.
    :param number: the work done so far: steps, or gradients of each chain.
    :param total: the maximal work.
    :param values: numbers by name: the ``loss`` of a training; ``log_density``, ``step_size`` and
        ``sampling`` (0 in the warm-up, then 1) of chains with all data.
    """

    stage: str
    number: int
    total: float
    values: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """An observer of ``fit``, ``train`` and ``refine``; override one method or both.

    A callback may draw random numbers without changing the result. An error in a callback is shown
    as a warning; the callback is not called again, and the stage continues.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_implicit import fit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> class Print(Callback):
    ...     def on_stage(self, stage):
    ...         print(stage.name)
    >>> _ = fit(model, callbacks=[Print()], seed=0)
    search
    gaussian
    choose
    correct
    """

    _failed = False

    def on_step(self, step: Step) -> None:
        """Observe a step.

        :raises StopIteration: to end a training, a search or chains, as ``max_seconds`` would:
            chains first make the few draws that a result needs.
        """

    def on_stage(self, stage: Stage) -> None:
        """Observe the end of a stage."""


class _Audience(NamedTuple):
    shows_bars: bool = False
    callbacks: tuple[Callback, ...] = ()
    in_stage: bool = False

    def call(self, method: str, event: Any) -> bool:
        """Call all callbacks; return whether one of them raised ``StopIteration``."""
        stops = False
        for callback in self.callbacks:
            if callback._failed:
                continue
            # Functions that a callback calls have no callbacks and draw from other streams.
            with same_streams(), _set(NOBODY):
                try:
                    getattr(callback, method)(event)
                except StopIteration:
                    stops = True
                except Exception as error:  # of the user's code
                    callback._failed = True
                    warn_user(
                        f"{type(callback).__name__}.{method} failed ({first_line(error)}) and is "
                        "not called again. Cure: correct the error in the callback"
                    )
        return stops


NOBODY = _Audience()
_audience: ContextVar[_Audience] = ContextVar("audience", default=NOBODY)


@contextmanager
def _set(audience: _Audience) -> Iterator[None]:
    token = _audience.set(audience)
    try:
        yield
    finally:
        _audience.reset(token)


@contextmanager
def watching(progress: bool, callbacks: Iterable[Callback] = ()) -> Iterator[None]:
    """Set whether functions that are called inside show bars, and add callbacks to those outside.

    **Example:**

    >>> with watching(False, [Callback()]):
    ...     _ = list(steps_of(range(3), 3, "search"))

    :param progress: whether to show bars in a terminal or a notebook.
    :raises TypeError: for a callback of another class.
    """
    new, outside = tuple(callbacks), _audience.get()
    for one in new:
        if not isinstance(one, Callback):
            raise TypeError(
                f"callbacks must be instances of Callback, but got {one!r}. Cure: a subclass of "
                "pyro_implicit.callbacks.Callback with on_step or on_stage, and its instance"
            )
        one._failed = False
    with _set(_Audience(progress, (*outside.callbacks, *new), outside.in_stage)):
        yield


@contextmanager
def new_stage(name: str) -> Iterator[Stage]:
    """Time a stage, log it and tell the callbacks, unless it is a part of another stage.

    **Example:**

    >>> with new_stage("search") as line:
    ...     line.outcome = "1 mode"
    >>> line.name, line.outcome
    ('search', '1 mode')

    :param name: the name of the stage.
    """
    line, audience = Stage(name), _audience.get()
    start = time.perf_counter()
    try:
        with _set(audience._replace(in_stage=True)):
            yield line
    finally:
        line.seconds = time.perf_counter() - start
        if not audience.in_stage:
            LOG.info("%s: %.1f s, %s", line.name, line.seconds, line.outcome)
            audience.call("on_stage", line)


class Watch:
    """The bar and the callbacks of one loop.

    :ivar total: the maximal work, which the loop may change.
    :ivar stopped: whether a callback ends the loop.
    """

    def __init__(self, name: str, total: float, bar: Any, audience: _Audience) -> None:
        self._name, self.total, self._bar, self._audience = name, total, bar, audience
        self._number, self.stopped = bar.n, False

    def step(
        self,
        number: int | None = None,
        values: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Report a step.

        :param number: the work done so far, by default one more than before.
        :param values: is called if somebody sees the values.
        """
        before = self._number
        self._number = before + 1 if number is None else number
        callbacks = self._audience.callbacks
        if self._bar.disable and not callbacks:
            return
        found = values()
        text = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.total = self.total
        self._bar.update(self._number - before)
        if callbacks:
            step = Step(self._name, self._number, self.total, found)
            self.stopped |= self._audience.call("on_step", step)


@contextmanager
def watch(name: str, total: float, initial: int = 0, **options: Any) -> Iterator[Watch]:
    """Show a loop inside of :func:`watching` by a bar, which appears after a second.

    **Example:**

    >>> with watch("refine", 10) as watched:
    ...     watched.step(3)

    :param name: the name of the loop.
    :param total: the maximal work.
    :param initial: the work that is already done.
    :param options: options of tqdm.
    """
    audience = _audience.get()
    LOG.debug("%s: at most %g steps", name, total)
    hidden = not progress_is_shown()
    with tqdm(
        total=total, desc=name, disable=hidden, delay=DISPLAY.delay, initial=initial, **options
    ) as bar:
        yield Watch(name, total, bar, audience)


Item = TypeVar("Item")


def steps_of(steps: Iterable[Item], total: int, name: str) -> Iterator[Item]:
    """Iterate inside of :func:`watching`, with a bar that disappears at the end.

    **Example:**

    >>> list(steps_of(range(3), 3, "weights"))
    [0, 1, 2]

    :param steps: an iterable, of which callbacks see every step but cannot end it.
    :param total: the maximal number of its items.
    :param name: the name of the loop.
    """
    with watch(name, total, leave=False) as watched:
        for step in steps:
            yield step
            watched.step()


def announce(name: str, seconds: float) -> None:
    """Log the estimated time of a part; print it if it is more than five seconds.

    :param name: name of the part.
    :param seconds: seconds of one core.
    """
    LOG.info("%s: about %.0f s of one core", name, seconds)
    if progress_is_shown() and seconds > DISPLAY.worth_saying:
        tqdm.write(f"{name}: about {seconds:.0f} s of one core", file=sys.stderr)


def progress_is_shown() -> bool:
    """Tell whether progress is enabled and can be shown, in a terminal or a notebook."""
    return _audience.get().shows_bars and _is_watched()


def _is_watched() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
