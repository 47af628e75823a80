# SPDX-License-Identifier: Apache-2.0
"""Semi-implicit sites with flat values and a function of the noise alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.generators import Linearisation, as_generator
from pyro_implicit.infer.engine.sites import ImplicitSite

__all__ = [
    "FlatSite",
    "check_generator",
    "check_standard_normal",
    "flatten_site",
    "mixing_noise",
    "split_elements",
]


class FlatSite(NamedTuple):
    """A semi-implicit site with vectors for values.

    ``value`` and ``scale`` are ``(*batch_shape, m)``, ``noise`` is ``(*batch_shape, d)``;
    ``generate`` turns noise ``(num_noises, *batch_shape, d)`` into ``(num_noises, *batch_shape,
    m)``, and ``linearise`` linearises the generator at noise ``(*batch_shape, d)``. If ``shared``,
    the generator is the same for all particles, and noise for ``generate`` may have size 1 in their
    place.
    """

    value: Tensor
    scale: Tensor
    noise: Tensor
    generate: Callable[[Tensor], Tensor]
    shared: bool
    linearise: Callable[[Tensor], Linearisation]


def flatten_site(site: ImplicitSite, num_particles: int) -> FlatSite:
    """The parts of a site that its densities need.

    :param num_particles: those of the site; more than one are its first dimension.
    """
    q: Any = site.distribution
    context = q.context
    shared = num_particles > 1 and (context is None or context.stride(0) == 0)
    if shared and context is not None:
        context = context[:1]
    generate, _ = _maps(q.generator, context)
    shape = site.noise.shape[:-1] + (-1,)
    scale = q.scale.expand(site.value.shape).reshape(shape)
    return FlatSite(site.value.reshape(shape), scale, site.noise, generate, shared, q.linearise)


def split_elements(site: ImplicitSite, flat: FlatSite, size: int) -> Iterator[FlatSite]:
    """The elements of a site's batch, which are independent given their contexts.

    :param size: elements at a time, at most.
    :returns: sites of batch shape ``(size,)``.
    """
    q: Any = site.distribution
    batch_shape = flat.noise.shape[:-1]
    for some in torch.arange(batch_shape.numel(), device=flat.noise.device).split(size):
        index = torch.unravel_index(some, batch_shape)
        context = None if q.context is None else q.context[index]
        value, scale, noise = (part[index] for part in (flat.value, flat.scale, flat.noise))
        generate, linearise = _maps(q.generator, context)
        yield FlatSite(value, scale, noise, generate, False, linearise)


def _maps(generator: Any, context: Tensor | None) -> tuple[Callable, Callable]:
    """The generator with flat values, and its linearisation, in a context."""

    def inputs(noise: Tensor) -> tuple[Tensor, ...]:
        return (noise,) if context is None else (noise, context.expand(noise.shape[:-1] + (-1,)))

    def generate(noise: Tensor) -> Tensor:
        return generator(*inputs(noise)).reshape(noise.shape[:-1] + (-1,))

    def linearise(noise: Tensor) -> Linearisation:
        return as_generator(generator).linearise(*inputs(noise))

    return generate, linearise


def mixing_noise(site: ImplicitSite, flat: FlatSite, num_mixing: int) -> Tensor:
    """Fresh noise for :func:`~pyro_implicit.ops.semi_implicit.mixture_log_density`.

    :returns: ``(num_mixing, *batch_shape, d)``, with size 1 for the particles if they share it.
    """
    distribution = site.distribution.noise_distribution
    if not flat.shared:
        return distribution.rsample(torch.Size((num_mixing,)))
    num_rounds = -(-num_mixing // len(flat.noise))
    noise = distribution.rsample(torch.Size((num_rounds,)))
    return noise.flatten(0, 1)[:num_mixing].unsqueeze(1)


@torch.no_grad()
def check_generator(name: str, flat: FlatSite) -> None:
    """Refuse a generator whose values are no functions of their own noise alone.

    :param name: of the site.
    :raises ValueError: naming site and cure.
    """
    noise = flat.noise
    others = (-noise).contiguous()
    others.view(-1, noise.shape[-1])[0] = noise.reshape(-1, noise.shape[-1])[0]
    values, again, among_others = (flat.generate(z) for z in (noise, noise, others))
    size = flat.value.shape[-1]
    first, first_among_others = (v.reshape(-1, size)[0] for v in (values, among_others))
    tolerance = 1e-3 * (1 + values.abs().max())
    if (values - again).abs().max() > tolerance:
        cause = "draws randomness of its own (dropout?)"
    elif (first - first_among_others).abs().max() > tolerance:
        cause = "mixes the rows of a batch (batch normalisation in training mode?)"
    else:
        return
    raise ValueError(
        f"the generator of site '{name}' {cause}, but the density needs each value to be a "
        "function of its own noise alone. Cure: call generator.eval(), or take the layer out"
    )


def check_standard_normal(name: str, noise_distribution: Any, method: str) -> None:
    """Refuse noise that is not standard normal.

    :param name: of the site.
    :param method: that wants it, for the message.
    :raises ValueError: naming site and cure.
    """
    base = getattr(noise_distribution, "base_dist", None)
    if not isinstance(base, dist.Normal) or (base.loc != 0).any() or (base.scale != 1).any():
        raise ValueError(
            f"{method} wants standard normal noise, but the noise of site '{name}' is "
            f"{noise_distribution}. Cure: give the noise's size, "
            f"noise={noise_distribution.event_shape[-1]}, and let the generator scale it"
        )
