# SPDX-License-Identifier: Apache-2.0
"""Importance weights and their reliability; normalising constants by bridge sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from pyro_implicit.ops.log_space import log_mean_exp
from pyro_implicit.ops.policy import BRIDGE_TOLERANCE, EVEN_EFFICIENCY, MAX_BRIDGE_STEPS, TIED
from pyro_implicit.runtime.messages import short_repr

__all__ = [
    "LogWeights",
    "SmoothedWeights",
    "bridge",
    "bridge_error",
    "describe_weights",
    "pareto_smoothed",
    "systematic",
]


class SmoothedWeights(NamedTuple):
    """Normalised ``log_weights``, ``(num_draws,)``, and ``khat``, the tail index of the smoothed
    weights."""

    log_weights: Tensor
    khat: float

    def __repr__(self) -> str:
        return short_repr(self)


@torch.no_grad()
def pareto_smoothed(log_weights: Tensor, rounding: float | None = None) -> SmoothedWeights:
    r"""Smooth importance weights by a generalised Pareto distribution.

    The largest :math:`M = \min(S / 5, 3 \sqrt S)` of S weights are replaced by the quantiles
    :math:`(i - 1/2) / M` of a generalised Pareto distribution fitted to them, truncated at the
    largest weight. Smoothing lowers the variance of weighted means at little bias if ``khat`` is
    below 0.7. To resample draws, use
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
    :param rounding: relative rounding error of the log-weights, by default that of their dtype.
    :returns: weights in the same order. With fewer than five weights in the tail no weight is
        smoothed, and ``khat`` is infinite. Equal weights, as of discrete draws, are spread for the
        fit of ``khat``. If more draws share the largest weight than the tail has, weights are
        bounded: ``khat`` is about -1, and they stay as they are.
    :raises ValueError: for weights that are NaN or infinite, or all 0.

    **References:**

    1. Vehtari et al. (2024), *Pareto Smoothed Importance Sampling*, section 2.
    """
    if log_weights.dim() != 1 or log_weights.isnan().any() or not log_weights.max().isfinite():
        raise ValueError(
            "pareto_smoothed needs log-weights of shape (num_draws,), none of them NaN or +inf and "
            f"not all -inf, but got {log_weights}"
        )
    size = len(log_weights)
    log_w = log_weights.double() - log_weights.double().max()
    tail_size = math.ceil(min(0.2 * size, 3 * math.sqrt(size)))
    order = log_w.argsort()
    log_w[log_w < math.log(torch.finfo(torch.float64).tiny)] = -math.inf
    ordered = log_w[order]
    # Draws of few values have equal weights, up to rounding. Draws far out have more of it.
    usual = log_weights[log_weights.isfinite()].abs().median().item()
    rounding = torch.finfo(log_weights.dtype).eps if rounding is None else rounding
    apart = ordered.diff() > TIED * rounding * (1 + usual)
    tie = torch.cat([apart.new_zeros(1), apart]).cumsum(0)
    lowest = tie[max(0, size - tail_size - 1)]
    is_bounded = bool(lowest == tie[-1])  # the largest weight has more draws than the tail
    first = int((tie < lowest + (not is_bounded)).sum())
    tail = order[first:]  # in rising order
    khat = math.inf
    if len(tail) > 4:
        cutoff = ordered[first - 1].exp().item() if first else 0.0
        excess = _without_ties(ordered[first:].exp() - cutoff, tie[first:])
        excess = excess.cpu()
        with torch.device("cpu"):  # Pyro's function makes a grid on the default device
            try:
                khat, sigma = fit_generalized_pareto(excess)
            except ZeroDivisionError:  # of evenly spread values, a point of its grid may be 0
                excess[-1] *= 1 + 1e-6
                khat, sigma = fit_generalized_pareto(excess)
        levels = (torch.arange(len(tail), dtype=log_w.dtype, device=log_w.device) + 0.5) / len(tail)
        log_rest = torch.log1p(-levels)
        quantiles = -log_rest if khat == 0 else torch.expm1(-khat * log_rest) / khat
        if not is_bounded:
            log_w[tail] = (sigma * quantiles + cutoff).log().clamp(max=0.0)
    return SmoothedWeights(log_w.log_softmax(0).to(log_weights), khat)


def _without_ties(excess: Tensor, tie: Tensor) -> Tensor:
    """Spread equal values evenly down to the next smaller value, or to 0.

    The fit assumes a continuous distribution: two values, many times each, may give any k-hat.

    :param excess: positive, in rising order, ``(n,)``.
    :param tie: equal for equal values, in rising order, ``(n,)``.
    """
    counts = tie.unique_consecutive(return_counts=True)[1]
    last = counts.cumsum(0) - 1
    group = torch.arange(len(counts), device=tie.device).repeat_interleave(counts)
    values = excess[last]
    steps = values.diff(prepend=values.new_zeros(1))
    behind = last[group] - torch.arange(len(tie), device=tie.device)
    return values[group] - steps[group] * behind / counts[group]


@dataclass(frozen=True, eq=False, repr=False)
class LogWeights:
    r"""Log-weights :math:`\log p - \log q` at draws of q, and what follows from them.

    Means of the log-weights are those of ``values``. K-hat, effective sample size, ``shares`` and
    resampling are those of the Pareto-smoothed weights (:func:`pareto_smoothed`).

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> weights = LogWeights(0.5 * torch.randn(1000))  # log Z = 1/8
    >>> print(weights)
    k-hat 0.28, effective sample size 73%
    >>> f"{weights.mean:.2f} +- {weights.standard_error:.2f}, about {weights.gap:.2f} below log Z"
    '0.01 +- 0.02, about 0.13 below log Z'

    :param values: the log-weights, ``(num_draws,)``; -inf for draws without a density.
    """

    values: Tensor
    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        return describe_weights(self.khat, self.efficiency)

    @cached_property
    def smoothed(self) -> SmoothedWeights:
        """The Pareto-smoothed weights; if no weight is positive, the weights as they are."""
        values = self.values.double()
        if not values.max() > -math.inf:  # -inf or NaN
            return SmoothedWeights(values, math.inf)
        return pareto_smoothed(values, torch.finfo(self.values.dtype).eps)

    @property
    def khat(self) -> float:
        """The Pareto tail index; infinite if fewer than five weights are in the tail."""
        return self.smoothed.khat

    @property
    def shares(self) -> Tensor:
        """The smoothed weights, which sum to 1, ``(num_draws,)`` in float64."""
        return self.smoothed.log_weights.exp()

    @property
    def efficiency(self) -> float:
        """The effective sample size as a share of the draws."""
        return self.effective_sample_size / len(self)

    @property
    def effective_sample_size(self) -> float:
        """The number of independent draws of p that the weighted draws are worth."""
        squares = self.shares.square().sum().item()
        return 1 / squares if squares > 0 else 0.0

    @property
    def mean(self) -> float:
        """The mean log-weight, a lower bound on log Z; -inf if it is not a number."""
        value = self.values.double().mean().item()
        return -math.inf if math.isnan(value) else value

    @property
    def standard_error(self) -> float:
        """The standard error of ``mean``; NaN if it is infinite."""
        return self.values.double().std().item() / math.sqrt(len(self))

    @property
    def gap(self) -> float:
        """An estimate of KL(q || p) in nats: half the variance of the log-weights."""
        value = 0.5 * self.values.var().item()
        return math.inf if math.isnan(value) else value

    @property
    def log_mean(self) -> float:
        """The logarithm of the mean weight, an estimate of log Z."""
        return log_mean_exp(self.values).item()

    def trimmed(self, share: float) -> LogWeights:
        """Return the log-weights in rising order, without the lowest.

        :param share: the share that is left out.
        """
        return LogWeights(self.values.sort().values[int(share * len(self)) :])

    def resample(self, num_samples: int) -> Tensor:
        """Select draws in proportion to their weights, in random order.

        Systematic resampling of the shuffled draws: the numbers of copies have the least variance.
        In their own order, equidistant ones of Sobol draws share digits: the mean of 8,192 was off
        by up to 0.28 standard deviations.

        :param num_samples: the number of selected draws.
        :returns: indices of draws, ``(num_samples,)``.
        """
        order = torch.randperm(len(self), device=self.values.device)
        rows = order[systematic(self.shares[order], num_samples)]
        return rows[torch.randperm(num_samples, device=rows.device)]


def systematic(weights: Tensor, number: int) -> Tensor:
    """Return indices of resampled particles in rising order, ``(number,)``.

    The number of copies of any run of neighbours differs from its expectation by at most 1.

    **Example:**

    >>> systematic(torch.tensor([0.5, 0.0, 0.5]), 4)
    tensor([0, 0, 2, 2])

    :param weights: which sum to 1, ``(n,)``.
    """
    ticks = (torch.arange(number).to(weights) + torch.rand(()).to(weights)) / number
    return torch.searchsorted(weights.cumsum(0), ticks).clamp(max=len(weights) - 1)


def describe_weights(khat: float, efficiency: float) -> str:
    """Describe the reliability of importance weights in words.

    **Example:**

    >>> describe_weights(0.31, 0.8)
    'k-hat 0.31, effective sample size 80%'
    >>> describe_weights(math.inf, 1.0)
    'even weights, effective sample size 100%'

    :param khat: tail index; negative if the weights are bounded, as equal ones are; infinite if
        fewer than five weights are in the tail.
    :param efficiency: effective sample size as a share of the draws.
    """
    tail = f"k-hat {khat:.2f}"
    if math.isinf(khat):
        tail = "too few weights in the tail for a k-hat"
    if efficiency > EVEN_EFFICIENCY and (math.isinf(khat) or khat < 0):
        tail = "even weights"
    return f"{tail}, effective sample size {efficiency:.0%}"


def bridge(log_target: Tensor, log_proposal: Tensor) -> Tensor:
    r"""Estimate the logarithm of a normalising constant by bridge sampling.

    **Example:**

    >>> print(f"{bridge(torch.full((5,), 2.0), torch.full((5,), 2.0)):.3f}")
    2.000

    :param log_target: log-ratio of density to proposal at draws of the target, ``(n,)``.
    :param log_proposal: log-ratio at draws of the proposal, -inf for density 0.

    **References:**

    1. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*, equation 4.1.
    """
    first, second = log_target.double(), log_proposal.double()
    found = first.median()
    for _ in range(MAX_BRIDGE_STEPS):
        above, below = _bridge_terms(first, second, found)
        before, found = found, log_mean_exp(above) - log_mean_exp(below)
        if (found - before).abs() < BRIDGE_TOLERANCE:
            break
    return found.to(log_target)


def bridge_error(log_target: Tensor, log_proposal: Tensor, estimate: Tensor) -> float:
    r"""Return the standard error of :func:`bridge`, also for dependent draws of a chain.

    The estimate is a ratio of two means, over draws of the proposal and of the target. Its
    relative variance is the sum of theirs, to first order: the error of ``estimate`` inside of the
    means has no effect. The variance of a mean is that of the means of chains.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> ratios = 0.1 * torch.randn(2, 50, 20)
    >>> error = bridge_error(*ratios, bridge(*ratios.flatten(1)))
    >>> print(f"{error:.3f}")  # sqrt(2 * 0.05 ** 2 / 1000)
    0.002

    :param log_target: log-ratio of density to proposal at draws of the target,
        ``(num_chains, num_draws)``.
    :param log_proposal: log-ratio at draws of the proposal, ``(num_groups, num_draws)``.
    :param estimate: the result of :func:`bridge` for all these draws.
    :returns: in nats; NaN for a single chain or group.

    **References:**

    1. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*, equation 3.2.
    """
    above, below = _bridge_terms(log_target.double(), log_proposal.double(), estimate.double())

    def relative_variance(logs: Tensor) -> Tensor:
        means = (logs - logs.max()).exp().mean(-1)
        return means.var() / len(means) / means.mean().square()

    return math.sqrt(relative_variance(above) + relative_variance(below))


def _bridge_terms(first: Tensor, second: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms whose mean exponentials have the normalising constant as their ratio.

    The former are at draws of the proposal, the latter at draws of the target.
    """
    total = first.numel() + second.numel()
    log_share, log_rest = math.log(first.numel() / total), math.log(second.numel() / total)
    above = second - torch.logaddexp(log_share + second, log_rest + estimate)
    return above, -torch.logaddexp(log_share + first, log_rest + estimate)
