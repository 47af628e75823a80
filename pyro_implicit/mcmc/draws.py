# SPDX-License-Identifier: Apache-2.0
"""Stores of draws, in memory or on disk, and the history of the stopping rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pyro_implicit.mcmc.frame import outlier_bounds
from pyro_implicit.mcmc.policy import DEFAULT, StoppingPolicy
from pyro_implicit.mcmc.stopping import Drift, Tracked, drift, pooled
from pyro_implicit.runtime.files import load_file, save_file

__all__ = ["DrawStore", "History"]


class DrawStore:
    """Snapshots of all chains in order.

    **Example:**

    >>> import torch
    >>> store = DrawStore()
    >>> store.append(torch.zeros(4, 3))
    >>> store.append(torch.ones(4, 3))
    >>> len(store), store.take(torch.tensor([3, 4, 0])).sum(-1)
    (2, tensor([0., 3., 0.]))

    :param folder: the folder of one file for each snapshot; without it they stay in memory. Files
        are complete or absent, and are mapped into memory when they are read.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._count = 0
        self._num_chains = 0
        self._kept: list[Tensor] = []

    def __len__(self) -> int:
        return self._count

    def begin(self) -> None:
        """Check that the folder has no snapshots of another run.

        :raises ValueError: if it has.
        """
        there = self._there()
        if there:
            raise ValueError(
                f"the store {self.folder} holds {there} snapshots of another run. Cure: an empty "
                "folder; a continued run also needs its checkpoint"
            )

    def go_on(self, count: int) -> None:
        """Resume after ``count`` snapshots; a killed run may have written more, which are replaced.

        :raises ValueError: if there are fewer.
        """
        there = self._there()
        if there < count:
            raise ValueError(
                f"the store {self.folder} holds {there} snapshots, but the checkpoint expects "
                f"{count}. Cure: the folder that the run began with"
            )
        self._count = count
        if count:
            self._num_chains = len(self._snapshot(0))

    def _there(self) -> int:
        return 0 if self.folder is None else len(list(self.folder.glob("draws-*.pt")))

    def append(self, draws: Tensor) -> None:
        """Append a snapshot, ``(num_chains, d)``."""
        self._num_chains = len(draws)
        if self.folder is None:
            self._kept.append(draws.cpu())
        else:
            save_file(self._path(self._count), draws.cpu().contiguous())
        self._count += 1

    def take(self, rows: Tensor) -> Tensor:
        """Return draws ``(num_rows, d)``.

        :param rows: indices over snapshots and, within each, over chains, ``(num_rows,)``.
        """
        rows = rows.cpu()  # where the draws are
        snapshot, chain = rows // self._num_chains, rows % self._num_chains
        taken: Tensor | None = None
        for index in snapshot.unique().tolist():
            where = snapshot == index
            found = self._snapshot(index)[chain[where]]
            if taken is None:
                taken = found.new_empty(len(rows), found.shape[-1])
            taken[where] = found
        assert taken is not None
        return taken

    def _snapshot(self, index: int) -> Tensor:
        if self.folder is None:
            return self._kept[index]
        return load_file(self._path(index), map_location="cpu", mmap=True, weights_only=True)

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"draws-{index:06d}.pt"


@dataclass
class History:
    """Draws and tracked quantities of frozen chains, in memory that does not grow.

    :param capacity: number of batches of successive transitions. When all are full, neighbours are
        joined. Each batch keeps its last draw and the means of the tracked quantities.
    """

    capacity: int
    batch: int = 1
    seen: int = 0
    latents: list[Tensor] = field(default_factory=list)
    powers: list[Tensor] = field(default_factory=list)
    _sum: Tensor | None = None
    _group: Tensor | None = None
    _unit: tuple[Tensor, Tensor] | None = None
    _bounds: tuple[Tensor, Tensor] | None = None

    def append(self, latent: Tensor, tracked: Tracked, ranges: float = math.inf) -> None:
        """Append the draws ``(num_chains, d)`` and tracked quantities of a transition.

        :param ranges: interquartile ranges of the first transition, from its median, at which all
            quantities except the log-density are clamped: heavy tails may have no variance.
        """
        values = tracked.values.double()
        if self._unit is None or self._group is None or self._bounds is None:
            self._group = tracked.group
            self._unit = values.mean(0), pooled(values.var(0), tracked.group).sqrt()
            low, high = self._bounds = outlier_bounds(values, ranges)
            low[-1], high[-1] = -math.inf, math.inf
        standard = (values.clamp(*self._bounds) - self._unit[0]) / self._unit[1]
        powers = torch.stack([standard, standard**2, standard**4])
        self._sum = powers if self._sum is None else self._sum + powers
        self.seen += 1
        if self.seen % self.batch:
            return
        self.latents.append(latent)
        self.powers.append(self._sum / self.batch)
        self._sum = None
        if len(self.latents) == self.capacity:
            self.batch *= 2
            self.latents = self.latents[1::2]
            self.powers = [
                (a + b) / 2 for a, b in zip(self.powers[::2], self.powers[1::2], strict=True)
            ]

    def draws(self) -> Tensor:
        """Return draws of the last two thirds of the batches, ``(num_batches, num_chains, d)``."""
        return torch.stack(self.latents[self._first() :])

    def drift(self, policy: StoppingPolicy = DEFAULT.stopping) -> Drift:
        """Return the drift between the halves of these batches."""
        assert self._group is not None
        return drift(torch.stack(self.powers[self._first() :], 1), self._group, policy)

    def _first(self) -> int:
        return len(self.latents) // 3
