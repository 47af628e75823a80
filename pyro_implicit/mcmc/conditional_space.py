# SPDX-License-Identifier: Apache-2.0
"""Chains over the noise that latents leave once their parents and the data are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.guides.sampler import Guide, Sampler
from pyro_implicit.mcmc.chain_density import ChainDensity
from pyro_implicit.mcmc.conditional_reparam import (
    ConditionalReparam,
    base_distribution,
    unused_suffix,
)
from pyro_implicit.mcmc.noise_map import NoiseMap
from pyro_implicit.mcmc.pseudo_data import own_hessian, score_of_rest, told
from pyro_implicit.mcmc.scaled_sites import are_round, scaled_reparams

__all__ = [
    "ConditionalDensity",
    "conditional_density",
    "conditional_reparams",
    "dependent_sites",
    "middle_of",
]

MIDDLE_DRAWS = 128
MOST_SITES = 12  # that are taken one after the other


def dependent_sites(density: Target, point: Tensor) -> list[str]:
    """Latents of location and scale whose priors change with other latents, in the model's order.

    :param point: near which they are seen to change, ``(latent_dim,)``. Where the model raises an
        error there, none are.
    """
    if density.is_enumerated:
        return []
    step = torch.linspace(0.1, 0.2, len(point)).to(point)
    try:
        one, other = (density.trace_at(at).nodes for at in (point, point + step))
    except IMPOSSIBLE:
        return []
    found = []
    for name in density.shapes:
        site = one[name]
        if ConditionalReparam.suits_site(site) and _differ(site["fn"], other[name]["fn"]):
            found.append(name)
    return found


def conditional_reparams(
    model: Callable[..., Any],
    guide: Guide,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, ConditionalReparam]:
    """How a model is written over the noise of its latents, for ``poutine.reparam``.

    Any guide of that model, a mean field for instance, is a structured one of the first: latents
    depend on their parents as the prior and the data have it, and are independent given these.
    NUTS has no funnel to walk through. :func:`~pyro_implicit.mcmc.refine` does all this by itself.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro import poutine
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(x, 0.5), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 0.5])
    >>> reparams = conditional_reparams(model, AutoNormal(model), y)
    >>> guide = AutoNormal(poutine.reparam(model, reparams))
    >>> sorted(guide(y))
    ['scale', 'x_noise']

    :param model: a Pyro model of continuous latents, with all its data.
    :param guide: of the model, trained or not, or draws by site: their median is where the data
        are asked what they say. A rough one will do.
    :param args: of the model, as ``kwargs``.
    :param model_kwargs: more of these, whatever their names.
    :returns: by site, of those whose priors depend on other latents, and of those that the model
        multiplies by others: these have to ``poutine.reparam`` the non-centred form that they were
        written in, and to :class:`~pyro_implicit.mcmc.AutoConditional` and chains what the data
        leave of it. Others stay as they are.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    density = Target(model, *args, model_kwargs=kwargs)
    return ConditionalDensity(density, middle_of(Sampler(density, guide))).reparams


def middle_of(sampler: Sampler) -> Tensor:
    """Return the median of a guide's draws, ``(latent_dim,)``."""
    return sampler.draw(MIDDLE_DRAWS).median(0).values


class ConditionalDensity(ChainDensity):
    """A model's log-density over the noise of its latents, for chains.

    Latents whose priors depend on others are written by
    :class:`~pyro_implicit.mcmc.ConditionalReparam`. W and h are the second and the first derivative
    of the log-density without the latent's own prior, at a point of the posterior; latents are
    taken from the last to the first, so that what later ones say of an earlier one is what is left
    of them as noise.

    Then those whose prior is noise already, but which the model multiplies by functions of others:
    :class:`~pyro_implicit.mcmc.scaled_reparam.ScaledReparam`.

    :param density: of the model.
    :param middle: of the posterior, ``(latent_dim,)``.
    :param num_calls: as of a :class:`ChainDensity`.
    """

    space = "conditional"

    def __init__(self, density: Target, middle: Tensor, num_calls: float = math.inf) -> None:
        super().__init__(density, num_calls)
        self.middle = middle
        sites = dependent_sites(density, middle)
        groups = [[site] for site in reversed(sites)]
        if len(groups) > MOST_SITES:
            groups = [sites]
        self._map = NoiseMap(density)
        for group in groups:
            found = self._say(middle, group)
            self._map = NoiseMap(density, {**self._map.reparams, **found})
        known = [one.noise_name(name) for name, one in self._map.reparams.items()]
        point = self.to_points(middle.unsqueeze(0))[0]
        if scaled := scaled_reparams(self._map.noise, point, known):
            with_scaled = NoiseMap(density, {**self._map.reparams, **scaled})
            if are_round(with_scaled, middle, scaled):
                self._map = with_scaled
        self.reparams = self._map.reparams

    def _score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self._map.score(points)

    def to_latent(self, points: Tensor) -> Tensor:
        """Latents of noise, ``(num_chains, latent_dim)``."""
        return self._map.to_latent(points)

    def to_points(self, latent: Tensor) -> Tensor:
        """Noise of latents, ``(num_chains, latent_dim)``."""
        return self._map.to_points(latent)

    def _say(self, latent: Tensor, sites: list[str]) -> dict[str, ConditionalReparam]:
        """What the rest of the model says of some sites."""
        noise, point = self._map.noise, self.to_points(latent.unsqueeze(0)).detach()

        nodes, made = self.density.trace_at(latent).nodes, {}
        suffix = unused_suffix(self.density.shapes, nodes)
        places = noise.split(torch.arange(point.shape[-1], device=point.device))
        with torch.enable_grad():
            point.requires_grad_()
            score = score_of_rest(noise, point, sites)
            for name in sites:
                fn, place = nodes[name]["fn"], places[name]
                is_vector = ConditionalReparam.is_vector(fn)
                size = place.shape[-1] if is_vector else 1
                columns = place.reshape(-1, size)
                curvature = -own_hessian(noise, point, score, columns)
                gradient, value = score[0, columns].detach(), point[0, columns].detach()
                said = told(fn, *(one.double() for one in (curvature, gradient, value)))
                precision, information = (one.to(value) for one in said)
                shape = (*place.shape, size) if is_vector else place.shape
                made[name] = ConditionalReparam(
                    precision.reshape(shape), information.reshape(place.shape), suffix
                )
        return made


def conditional_density(density: Target, middle: Tensor) -> ConditionalDensity | None:
    """That of a point, or None where it is the density of the latents, or cannot be made."""
    try:
        walked = ConditionalDensity(density, middle)
    except RuntimeError:  # no second derivatives
        return None
    return walked if walked.reparams else None


def _differ(one: Any, other: Any) -> bool:
    """Whether two distributions of a site are not the same."""
    one, other = base_distribution(one), base_distribution(other)
    names = ("loc", "scale_tril") if ConditionalReparam.is_vector(one) else ("loc", "scale")
    return any(not torch.equal(getattr(one, name), getattr(other, name)) for name in names)
