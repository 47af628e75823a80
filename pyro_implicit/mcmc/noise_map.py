# SPDX-License-Identifier: Apache-2.0
"""From the noise of latents to latents and back."""

from __future__ import annotations

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam

__all__ = ["NoiseMap"]


class NoiseMap:
    """A model's latents and their noise.

    :param density: of the model.
    :param reparams: by site.
    """

    def __init__(self, density: LatentDensity, reparams: dict[str, ConditionalReparam]) -> None:
        self.density, self.reparams = density, reparams
        model = poutine.reparam(density.model, reparams)
        self.noise = LatentDensity(model, *density.args, model_kwargs=density.kwargs)

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """Latents of noise, ``(num_points, latent_dim)``."""
        names = list(self.density.shapes)
        values = self.noise.read(points, lambda trace: [trace.nodes[n]["value"] for n in names])
        return self.density.unconstrain(dict(zip(names, values, strict=True)))

    @torch.no_grad()
    def to_points(self, latent: Tensor) -> Tensor:
        """Noise of latents, ``(num_points, latent_dim)``."""

        def read(trace: Trace) -> dict[str, Tensor]:
            values = {name: trace.nodes[name]["value"] for name in self.density.shapes}
            for name, reparam in self.reparams.items():
                site = trace.nodes[name]
                values[f"{name}_noise"] = reparam.to_noise(site["fn"], site["value"])
            return values

        return self.noise.unconstrain(self.density.read(latent, read))
