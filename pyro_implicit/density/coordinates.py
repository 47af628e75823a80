# SPDX-License-Identifier: Apache-2.0
"""The unconstrained coordinates of latent variables in one vector, and their bijections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.density.bijections import with_small_shares
from pyro_implicit.density.discrete import coordinates_of
from pyro_implicit.runtime.sites import joined_parts, site_parts

__all__ = ["Coordinates", "values_of"]


class Coordinates:
    """Bijections between the values of latent variables and vectors on R^d.

    :param latents: the sites, in the order of their coordinates.
    :param sampled: the discrete ones, whose coordinates are integers.
    :ivar shapes: by site, the shape of its coordinates.
    :ivar transforms: by site, the bijection from coordinates to values.
    :ivar start: the coordinates of the values in ``latents``, ``(d,)``.
    """

    def __init__(self, latents: Trace, sampled: Collection[str]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self.transforms: dict[str, Any] = {}
        parts = []
        for name, site in latents.nodes.items():
            if name in sampled:
                self.transforms[name] = coordinates_of(name, site)
            else:
                self.transforms[name] = with_small_shares(biject_to(site["fn"].support))
            part = self.transforms[name].inv(site["value"].detach())
            self.shapes[name] = part.shape
            parts.append(part.reshape(-1))
        self.start: Tensor = torch.cat(parts)

    def split(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the part of each site, ``(*batch, *unconstrained_shape)``."""
        return site_parts(latent, self.shapes)

    def constrain(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the values of all sites, ``(*batch, *site_shape)``."""
        return {name: self.transforms[name](part) for name, part in self.split(latent).items()}

    def unconstrain(self, draws: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of draws ``(num_draws, *site_shape)`` by site."""
        return joined_parts(self.transforms[name].inv(draws[name]) for name in self.shapes)

    def values(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the values of coordinates by site, and the log-determinants ``(*batch,)``."""
        return values_of(parts, self.shapes, self.transforms)


def values_of(
    parts: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], transforms: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return values by site, ``(*batch, *site_shape)``, and log-determinants, ``(*batch,)``.

    :param parts: coordinates by site, ``(*batch, *unconstrained_shape)``.
    :param shapes: by site, the shape of its coordinates.
    :param transforms: by site, the bijection from coordinates to values.
    """
    values: dict[str, Tensor] = {}
    log_det: Any = 0.0
    for name, part in parts.items():
        values[name] = transforms[name](part)
        term = transforms[name].log_abs_det_jacobian(part, values[name])
        num_batch = part.dim() - len(shapes[name])
        log_det = log_det + sum_rightmost(term, term.dim() - num_batch)
    return values, log_det
