# SPDX-License-Identifier: Apache-2.0
"""What chains leave while they walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_implicit.mcmc.stopping import Drift, Tracked, drift, pooled

__all__ = ["History"]

MAX_CROSSED = 0.01


@dataclass
class History:
    """What frozen chains leave, in memory that does not grow.

    :param capacity: batches of successive transitions. When so many are full, neighbours are
        joined. Of each batch the last draw is kept, and the means of the tracked quantities.
    """

    capacity: int
    batch: int = 1
    seen: int = 0
    latents: list[Tensor] = field(default_factory=list)
    powers: list[Tensor] = field(default_factory=list)
    _sum: Tensor | None = None
    _group: Tensor | None = None
    _unit: tuple[Tensor, Tensor] | None = None

    def append(self, latent: Tensor, tracked: Tracked) -> None:
        """Draws ``(num_chains, d)`` and tracked quantities of a transition."""
        values = tracked.values.double()
        if self._unit is None or self._group is None:
            self._group = tracked.group
            self._unit = values.mean(0), pooled(values.var(0), tracked.group).sqrt()
        standard = (values - self._unit[0]) / self._unit[1]
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
        """Those of the last two thirds of the batches, ``(num_batches, num_chains, d)``."""
        return torch.stack(self.latents[self._first() :])

    def drift(self, label: Tensor | None = None) -> Drift:
        """Between the halves of the same, within the modes that ``label`` tells."""
        assert self._group is not None
        return drift(torch.stack(self.powers[self._first() :], 1), self._group, label)

    def label(self, labels: Callable[[Tensor], Tensor] | None) -> Tensor | None:
        """The mode of each chain in the same, ``(num_chains,)``, or None if there are no modes, or
        if more than a hundredth of the chains is in another at the end than at the beginning.

        :param labels: of latents ``(num_chains, d)``.
        """
        if labels is None:
            return None
        first, last = labels(self.latents[self._first()]), labels(self.latents[-1])
        return None if (first != last).double().mean() > MAX_CROSSED else first

    def _first(self) -> int:
        return len(self.latents) // 3
