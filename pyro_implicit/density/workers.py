# SPDX-License-Identifier: Apache-2.0
"""Rows of a score, divided between forked processes that share its input and output."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from pyro_implicit.density.policy import COST
from pyro_implicit.runtime.global_state import single_thread
from pyro_implicit.runtime.messages import first_line, refuse_counts, warn_user

__all__ = ["Workers", "current_workers", "workers"]

Score = Callable[[Tensor], tuple[Tensor, Tensor]]
_active: list[Workers] = []


@contextmanager
def workers(number: int | None) -> Iterator[None]:
    """Divide the rows of expensive scores between processes, which end with this context.

    **Example:**

    >>> with workers(2):
    ...     print(current_workers().number)
    2

    :param number: number of processes, this one included; by default as many as torch has
        intra-operation threads, at most 4.
    :raises ValueError: for a number below 1.
    """
    if number is None:
        number = min(COST.most_workers, torch.get_num_threads())
    refuse_counts(num_workers=number)
    team = Workers(number)
    _active.append(team)
    try:
        yield
    finally:
        _active.remove(team)
        team.close()


def current_workers() -> Workers:
    """Return the innermost :func:`workers`; a single one outside of them."""
    return _active[-1] if _active else Workers(1)


class Workers:
    """The processes of all scores that are called in a context.

    Forked processes have the model and its data at once, whether these can be pickled or not, and
    end when the score is deleted. ``number`` is 1 if processes cannot be forked safely (other
    systems than Linux, a program that may use an accelerator), inside the processes of an executor,
    which share the cores already, and after an error of a process.

    :param number: number of processes, this one included.
    """

    def __init__(self, number: int) -> None:
        is_free = multiprocessing.parent_process() is None and not torch.accelerator.is_available()
        self.number = number if is_free and sys.platform == "linux" else 1
        self._teams: WeakKeyDictionary[Any, _Team] = WeakKeyDictionary()

    def score(
        self, owner: Any, score: Score, rows: Tensor, like: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return a score at rows ``(n, d)``, in parts; None if it must be computed in one process.

        :param owner: the processes end with this object.
        :param score: of rows. A process keeps it as it is at the first call.
        :param like: its results for no rows, ``(0, *shape)``.
        """
        if self.number == 1:
            return None
        team = self._teams.get(owner)
        try:
            if team is None or len(team.rows) < len(rows):
                team = self._teams[owner] = _Team(score, rows, like, self.number)
            return team(score, rows)
        except (OSError, EOFError, RuntimeError) as error:
            self.close()
            self.number = 1
            warn_user(
                f"the rows of a score are no longer divided between processes: {first_line(error)}"
                ". Cure: num_workers=1"
            )
            return None
        except BaseException:  # Ctrl-C amid a call: an answer is still in its pipe
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for team in self._teams.values():
            team.end()
        self._teams.clear()


class _Team:
    def __init__(self, score: Score, rows: Tensor, like: Sequence[Tensor], number: int) -> None:
        self.rows = torch.empty_like(rows).share_memory_()
        self.results = [one.new_empty(len(rows), *one.shape[1:]).share_memory_() for one in like]
        pipes: list[Connection] = []
        shared = (score, self.rows, self.results)
        context = multiprocessing.get_context("fork")
        processes = []
        for index in range(1, number):
            here, there = context.Pipe()
            pipes.append(here)
            part = (index, number)
            process = context.Process(target=_serve, args=(there, list(pipes), part, *shared))
            process.daemon = True
            with warnings.catch_warnings():
                # Python 3.12 warns of threads: a child uses none of theirs, nor starts any.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            processes.append(process)
        self.pipes = pipes
        self.end = finalize(self, _end, pipes, processes)

    def __call__(self, score: Score, rows: Tensor) -> tuple[Tensor, Tensor]:
        number = len(rows)
        self.rows[:number] = rows
        for pipe in self.pipes:
            pipe.send(number)
        with single_thread():
            own = _part(number, 0, len(self.pipes) + 1)
            _write(self.results, own, score(rows[own]))
        for pipe in self.pipes:
            if not pipe.poll(COST.longest_answer):
                raise OSError(f"a process has not answered for {COST.longest_answer:g} s")
            if error := pipe.recv():
                raise RuntimeError(f"a process raised {error}")
        log_prob, gradient = (result[:number].clone() for result in self.results)
        return log_prob, gradient


def _write(results: Sequence[Tensor], own: slice, found: Sequence[Tensor]) -> None:
    for result, part in zip(results, found, strict=True):
        result[own] = part


def _part(number: int, index: int, parts: int) -> slice:
    return slice(number * index // parts, number * (index + 1) // parts)


def _serve(
    pipe: Connection,
    foreign: list[Connection],
    part: tuple[int, int],
    score: Score,
    rows: Tensor,
    results: Sequence[Tensor],
) -> None:
    """Answer until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for one in foreign:
        one.close()
    _active.clear()
    torch.set_num_threads(1)  # the others' threads are not in this process
    with suppress(EOFError):
        while number := pipe.recv():
            own, error = _part(number, *part), ""
            try:
                _write(results, own, score(rows[own]))
            except BaseException as found:  # the parent waits for an answer, whatever happens
                error = first_line(found)
            pipe.send(error)


def _end(pipes: list[Connection], processes: list[Any]) -> None:
    for pipe in pipes:
        with suppress(OSError):
            pipe.send(0)
        pipe.close()
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
