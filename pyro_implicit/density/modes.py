# SPDX-License-Identifier: Apache-2.0
"""Gaussians at the modes of a log-density, and their ELBOs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.runtime.messages import short_repr

__all__ = ["Modes", "antithetic_noise", "gaussian_elbo", "highest_draws"]


class Modes(NamedTuple):
    """Gaussians at separate modes, best first: ``loc`` ``(num_modes, latent_dim)``,
    ``scale_tril`` ``(num_modes, latent_dim, latent_dim)``, ``elbo`` ``(num_modes,)``.
    """

    loc: Tensor
    scale_tril: Tensor
    elbo: Tensor

    def __repr__(self) -> str:
        return short_repr(self)

    def some(self, rows: Tensor | slice | list[int]) -> Modes:
        """Return the Gaussians of some rows."""
        return Modes(*(part[rows] for part in self))

    @staticmethod
    def joined(modes: Iterable[Modes]) -> Modes:
        """Return the Gaussians of all, in the given order."""
        return Modes(*map(torch.cat, zip(*modes, strict=True)))


def antithetic_noise(loc: Tensor, num_draws: int) -> Tensor:
    """Draw standard normal noise and its negative, each of the shape of ``loc``."""
    noise = torch.randn((num_draws // 2,) + loc.shape, dtype=loc.dtype, device=loc.device)
    return torch.cat([noise, -noise])


def gaussian_elbo(log_prob: Tensor, noise: Tensor, factor: Tensor) -> Tensor:
    """Return the ELBO of Gaussians, each truncated to where the model has a density.

    :param log_prob: log-density of the model at their draws, ``(num_draws, num_gaussians)``.
    :param noise: noise of the draws, ``(num_draws, num_gaussians, latent_dim)``.
    :param factor: any F with covariance F F^T, ``(num_gaussians, latent_dim, latent_dim)``.
    :returns: ``(num_gaussians,)``.
    """
    dim = factor.shape[-1]
    inside = log_prob > -math.inf
    num_inside = inside.sum(0)
    entropy = torch.linalg.slogdet(factor).logabsdet + 0.5 * dim * math.log(2 * math.pi)
    # Half of E[noise^2]: from the draws themselves if some are left out.
    half_square = 0.5 * noise.square().sum(-1)
    half_square = torch.where(num_inside == len(noise), 0.5 * dim, half_square)
    mean = (log_prob + half_square).masked_fill(~inside, 0.0).sum(0) / num_inside
    elbo = mean + entropy + (num_inside / len(noise)).log()
    return elbo.nan_to_num(-math.inf, -math.inf, -math.inf)


def highest_draws(draws: Tensor, values: Tensor) -> Tensor:
    """Return the draw of each Gaussian at which the log-density is highest.

    :param draws: ``(num_draws, num_gaussians, latent_dim)``.
    :param values: the log-density there, ``(num_draws, num_gaussians)``.
    :returns: ``(num_gaussians, latent_dim)``.
    """
    return draws[values.argmax(0), torch.arange(draws.shape[1])]
