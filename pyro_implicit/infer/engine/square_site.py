# SPDX-License-Identifier: Apache-2.0
"""Implicit sites whose generator turns noise into as many values: the density is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.generators import Linearisation
from pyro_implicit.infer.engine.flat_site import (
    FlatSite,
    check_generator,
    check_standard_normal,
)
from pyro_implicit.infer.engine.sites import ImplicitSite

__all__ = ["check_square", "exact_log_density", "exact_score", "site_linearisation"]


def site_linearisation(site: ImplicitSite) -> Linearisation:
    """The generator around the noise of a site's draw: that of the draw, where it has one."""
    return site.linearisation or site.distribution.linearise(site.noise)


def exact_log_density(site: ImplicitSite) -> Tensor:
    r""":math:`\log q(f(z)) = \log N(z) - \log |\det J_f(z)|`, differentiable in z and f.

    :returns: ``(num_particles, *plates)``.
    """
    log_det = site_linearisation(site).log_abs_det()
    return site.distribution.noise_distribution.log_prob(site.noise) - log_det


def exact_score(site: ImplicitSite) -> tuple[Tensor, Tensor]:
    r""":math:`\log q(f(z))`, as :func:`exact_log_density`, and its score at the site's draw.

    :param site: drawn with ``linearise=True, noise_gradient=True``.
    """
    log_q = exact_log_density(site)
    (slope,) = torch.autograd.grad(log_q.sum(), site.noise, retain_graph=True)
    score = site_linearisation(site).solve_transposed(slope).reshape(site.value.shape)
    return log_q, site.score_at_draw(score)


def check_square(site: ImplicitSite, method: str) -> None:
    """Refuse a site without an exact density.

    :param method: that wants it, for the message.
    :raises ValueError: naming site and cure.
    """
    q = site.distribution
    noise_dim, size = site.noise.shape[-1], q.event_shape.numel()
    if isinstance(q, SemiImplicit):
        raise ValueError(
            f"{method} cannot train site '{site.name}', whose distribution is SemiImplicit: the "
            "noise around the generator hides its exact density. Cure: use an ELBO for "
            "semi-implicit guides (LIVI_ELBO), or AutoImplicit or Implicit for the site"
        )
    if noise_dim != size:
        raise ValueError(
            f"{method} wants as many noise dimensions as values, but the generator of site "
            f"'{site.name}' turns {noise_dim} into {size}. Cure: "
            "AutoImplicit(model, AutoregressiveGenerator), of many latents "
            "AutoImplicit(model, lambda dim: ResidualGenerator(dim, core_dim=50)), or another "
            f"invertible generator with noise_dim={size}"
        )
    check_standard_normal(site.name, q.noise_distribution, method)
    value = site.value.reshape(site.noise.shape)

    def generate(noise: Tensor) -> Tensor:
        return q.generate(noise).reshape(noise.shape)

    flat = FlatSite(
        value, torch.zeros_like(value), site.noise, generate, False, site.distribution.linearise
    )
    check_generator(site.name, flat)
