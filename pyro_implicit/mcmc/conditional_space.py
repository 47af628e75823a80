# SPDX-License-Identifier: Apache-2.0
"""Chains over the noise that latents leave once their parents and the data are known."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.engine import compute_log_prob
from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.mcmc.chain_density import ChainDensity
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam

__all__ = ["ConditionalDensity", "dependent_sites"]

MOST_SITES = 12  # that are taken one after the other


def dependent_sites(density: LatentDensity, points: Tensor) -> list[str]:
    """Latents of location and scale whose priors change with other latents, in the model's order.

    :param points: two that differ, or more, ``(num_points, latent_dim)``.
    """
    if density.is_enumerated:
        return []
    one, other = (density.trace_at(point).nodes for point in points[:2])
    found = []
    for name in density.shapes:
        site = one[name]
        plain = site["mask"] is None and site["scale"] == 1.0
        if plain and ConditionalReparam.suits(site["fn"]) and _differ(site["fn"], other[name]["fn"]):
            found.append(name)
    return found


class ConditionalDensity(ChainDensity):
    r"""A model's log-density over noise in place of the latents whose priors depend on others,

    which :class:`~pyro_implicit.mcmc.ConditionalReparam` writes so. W and h are the second and
    first derivative of the log-density without the latent's own prior, at a point of the posterior;
    latents are taken from the last to the first, so that what later ones say of an earlier one is
    what is left of them as noise.

    :param density: of the model.
    :param middle: of the posterior, ``(latent_dim,)``.
    :param sites: of :func:`dependent_sites`.
    :param num_calls: as of a :class:`ChainDensity`.
    """

    space = "conditional"

    def __init__(
        self, density: LatentDensity, middle: Tensor, sites: list[str], num_calls: float = math.inf
    ) -> None:
        super().__init__(density, num_calls)
        self.middle = middle
        self.reparams: dict[str, ConditionalReparam] = {}
        self.noise = density
        groups = [[site] for site in reversed(sites)]
        if len(groups) > MOST_SITES:
            groups = [sites]
        for group in groups:
            found = self._say(middle, group)
            self.reparams |= found
            model = poutine.reparam(density.model, self.reparams)
            self.noise = LatentDensity(model, *density.args, model_kwargs=density.kwargs)

    def _score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self.noise.score(points)

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """Latents of noise, ``(num_chains, latent_dim)``."""
        names = list(self.density.shapes)
        values = self.noise.read(points, lambda trace: [trace.nodes[n]["value"] for n in names])
        return self.density.unconstrain(dict(zip(names, values, strict=True)))

    @torch.no_grad()
    def to_points(self, latent: Tensor) -> Tensor:
        """Noise of latents, ``(num_chains, latent_dim)``."""

        def read(trace: Trace) -> dict[str, Tensor]:
            values = {name: trace.nodes[name]["value"] for name in self.density.shapes}
            for name, reparam in self.reparams.items():
                site = trace.nodes[name]
                values[f"{name}_noise"] = reparam.to_noise(site["fn"], site["value"])
            return values

        return self.noise.unconstrain(self.density.read(latent, read))

    def _say(self, latent: Tensor, sites: list[str]) -> dict[str, ConditionalReparam]:
        """What the rest of the model says of some sites."""
        point = self.to_points(latent.unsqueeze(0)).detach()

        def rest(trace: Trace) -> Tensor:
            compute_log_prob(trace)
            total = torch.as_tensor(trace.log_prob_sum())
            return total - sum(trace.nodes[name]["log_prob_sum"] for name in sites)

        with torch.enable_grad():
            point.requires_grad_()
            log_prob = self.noise.read(point, rest)
            (score,) = torch.autograd.grad(log_prob.sum(), point, create_graph=True)
            parts = self.noise.split(torch.arange(point.shape[-1]))
            rows = torch.cat([parts[name].flatten() for name in sites])
            hessian = self.noise.rows_of_hessian(point, score, rows)
        curvature = -torch.stack([row[0] for row in hessian])
        nodes, made, first = self.density.trace_at(latent).nodes, {}, 0
        for name in sites:
            columns = parts[name]
            own = curvature[first : first + columns.numel(), columns.flatten()]
            first += columns.numel()
            fn = nodes[name]["fn"]
            made[name] = _reparam(fn, own, score[0, columns].detach(), point[0, columns].detach())
        return made


def _reparam(fn: Any, curvature: Tensor, gradient: Tensor, value: Tensor) -> ConditionalReparam:
    """What a second-order expansion says, of the directions in which it bends down."""
    if not ConditionalReparam.is_vector(fn):
        precision = curvature.diagonal().reshape(value.shape)
        told = precision > 0
        precision = torch.where(told, precision, 0.0)
        return ConditionalReparam(precision, torch.where(told, gradient, 0.0) + precision * value)
    size = value.shape[-1]
    count = value.numel() // size
    blocks = curvature.reshape(count, size, count, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    precision = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    told = (vectors * (values > 0).unsqueeze(-2)) @ vectors.mT
    precision, told = (part.reshape(*value.shape, size) for part in (precision, told))
    column = told @ gradient.unsqueeze(-1) + precision @ value.unsqueeze(-1)
    return ConditionalReparam(precision, column.squeeze(-1))


def _differ(one: Any, other: Any) -> bool:
    """Whether two distributions of a site are not the same."""
    while isinstance(one, torch.distributions.Independent):
        one, other = one.base_dist, other.base_dist
    names = ("loc", "scale_tril") if ConditionalReparam.is_vector(one) else ("loc", "scale")
    return any(not torch.equal(getattr(one, name), getattr(other, name)) for name in names)
