# SPDX-License-Identifier: Apache-2.0
"""Importance weights whose largest are smoothed by a generalised Pareto distribution."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from pyro_implicit.runtime.printing import short_repr

__all__ = ["RELIABLE_KHAT", "SmoothedWeights", "describe_weights", "pareto_smoothed"]

RELIABLE_KHAT = 0.7  # importance weights with a larger tail index are unreliable; Vehtari (2024)
_EVEN = 0.99
_TINY = torch.finfo(torch.float64).tiny


class SmoothedWeights(NamedTuple):
    """``log_weights``, ``(num_draws,)``, of weights that sum to 1; ``khat`` the tail index of those
    that were smoothed."""

    log_weights: Tensor
    khat: float

    def __repr__(self) -> str:
        return short_repr(self)


@torch.no_grad()
def pareto_smoothed(log_weights: Tensor) -> SmoothedWeights:
    r"""Pareto-smoothed importance weights.

    The largest :math:`\min(S / 5, 3 \sqrt S)` of S weights are replaced by the quantiles
    :math:`(i - 1/2) / M` of a generalised Pareto distribution fitted to the M that exceed all
    others, but by none larger than the largest weight. That lowers the variance of weighted means
    for little bias, as long as ``khat`` is below 0.7. To resample draws by them, take
    ``torch.multinomial(result.log_weights.exp(), num_samples, replacement=True)``.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> smoothed = pareto_smoothed(torch.randn(1000))
    >>> f"{smoothed.log_weights.exp().sum():.3f}"
    '1.000'
    >>> smoothed.khat < 0.7
    True

    :param log_weights: :math:`\log p - \log q` at draws of q, up to a common constant,
        ``(num_draws,)``; -inf for draws without a density.
    :returns: in the same order. Of fewer than five weights in the tail none is smoothed, and
        ``khat`` is infinite.
    :raises ValueError: for weights that are NaN or infinite, or all 0.

    **References:**

    1. Vehtari et al. (2024), *Pareto Smoothed Importance Sampling*, section 2.
    """
    if log_weights.dim() != 1 or log_weights.isnan().any() or not log_weights.max().isfinite():
        raise ValueError(
            "pareto_smoothed wants log-weights of shape (num_draws,), none of them NaN or +inf and "
            f"not all -inf, but got {log_weights}"
        )
    size = len(log_weights)
    log_w = log_weights.double() - log_weights.double().max()
    tail_size = math.ceil(min(0.2 * size, 3 * math.sqrt(size)))
    order = log_w.argsort()
    cutoff = max(log_w[order[max(0, size - tail_size - 1)]].item(), math.log(_TINY))
    tail = order[log_w[order] > cutoff]  # in rising order
    khat = math.inf
    if len(tail) > 4:
        excess = log_w[tail].exp() - math.exp(cutoff)
        try:
            khat, sigma = fit_generalized_pareto(excess.cpu())
        except ZeroDivisionError:  # of ties, for which a point of its grid may be 0
            excess[-1] *= 1 + 1e-6
            khat, sigma = fit_generalized_pareto(excess.cpu())
        levels = (torch.arange(len(tail), dtype=log_w.dtype, device=log_w.device) + 0.5) / len(tail)
        log_rest = torch.log1p(-levels)
        quantiles = -log_rest if khat == 0 else torch.expm1(-khat * log_rest) / khat
        log_w[tail] = (sigma * quantiles + math.exp(cutoff)).log().clamp(max=0.0)
    return SmoothedWeights(log_w.log_softmax(0).to(log_weights), khat)


def describe_weights(khat: float, efficiency: float) -> str:
    """How good importance weights are, in words.

    **Example:**

    >>> describe_weights(0.31, 0.8)
    'k-hat 0.31, effective sample size 80%'
    >>> describe_weights(math.inf, 1.0)
    'even weights, effective sample size 100%'

    :param khat: their tail index; infinite where they have no tail, as fewer than five are larger
        than the others: all are the same, or nearly all are 0.
    :param efficiency: their effective sample size, as a share of the draws.
    """
    tail = f"k-hat {khat:.2f}"
    if math.isinf(khat):
        tail = "even weights" if efficiency > _EVEN else "too few weights in the tail for a k-hat"
    return f"{tail}, effective sample size {efficiency:.0%}"
