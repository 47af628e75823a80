# SPDX-License-Identifier: Apache-2.0
"""Draws that were made elsewhere, as a guide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.distributions import IntractableDensityError

__all__ = ["StoredDraws"]


class _Stored(dist.Delta):
    """One of the draws. A Delta's density of 1 would weigh it wrongly."""

    def log_prob(self, x: Tensor) -> Tensor:
        """:raises IntractableDensityError: always."""
        raise IntractableDensityError(
            "stored draws have no density, so there are no weights and no ELBO of them. Cure: the "
            "guide that they came from, which is result.guide of what fit returned"
        )


class StoredDraws:
    """A guide that takes its values from stored draws: of chains, of another library, of particles.

    Each call takes one of them for all sites, so that ``Predictive`` and
    :func:`~pyro_implicit.diagnose` use it as any other guide. It has no density: what asks for one,
    such as an ELBO or Pyro's ``WeighedPredictive``, gets an
    :class:`~pyro_implicit.distributions.IntractableDensityError`.

    **Example:**

    >>> guide = StoredDraws({"x": torch.arange(4.0)})
    >>> guide.sample_posterior(4)["x"].sort().values
    tensor([0., 1., 2., 3.])
    >>> guide()["x"].shape
    torch.Size([])

    :param samples: constrained values by site, ``(num_draws, *site_shape)``.
    :param settled: whether they are known to be the posterior's as far as chains that settled, or
        importance weights that are reliable, can tell: such draws need no density to be trusted.
    :param modes_weighed: whether each of several separate modes has its due share of the draws.
    :param doubts: what is known to have gone wrong with the chains, each in a few words.
    :raises ValueError: for none, or sites of different numbers of draws.
    """

    def __init__(
        self,
        samples: Mapping[str, Tensor],
        settled: bool = False,
        modes_weighed: bool = False,
        doubts: Sequence[str] = (),
    ) -> None:
        lengths = {len(value) for value in samples.values()}
        if len(lengths) != 1 or lengths == {0}:
            found = {name: len(value) for name, value in samples.items()}
            raise ValueError(
                f"all sites must have the same number of draws, at least one, but got {found}. "
                "Cure: a dict of tensors (num_draws, *site_shape), as MCMC.get_samples() gives it"
            )
        self.samples, self.settled, self.modes_weighed = dict(samples), settled, modes_weighed
        self.doubts = tuple(doubts)
        self.num_draws = lengths.pop()

    def __repr__(self) -> str:
        return f"StoredDraws({self.num_draws} draws of {', '.join(self.samples)})"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """One draw; the model's arguments are not read."""
        index = int(torch.randint(self.num_draws, ()))
        values = {name: value[index] for name, value in self.samples.items()}
        return {
            name: pyro.sample(name, _Stored(value, event_dim=value.dim()))
            for name, value in values.items()
        }

    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Some of the draws, in random order, none of them twice before all came once.

        :param num_samples: so many.
        :returns: by site, ``(num_samples, *site_shape)``.
        """
        rounds = -(-num_samples // self.num_draws)
        index = torch.cat([torch.randperm(self.num_draws) for _ in range(rounds)])[:num_samples]
        return {name: value[index] for name, value in self.samples.items()}
