# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.mcmc.refine` returns of chains that saw minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pyro.infer.mcmc.util import diagnostics, print_summary
from torch import Tensor

from pyro_implicit.export.arviz import ArvizExport
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.step_choice import StepChoice
from pyro_implicit.ops.site_parts import site_parts
from pyro_implicit.runtime.printing import Printed, aligned

__all__ = ["MinibatchRefined", "SitesOf"]


@dataclass(frozen=True, eq=False)
class SitesOf:
    """From unconstrained vectors to values by site, for a file: it does not hold the model.

    :param shapes: of the sites' parts of a vector.
    :param transforms: from these parts to values.
    :param like: of whose dtype and device values are to be.
    """

    shapes: dict[str, torch.Size]
    transforms: dict[str, Any]
    like: Tensor

    def __call__(self, latent: Tensor) -> dict[str, Tensor]:
        parts = site_parts(latent.to(self.like), self.shapes)
        return {name: self.transforms[name](part) for name, part in parts.items()}


@dataclass(frozen=True, eq=False, repr=False)
class MinibatchRefined(Printed, ArvizExport):
    """Draws of chains that saw minibatches. ``print`` shows how they came about.

    :ivar stopped: ``"max_epochs"``, ``"max_seconds"``, or ``"interrupted"``, by Ctrl-C.
    :ivar choice: The step size, what bounded it, and what error is expected of it.
    :ivar temperature: Of the velocities after warm-up: 1, and more by the heat that noise in the
        gradients brings. None for ``kernel="sgld"``, which has no velocities.
    :ivar num_chains: How many chains there are.
    :ivar num_draws: Draws of each chain.
    :ivar num_gradients: Minibatch gradients that each chain took, warm-up and probes included.
    :ivar warmup_gradients: Those before the first draw was possible.
    :ivar epochs: Passes over the minibatches.
    :ivar seconds: Wall time.
    :ivar replaced: Chains put where others are, because their start had no finite log-density, or
        because they left the finite numbers. After the warm-up there should be none.
    """

    stopped: Literal["max_epochs", "max_seconds", "interrupted"]
    kernel: str
    choice: StepChoice
    temperature: float | None
    num_chains: int
    num_gradients: int
    warmup_gradients: int
    epochs: float
    seconds: float
    replaced: int
    frame: str
    store: DrawStore = field(repr=False)
    constrain: Callable[[Tensor], dict[str, Tensor]] = field(repr=False)

    @property
    def num_draws(self) -> int:
        return len(self.store)

    @torch.no_grad()
    def stream(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """All draws, some at a time, for predictions in memory that does not grow.

        :param batch_size: how many at a time; the last time there may be fewer.
        :returns: an iterator over dicts by site, ``(batch_size, *site_shape)``. All chains of one
            snapshot come before those of the next.
        """
        total = self.num_chains * self.num_draws
        for start in range(0, total, batch_size):
            yield self.take(torch.arange(start, min(start + batch_size, total)))

    @torch.no_grad()
    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Some draws.

        :param rows: their places among those of :meth:`stream`, ``(num_rows,)``.
        :returns: by site, ``(num_rows, *site_shape)``.
        """
        return self.constrain(self.store.take(rows))

    @torch.no_grad()
    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Tensor]:
        """Constrained draws by site, as Pyro's ``MCMC`` gives them, in memory; see :meth:`stream`.

        :param num_samples: so many, drawn with replacement; by default all.
        :param group_by_chain: whether the chains are a dimension of their own.
        :returns: ``(num_samples, *site_shape)`` or ``(num_chains, num_samples, *site_shape)``.
        """
        snapshots = torch.arange(self.num_draws)
        if num_samples is not None and group_by_chain:
            snapshots = torch.randint(self.num_draws, (num_samples,))
        shape = (self.num_chains, len(snapshots))
        index = torch.arange(self.num_chains).unsqueeze(-1) + self.num_chains * snapshots
        rows = index.flatten()
        if num_samples is not None and not group_by_chain:
            rows = rows[torch.randint(len(rows), (num_samples,))]
        latents = self.store.take(rows)
        return self.constrain(latents.unflatten(0, shape) if group_by_chain else latents)

    def diagnostics(self) -> dict[str, Any]:
        """Effective sample size and split R-hat by site, as Pyro's ``MCMC`` gives them."""
        return diagnostics(self.get_samples(group_by_chain=True))

    def summary(self, prob: float = 0.9) -> None:
        """Print means, standard deviations, intervals, effective sample sizes and R-hats.

        :param prob: mass of the intervals.
        """
        print_summary(self.get_samples(group_by_chain=True), prob=prob)

    def __str__(self) -> str:
        rows = {
            "stopped": self.stopped,
            "draws": f"{self.num_chains} chains x {self.num_draws}",
            "gradients of each chain": f"{self.num_gradients} ({self.warmup_gradients} to warm up)",
            "epochs, seconds": f"{self.epochs:.3g}, {self.seconds:.1f}",
            "kernel, frame": f"{self.kernel}, {self.frame}",
            **self.choice.rows(),
        }
        if self.temperature is not None:
            rows["temperature of velocities"] = f"{self.temperature:.3f}"
        if self.replaced:
            rows["chains replaced"] = str(self.replaced)
        return aligned(rows)
