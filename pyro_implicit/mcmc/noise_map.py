# SPDX-License-Identifier: Apache-2.0
"""From the noise of latents to latents and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.scaled_reparam import ScaledReparam

__all__ = ["NoiseMap"]

_NONE: Mapping[str, ConditionalReparam] = MappingProxyType({})


class NoiseMap:
    """A model's latents, and what parents and data leave open of them.

    :param density: of the model.
    :param reparams: by site.
    """

    def __init__(self, density: Target, reparams: Mapping[str, ConditionalReparam] = _NONE) -> None:
        self.density, self.reparams = density, dict(reparams)
        self.noise = density
        """Of the reparameterised model."""
        if reparams:
            model = poutine.reparam(density.model, self.reparams)
            self.noise = Target(model, *density.args, model_kwargs=density.kwargs)
        scaled = (one for one in self.reparams.values() if isinstance(one, ScaledReparam))
        self._blocks = {id(one.block): one.block for one in scaled}.values()

    def log_prob(self, points: Tensor) -> Tensor:
        """The log-density of points, ``(num_points,)``, differentiable; -inf where it has none."""
        noise, log_dets = self.to_noise(points)
        log_prob = self.noise.log_prob(noise)
        for log_det in log_dets.values():
            log_prob = log_prob + log_det.reshape(len(log_det), -1).sum(-1)
        return log_prob.masked_fill(log_prob.isnan(), -math.inf)

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The log-density and its gradient, constants; 0 where there is none."""
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            log_prob = self.log_prob(points)
            (score,) = torch.autograd.grad(log_prob.sum(), points)
        log_prob = log_prob.detach()
        return log_prob, score.masked_fill(~log_prob.isfinite().unsqueeze(-1), 0.0)

    def to_noise(self, points: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The reparameterised model's latents, ``(num_points, latent_dim)``.

        :returns: and the log-determinant of each element of those that are scaled, by site.
        """
        if not self._blocks:
            return points, {}
        parts = self.noise.split(points)
        log_dets: dict[str, Tensor] = {}
        for block in self._blocks:
            noise, more = block.to_noise(parts)
            parts, log_dets = parts | noise, log_dets | more
        return _joined(parts), log_dets

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """Latents of points, ``(num_points, latent_dim)``."""
        noise, _ = self.to_noise(points)
        moved = self.noise.read(
            noise, lambda trace: {name: trace.nodes[name]["value"] for name in self.reparams}
        )
        values = self.noise.constrain(noise) | moved
        return self.density.unconstrain({name: values[name] for name in self.density.shapes})

    @torch.no_grad()
    def to_points(self, latent: Tensor) -> Tensor:
        """Points of latents, ``(num_points, latent_dim)``."""

        def read(trace: Trace) -> dict[str, Tensor]:
            sites = {name: trace.nodes[name] for name in self.reparams}
            return {
                reparam.noise_name(name): reparam.to_noise(sites[name]["fn"], sites[name]["value"])
                for name, reparam in self.reparams.items()
            }

        values = self.density.constrain(latent) | self.density.read(latent, read)
        parts = self.noise.split(self.noise.unconstrain(values))
        for block in self._blocks:
            parts |= block.to_points(parts)
        return _joined(parts)


def _joined(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.reshape(len(part), -1) for part in parts.values()], -1)
