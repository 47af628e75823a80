# SPDX-License-Identifier: Apache-2.0
"""What a guide's importance weights would correct."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import FALSE_ALARM, MomentErrors, moment_errors
from pyro_implicit.diagnostics.whitening import Whitened

__all__ = ["importance_check"]


@torch.no_grad()
def importance_check(draws: Whitened, log_weights: Tensor) -> MomentErrors:
    r"""Errors of a guide's moments, by weighting its draws to the posterior.

    Reliable where the weights' k-hat is below 0.7, in the part of the posterior that the guide
    visits: no weight speaks for a place without draws.

    **Example:**

    >>> from pyro_implicit.diagnostics.whitening import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> u = 0.8 * torch.randn(2000, 1)
    >>> log_weights = (-0.5 * u.square() + 0.5 * (u / 0.8).square()).squeeze(-1)
    >>> importance_check(whiten_draws(u), log_weights).sd_ratios[0] < 0.9
    True

    :param draws: of the guide, in unconstrained space, whitened: ``(num_draws, latent_dim)``.
    :param log_weights: :math:`\log p(x, \theta) - \log q(\theta)`, ``(num_draws,)``.
    :returns: errors of means and standard deviations in any tested direction.
    """
    white = draws.white - draws.white.mean(0)  # of some of the draws, it is not quite 0
    weights = len(white) * log_weights.to(white).softmax(0)
    mean = (weights.unsqueeze(-1) * white).mean(0)
    centered = white - mean
    weighted = weights.unsqueeze(-1) * centered
    # In the mean, the first is that of the posterior, and the products sum to the difference of
    # covariances. What is added to them has mean 0: it follows the noise of the weights' sum.
    products = [(1.0, white, white), (-1.0, weighted, centered)]
    unit = white if draws.axes is None else None
    shifts = weighted - white + mean
    return moment_errors(shifts, products, draws.axes, FALSE_ALARM, weights - 1, unit)
