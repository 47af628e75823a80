# SPDX-License-Identifier: Apache-2.0
"""Draws of whatever stands for a posterior, a few at a time, as often as they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.runtime.random_stream import seeded

__all__ = ["PosteriorDraws"]

MADE_AT_ONCE = 8
MOST_KEPT = 2**24  # numbers

Draws = dict[str, Tensor]


class PosteriorDraws:
    """The same draws in each pass, of which only a few are in memory at a time.

    Those of a guide are made anew in each pass, from one seed, or kept if all of them are small;
    stored ones are taken evenly spaced.

    **Example:**

    >>> members = {"weight": torch.arange(5.0).reshape(5, 1)}
    >>> draws = PosteriorDraws(members, 4, ())
    >>> [part["weight"].flatten().tolist() for part in draws.chunks(3)]
    [[0.0, 1.0, 3.0], [4.0]]

    :param posterior: a guide, draws by site ``(num_draws, *site_shape)``, or what has
        ``get_samples``: an ``MCMC`` and what :func:`~pyro_implicit.refine` returns.
    :param num_samples: how many; fewer where fewer are stored.
    :param args: of the guide, for one that reads them.
    :raises TypeError: for anything else.
    :raises ValueError: for an autoguide that was never called.
    """

    def __init__(self, posterior: Any, num_samples: int, args: tuple) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, but got {num_samples}")
        if isinstance(posterior, StoredDraws):
            posterior = posterior.samples
        is_streamed = hasattr(posterior, "stream")  # from files, perhaps
        if hasattr(posterior, "get_samples") and not is_streamed:
            posterior = posterior.get_samples()
        self._take: Callable[[Tensor], Draws] | None = None
        stored = num_samples
        if is_streamed:
            stored = posterior.num_chains * posterior.num_draws
            self._take = posterior.take
        elif isinstance(posterior, Mapping):
            stored = len(StoredDraws(posterior).samples[next(iter(posterior))])
            self._take = lambda rows: {name: value[rows] for name, value in posterior.items()}
        elif not callable(posterior):
            raise TypeError(
                "a posterior must be a guide, a dict of draws by site, or what fit, refine or MCMC "
                f"made, but got {type(posterior).__name__}"
            )
        if isinstance(posterior, AutoGuide) and posterior.prototype_trace is None:
            raise ValueError(
                f"the guide {type(posterior).__name__} was never called, and would take the "
                "targets for latents. Cure: train it first; if all of its parts are trained, call "
                "it once, guide(x, y)"
            )
        self.num_samples = min(num_samples, stored)
        self._rows = torch.linspace(0, stored - 1, self.num_samples).round().long()
        self._guide, self._args = posterior, args
        self._seed = int(torch.randint(2**31, ()))
        first = next(self._made())
        #: One draw, by site.
        self.example = {name: value[0] for name, value in first.items()}
        self._kept: Draws | None = None
        if self._take is None and self.num_samples * self.draw_size <= MOST_KEPT:
            parts = list(self._made())
            self._kept = {name: torch.cat([part[name] for part in parts]) for name in first}

    @property
    def draw_size(self) -> int:
        """Numbers in one draw."""
        return sum(value.numel() for value in self.example.values())

    @torch.no_grad()
    def chunks(self, size: int) -> Iterator[Draws]:
        """One pass.

        :param size: draws at a time, at most.
        :returns: draws by site, ``(size, *site_shape)``.
        """
        if self._take is not None:
            yield from map(self._take, self._rows.split(size))
        else:
            for made in [self._kept] if self._kept is not None else self._made():
                parts = {name: value.split(size) for name, value in made.items()}
                for index in range(len(next(iter(parts.values())))):
                    yield {name: part[index] for name, part in parts.items()}

    def _made(self) -> Iterator[Draws]:
        """A few at a time, the same in each pass."""
        for index, rows in enumerate(self._rows.split(MADE_AT_ONCE)):
            if self._take is not None:
                yield self._take(rows)
                continue
            with seeded(self._seed + index):
                found = draw(self._guide, len(rows), *self._args)
            yield found
