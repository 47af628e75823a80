# SPDX-License-Identifier: Apache-2.0
r"""Joint moves of continuous latent variables and the counts that go with them.

Given counts, their rates are narrow, and given rates, the counts are: sweeps and HMC alone creep
along such a ridge. With z the continuous coordinates, x the counts and B the regression of x on z
among draws of the warm-up, a shift proposes

.. math:: z' = z + \epsilon, \qquad x' = x + \lfloor B \epsilon + v \rfloor,

with :math:`\epsilon` normal along the ridge and v uniform on [0, 1). Rounding at random makes the
proposal symmetric: :math:`-\epsilon` leads back with the same probability. So Metropolis' rule
needs the two log-densities alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.discrete import Elements
from pyro_implicit.mcmc.policy import ShiftPolicy

__all__ = ["Ridge", "conditional_factor", "ridge_of", "step"]


class Ridge(NamedTuple):
    """Directions of a ridge, ``(d, rank)``, each as long as it is wide, and the counts' slopes
    along them, ``(num_elements, rank)``."""

    directions: Tensor
    slopes: Tensor


def _regression(white: Tensor, values: Tensor, elements: Elements) -> tuple[Tensor, Tensor]:
    """Return slopes ``(num_elements, d)`` and residual variances of centred draws."""
    count = len(white)
    covariance = white.mT @ white / count
    ridge = torch.eye(len(covariance)).to(covariance) * torch.finfo(white.dtype).eps
    slopes = torch.linalg.solve(covariance + ridge, white.mT @ values / count).mT
    slopes = slopes.masked_fill(elements.is_label.unsqueeze(-1), 0.0)
    # Integers vary by rounding at least.
    residual = (values - white @ slopes.mT).square().mean(0).clamp(min=1 / 12)
    return slopes, residual


def conditional_factor(white: Tensor, values: Tensor, elements: Elements) -> Tensor:
    """Return the Cholesky factor of the covariance of z given the counts, ``(d, d)``.

    :param white: draws of z with unit covariance, ``(num_draws, d)``.
    :param values: values of the elements, ``(num_draws, num_elements)``.
    """
    white, values = (part.double() - part.double().mean(0) for part in (white, values))
    slopes, residual = _regression(white, values, elements)
    precision = torch.eye(white.shape[-1]).to(white) + (slopes.mT / residual) @ slopes
    return torch.linalg.cholesky(torch.linalg.inv(precision))


def ridge_of(
    white: Tensor, values: Tensor, elements: Elements, policy: ShiftPolicy
) -> Ridge | None:
    """Return the ridge along which continuous coordinates and counts vary together.

    :param white: draws of z, ``(num_draws, d)``, of about unit variance given the counts.
    :param values: values of the elements, ``(num_draws, num_elements)``.
    :returns: None if there is none.
    """
    is_count = ~elements.is_label & (elements.num_values > policy.least_values)
    if white.shape[-1] == 0 or not is_count.any():
        return None
    white, values = (part.double() - part.double().mean(0) for part in (white, values))
    slopes, _ = _regression(white, values, elements)
    slopes = slopes.masked_fill(~is_count.unsqueeze(-1), 0.0)
    variance, directions = torch.linalg.eigh(white.mT @ white / len(white))
    wide = variance > policy.least_variance
    if not wide.any():
        return None
    directions = directions[:, wide] * (variance[wide] - 1).sqrt()
    return Ridge(directions, slopes @ directions)


def step(
    white: Tensor,
    values: Tensor,
    log_density: Tensor,
    log_prob: Callable[[Tensor, Tensor], Tensor],
    ridge: Ridge,
    size: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make one joint move of all chains, exact by Metropolis' rule.

    :param white: z, ``(num_chains, d)``.
    :param values: x, ``(num_chains, num_elements)``.
    :param log_density: log-density of both, ``(num_chains,)``, finite.
    :param log_prob: the log-density of z and x.
    :param size: size of a step along the ridge, in its widths.
    :returns: z, x, the log-density, and the probabilities of acceptance.
    """
    noise = size * torch.randn(len(white), ridge.directions.shape[-1]).to(ridge.directions)
    moved = white + (noise @ ridge.directions.mT).to(white)
    shift = noise @ ridge.slopes.mT
    others = values + (shift + torch.rand_like(shift)).floor().to(values)
    found = log_prob(moved, others)
    change = torch.where(found.isfinite(), found - log_density, -math.inf)
    acceptance = change.clamp(max=0.0).exp()
    accepted = torch.rand_like(acceptance) < acceptance
    rows = accepted.unsqueeze(-1)
    return (
        torch.where(rows, moved, white),
        torch.where(rows, others, values),
        torch.where(accepted, found, log_density),
        acceptance,
    )
