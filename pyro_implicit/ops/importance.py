# SPDX-License-Identifier: Apache-2.0
"""Importance weights with a smoothed tail."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

__all__ = ["SmoothedWeights", "pareto_smoothed"]

LEAST_TAIL = 10


class SmoothedWeights(NamedTuple):
    """``weights``, ``(num_draws,)``, of sum 1, and the tail index ``khat`` of those before: above
    0.7 they are not to be relied on. ``efficiency`` is their effective sample size as a share.
    """

    weights: Tensor
    khat: float

    @property
    def efficiency(self) -> float:
        """From 1 / num_draws to 1."""
        return 1 / (len(self.weights) * self.weights.square().sum().item())


def pareto_smoothed(log_weights: Tensor) -> SmoothedWeights:
    r"""Replaces the largest weights by quantiles of a generalised Pareto distribution fitted to
    them, none of them above the largest of before.

    The tail has :math:`\min(S / 5, 3 \sqrt S)` of S weights. Of fewer than ten different ones the
    weights are left as they are, and ``khat`` is infinite unless all weights are the same.

    **Example:**

    >>> found = pareto_smoothed(torch.zeros(100))
    >>> found.khat, round(found.efficiency, 3)
    (0.0, 1.0)

    :param log_weights: ``(num_draws,)``, not normalised; -inf for none.
    :raises ValueError: if all of them are -inf, or one is NaN or +inf.

    **Reference:** Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto Smoothed Importance
    Sampling*, section 2.3.
    """
    largest = log_weights.max()
    if not largest.isfinite() or log_weights.isnan().any():
        raise ValueError("log_weights must be numbers or -inf, and not all of them -inf")
    weights = (log_weights.double() - largest.double()).exp()
    number = len(weights)
    size = math.ceil(min(0.2 * number, 3.0 * math.sqrt(number)))
    ordered, order = weights.sort()
    if size >= number:
        return SmoothedWeights(weights / weights.sum(), math.inf)
    cutoff = ordered[-size - 1]
    excess = ordered[-size:] - cutoff
    num_above = int((excess > 0).sum())
    if num_above < LEAST_TAIL:
        return SmoothedWeights(weights / weights.sum(), math.inf if num_above else 0.0)
    khat, sigma = fit_generalized_pareto(excess[excess > 0].cpu())
    share = (torch.arange(size).to(weights) + 0.5) / size
    quantiles = -torch.log1p(-share) * sigma
    if abs(khat) > 1e-6:
        quantiles = torch.expm1(-khat * torch.log1p(-share)) * sigma / khat
    smoothed = weights.clone()
    smoothed[order[-size:]] = (cutoff + quantiles).clamp(max=1.0)
    return SmoothedWeights(smoothed / smoothed.sum(), khat)
