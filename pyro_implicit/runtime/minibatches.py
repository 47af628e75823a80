# SPDX-License-Identifier: Apache-2.0
"""Endless minibatches in an order that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from typing import Any

import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_implicit.runtime.global_state import states_on_cpu

__all__ = ["BatchStream", "num_rows"]

END = object()
SPENT = (
    "{} is empty, or exhausted after one pass. Cure: a DataLoader, a list, or an object whose "
    "__iter__ starts anew, with at least one minibatch"
)


class BatchStream:
    """Endless minibatches of an iterable that can be iterated many times.

    The iterable draws from random streams of its own, so that its order and other random draws do
    not affect each other.

    **Example:**

    >>> stream = BatchStream([torch.zeros(2), (torch.ones(2), torch.ones(3))])
    >>> stream.epoch_length, [len(stream.next()) for _ in range(3)]
    (2, [1, 2, 1])

    :param batches: tuples of a model's arguments, or single arguments. Without ``len``, one pass
        counts them.
    :param name: the name of the argument, for messages.
    :ivar batches: the iterable.
    :ivar probed: the first sixteen minibatches, from several passes if necessary.
    :ivar epoch_length: the number of minibatches in a pass.
    :raises TypeError: if ``batches`` is no iterable of minibatches.
    :raises ValueError: if it is empty, can be iterated only once, or has a minibatch without rows.
    """

    def __init__(self, batches: Iterable[Any], name: str = "batches") -> None:
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
            raise TypeError(
                f"{name} must be an iterable of tuples of the model's arguments, such as a "
                f"DataLoader, but got a {type(batches).__name__}"
            )
        if isinstance(batches, Iterator):
            raise ValueError(SPENT.format(name))
        self.batches, self._name = batches, name
        sampler = getattr(batches, "sampler", None)
        self._set_epoch = getattr(sampler, "set_epoch", None)  # of a DistributedSampler
        self._next_epoch = 0
        owned = [getattr(part, "generator", None) for part in (batches, sampler)]
        self._generators = [part for part in owned if isinstance(part, torch.Generator)]
        self._iterator: Iterator[Any] = iter(())
        self._place = 0
        self._streams = self._epoch_start = self._own_streams()
        start = self.state()
        self.probed = [self.next() for _ in range(16)]
        self.restore(start)
        self.epoch_length = self._count()

    def next(self) -> tuple:
        """Return the next minibatch."""
        with self._inside():
            batch = next(self._iterator, END)
            if batch is END:
                self._epoch_start, self._place = self._read_streams(), 0
                if self._set_epoch is not None:
                    self._set_epoch(self._next_epoch)
                self._next_epoch += 1
                self._iterator = iter(self.batches)
                batch = next(self._iterator, END)
            self._place += 1
        if batch is END:
            raise ValueError(SPENT.format(self._name))
        batch = _as_tuple(batch, self._name)
        rows = {num_rows(part) for part in batch} - {None}
        if rows == {0}:
            raise ValueError(
                f"{self.where} has no rows. Cure: leave it out of {self._name}; a sampler or a "
                "filter may have made it"
            )
        return batch

    def begin_pass(self) -> None:
        """Let the next minibatch be the first one of a new pass."""
        self._iterator = iter(())

    @property
    def where(self) -> str:
        """Name the last minibatch, for messages."""
        return f"minibatch {self._place} of a pass over {self._name}"

    def state(self) -> dict[str, Any]:
        """Return the position in the stream, for a checkpoint."""
        epoch = self._next_epoch - bool(self._place)
        return {"place": self._place, "epoch_start": self._epoch_start, "epoch": epoch}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position; the epoch's minibatches before it are read again."""
        self._streams = self._epoch_start = states_on_cpu(state["epoch_start"])
        self._iterator, self._place, self._next_epoch = iter(()), 0, state["epoch"]
        for _ in range(state["place"]):
            self.next()

    def _count(self) -> int:
        if isinstance(self.batches, Sized):
            with suppress(TypeError):  # a DataLoader of an IterableDataset
                return len(self.batches)
        with self._inside():
            count = sum(1 for _ in self.batches)
        self._streams = self._epoch_start
        return count

    def _own_streams(self) -> list[Any]:
        seed, outside = int(torch.randint(2**31, ())), get_rng_state()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch GPUs, too
        streams = self._read_streams()
        set_rng_state(outside)
        return streams

    @contextmanager
    def _inside(self) -> Iterator[None]:
        outside = get_rng_state()
        set_rng_state(self._streams[0])
        for generator, state in zip(self._generators, self._streams[1:], strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            self._streams = self._read_streams()
            set_rng_state(outside)

    def _read_streams(self) -> list[Any]:
        return [get_rng_state(), *(generator.get_state() for generator in self._generators)]


def num_rows(part: Any) -> int | None:
    """Return the rows of one part of a minibatch; None for a part without rows."""
    shape: Any = getattr(part, "shape", ())
    # A method of distributions.
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def _as_tuple(batch: Any, name: str) -> tuple:
    if isinstance(batch, Mapping):
        raise TypeError(
            f"{name} gives dicts, but the model takes arguments by position. Cure: tuples, in the "
            "order of the model's arguments"
        )
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
