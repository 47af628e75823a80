# SPDX-License-Identifier: Apache-2.0
"""Further draws of an implicit site, for estimates that need more of them than the model sees."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.infer.engine.sites import ImplicitSite
from pyro_implicit.ops import Covariance, gaussian_entropy

__all__ = [
    "choose_covariance",
    "differs_by_particle",
    "moments_log_q",
    "pool_particles",
    "site_draws",
]


def site_draws(
    site: ImplicitSite, num_particles: int, num_draws: int, fresh: bool = False
) -> Tensor:
    """At least ``num_draws`` values of a site's implicit distribution, its own first.

    Where all particles have the same distribution, those of all of them count; where its context
    or scale was made from other latents, each particle gets ``num_draws`` of its own.

    :param num_particles: that the site has.
    :param fresh: whether new draws replace the site's own.
    :returns: ``(n, *batch_shape, *event_shape)``; see :func:`pool_particles`.
    """
    q = site.distribution
    num_rounds = num_draws
    if num_particles > 1 and not differs_by_particle(q):
        num_rounds = -(-num_draws // num_particles)
    if fresh:
        return q.rsample(torch.Size((num_rounds,)))
    draws = site.value.unsqueeze(0)
    if num_rounds > 1:
        more = q.rsample(torch.Size((num_rounds - 1,)))
        draws = torch.cat([draws, more])
    return draws


def pool_particles(draws: Tensor, site: ImplicitSite, num_particles: int) -> Tensor:
    """Lay draws ``(n, *batch, m)`` out as sets of samples.

    :returns: ``(*plates, num_particles * n, m)``, or ``(num_particles, *plates, n, m)`` where each
        particle has its own distribution.
    """
    if num_particles > 1 and not differs_by_particle(site.distribution):
        draws = draws.flatten(0, 1)
    return draws.movedim(0, -2)


def choose_covariance(
    covariance: Literal["auto"] | Covariance, site: ImplicitSite, num_draws: int, dim: int
) -> Covariance:
    """The covariance in which an estimate sees a site's draws.

    :param covariance: as asked for; ``"auto"`` is full where twice as many draws as dimensions fill
        all of them, else diagonal.
    :param num_draws: of the site, of ``dim`` dimensions.
    :raises ValueError: for a full one of no more draws than dimensions.
    """
    if covariance == "full" and num_draws <= dim:
        raise ValueError(
            f"site '{site.name}' has {dim} dimensions, but covariance=\"full\" got {num_draws} "
            f'draws. Cure: num_entropy_particles of at least {dim + 1}, or "diagonal"'
        )
    if covariance != "auto":
        return covariance
    full_rank = isinstance(site.distribution, SemiImplicit) or site.noise.shape[-1] >= dim
    return "full" if full_rank and num_draws >= 2 * dim else "diagonal"


def differs_by_particle(q: Implicit) -> bool:
    """Whether what the site is conditioned on was made from other latents' particles."""
    conditions = []
    if q.context is not None:
        conditions.append(q.context)
    if isinstance(q, SemiImplicit):
        conditions.append(q.scale.expand(q.batch_shape + q.event_shape))
    return any(condition.stride(0) != 0 for condition in conditions)


def moments_log_q(site: ImplicitSite) -> Tensor:
    """Minus the entropy of the Gaussian with the moments of the site's values, for each of them."""
    q = site.distribution
    points = site.value.detach().reshape(q.batch_shape + (-1,)).movedim(0, -2)
    covariance = choose_covariance("auto", site, *points.shape[-2:])
    try:
        return -gaussian_entropy(points, covariance).expand(q.batch_shape)
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"the draws of site '{site.name}' lie on a hyperplane: the guide has collapsed, or "
            "some of its draws are far from all others. Cure: a smaller learning rate, so that a "
            "critic keeps up with the guide, or another ELBO"
        ) from error
