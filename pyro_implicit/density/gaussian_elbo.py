# SPDX-License-Identifier: Apache-2.0
"""ELBOs of Gaussians in a model's unconstrained space, and where its density is no number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_implicit.density.inexact import InexactArithmetic
from pyro_implicit.density.target import Target

__all__ = [
    "antithetic_noise",
    "finite_log_prob",
    "gaussian_elbo",
    "highest_draws",
    "is_rounding",
    "rounding_error",
]

ROUNDINGS = 4
INEXACT = 10.0  # times what the point's own last bits may do


def antithetic_noise(loc: Tensor, num_draws: int) -> Tensor:
    """Standard normal draws and their opposites, of the shape of ``loc`` each."""
    noise = torch.randn((num_draws // 2,) + loc.shape, dtype=loc.dtype, device=loc.device)
    return torch.cat([noise, -noise])


def gaussian_elbo(log_prob: Tensor, noise: Tensor, factor: Tensor) -> Tensor:
    """The ELBO of Gaussians, each cut off where the model has no density.

    :param log_prob: the model's at their draws, ``(num_draws, num_gaussians)``.
    :param noise: that the draws were made of, ``(num_draws, num_gaussians, latent_dim)``.
    :param factor: any F with covariance F F^T, ``(num_gaussians, latent_dim, latent_dim)``.
    :returns: ``(num_gaussians,)``.
    """
    dim = factor.shape[-1]
    inside = log_prob > -math.inf
    num_inside = inside.sum(0)
    entropy = torch.linalg.slogdet(factor).logabsdet + 0.5 * dim * math.log(2 * math.pi)
    # Half of E[noise^2]: that of the draws themselves where some are left out.
    half_square = 0.5 * noise.square().sum(-1)
    half_square = torch.where(num_inside == len(noise), 0.5 * dim, half_square)
    mean = (log_prob + half_square).masked_fill(~inside, 0.0).sum(0) / num_inside
    elbo = mean + entropy + (num_inside / len(noise)).log()
    return elbo.nan_to_num(-math.inf, -math.inf, -math.inf)


def finite_log_prob(density: Target, points: Tensor) -> Tensor:
    """Of points ``(*batch, latent_dim)``; -inf where there is no number."""
    flat = density.log_prob(points.reshape(-1, points.shape[-1])).reshape(points.shape[:-1])
    return flat.nan_to_num(-math.inf, -math.inf, -math.inf)


def highest_draws(draws: Tensor, values: Tensor) -> Tensor:
    """Of draws ``(num_draws, num_gaussians, latent_dim)`` that of the highest log-density."""
    return draws[values.argmax(0), torch.arange(draws.shape[1])]


def is_rounding(density: Target, points: Tensor) -> Tensor:
    """Where the log-density is that of rounding errors, which may be any number: it changes by more
    than a thousandth when the last bits of the point do, or by far more when those of all that is
    computed on the way do.

    :param points: ``(num_points, latent_dim)``.
    :returns: ``(num_points,)``.
    """
    if len(points) == 0:
        return torch.zeros(0, dtype=torch.bool, device=points.device)
    values = _in_last_bits(density, points)
    spread = values.max(0).values - values.min(0).values
    found = ~(spread <= 1.0 + 1e-3 * values.abs().min(0).values)
    with InexactArithmetic():
        values = density.log_prob(points.repeat(ROUNDINGS, 1)).unflatten(0, (ROUNDINGS, -1))
    # Elsewhere a matrix may have lost its factor by this alone.
    spread = (values.amax(0) - values.amin(0)).nan_to_num(0.0, 0.0, 0.0)
    return found | (spread > INEXACT * (1.0 + 1e-3 * values.abs().amin(0).nan_to_num(0.0)))


def rounding_error(density: Target, points: Tensor) -> Tensor:
    """By how many nats the log-density changes where the last bits of a point do.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> bool((rounding_error(Target(model), torch.randn(5, 1)) < 1e-4).all())
    True

    :param points: ``(num_points, latent_dim)``.
    :returns: ``(num_points,)``.
    """
    values = _in_last_bits(density, points)
    return values.amax(0) - values.amin(0)


def _in_last_bits(density: Target, points: Tensor) -> Tensor:
    """Log-densities at a point and its neighbours, ``(2 * ROUNDINGS, num_points)``."""
    last_bits = ROUNDINGS * torch.finfo(points.dtype).eps
    shift = torch.linspace(-1.0, 1.0, 2 * ROUNDINGS).to(points)[:, None, None]
    signs = torch.ones_like(points[0])
    signs[::2] = -1.0
    return finite_log_prob(density, points * (1 + last_bits * shift * signs))
