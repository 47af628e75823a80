# SPDX-License-Identifier: Apache-2.0
"""Adaptive importance sampling, for densities that are too expensive for a training."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_implicit.density import Target
from pyro_implicit.fitting.candidates import matched_guide, proposal_of
from pyro_implicit.fitting.policy import DEFAULT, CorrectionPolicy
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.ops import LogWeights

__all__ = ["AdaptiveSampler"]


class AdaptiveSampler:
    r"""Adaptive multiple importance sampling by mixtures of normal distributions.

    Each round draws from the latest proposal, weighs the draws of all T rounds by

    .. math:: w(\theta) = \frac{p(\theta)}{\frac{1}{T} \sum_t q_t(\theta)},

    and fits the next proposal to them. No draw is lost, and a draw in a tail that one proposal
    lacks cannot dominate once another one covers that tail.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit.density import Target, find_modes
    >>> from pyro_implicit.fitting.candidates import exact_guide
    >>> def model():
    ...     pyro.sample("x", dist.Gamma(1.0, 1.0))
    >>> target = Target(model)
    >>> sampler = AdaptiveSampler(target, exact_guide(model, find_modes(target)))
    >>> before = sampler.draw()
    >>> guide = sampler.next_guide()
    >>> sampler.draw().efficiency > before.efficiency
    True

    :param target: the posterior.
    :param guide: a guide with an exact density, the first proposal.
    :param policy: the draws of each round, and the components.

    Source: Cornuet et al. (2012), *Adaptive multiple importance sampling*, algorithm 1.
    """

    def __init__(
        self,
        target: Target,
        guide: AutoImplicit,
        policy: CorrectionPolicy = DEFAULT.correction,
    ) -> None:
        self._target, self._policy = target, policy
        self._proposals: list[Distribution] = []
        self._points: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._guide: AutoImplicit | AutoMixture = guide

    @torch.no_grad()
    def draw(self) -> LogWeights:
        """Draw from the latest proposal, and return the weights of these draws alone."""
        proposal = proposal_of(self._target, self._guide, self._policy)
        points = proposal.sample(torch.Size((self._policy.num_adapted,)))
        log_prob = self._target.log_prob(points)
        self._proposals.append(proposal)
        self._points.append(points)
        self._log_probs.append(log_prob)
        return _weights(log_prob - proposal.log_prob(points))

    @torch.no_grad()
    def next_guide(self) -> AutoImplicit | AutoMixture | None:
        """Return the next proposal, fitted to the draws of all rounds.

        :returns: a guide with an exact density; None for too few effective draws.
        """
        points, policy = torch.cat(self._points), self._policy
        log_q = torch.stack([one.log_prob(points) for one in self._proposals]).logsumexp(0)
        weights = _weights(torch.cat(self._log_probs) - log_q)
        found = matched_guide(self._target, points, weights, policy.max_components, policy)
        if found is not None:
            self._guide = found
        return found


def _weights(log_weights: Tensor) -> LogWeights:
    return LogWeights(log_weights.masked_fill(~log_weights.isfinite(), -math.inf))
