# SPDX-License-Identifier: Apache-2.0
"""Adaptive importance sampling, for densities of few variables that are expensive."""

from __future__ import annotations

import math

import torch
from torch.distributions import Categorical, Distribution, MixtureSameFamily, MultivariateNormal

from pyro_implicit.density import Modes, Target
from pyro_implicit.fitting.candidates import guide_of, matched_modes
from pyro_implicit.fitting.policy import DEFAULT, CorrectionPolicy
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.ops import LogWeights

__all__ = ["AdaptiveSampler"]


class AdaptiveSampler:
    r"""Adaptive multiple importance sampling by mixtures of normal distributions.

    Each round draws from the latest proposal, weighs the draws of all T rounds by

    .. math:: w(\theta) = \frac{p(\theta)}{\frac{1}{T} \sum_t q_t(\theta)},

    and fits the next proposal to them. No draw is lost, and draws in a tail have moderate weights
    once any proposal covers it.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit.density import Target, find_modes
    >>> def model():
    ...     pyro.sample("x", dist.Gamma(1.0, 1.0))
    >>> target = Target(model)
    >>> sampler = AdaptiveSampler(target, find_modes(target))
    >>> before = sampler.draw()
    >>> sampler.adapt()
    True
    >>> sampler.draw().efficiency > before.efficiency
    True

    :param target: the posterior.
    :param modes: Gaussians at its modes, whose mixture is the first proposal.
    :param policy: the draws of each round, and the components of a proposal.

    Source: Cornuet et al. (2012), *Adaptive multiple importance sampling*, algorithm 1.
    """

    def __init__(
        self, target: Target, modes: Modes, policy: CorrectionPolicy = DEFAULT.correction
    ) -> None:
        self._target, self._policy, self._modes = target, policy, [modes]
        self._proposals: list[Distribution] = []
        self._points = target.init_loc.new_empty(0, target.latent_dim)
        # Of the density, and of the sum of all proposals' densities:
        self._log_p = self._log_q = target.init_loc.new_empty(0)

    @torch.no_grad()
    def draw(self) -> LogWeights:
        """Draw from the latest proposal, and return the weights of the draws of all rounds."""
        proposal = _widened(self._modes[-1], self._policy)
        points = proposal.sample(torch.Size((self._policy.num_adapted,)))
        nothing = points.new_full((len(points),), -math.inf)
        others = torch.stack([nothing, *(one.log_prob(points) for one in self._proposals)])
        self._points = torch.cat([self._points, points])
        log_q = proposal.log_prob(self._points)
        self._log_q = torch.cat([self._log_q, others.logsumexp(0)]).logaddexp(log_q)
        self._log_p = torch.cat([self._log_p, self._target.log_prob(points)])
        self._proposals.append(proposal)
        return self._weights()

    def _weights(self) -> LogWeights:
        log_weights = self._log_p - self._log_q
        return LogWeights(log_weights.masked_fill(~log_weights.isfinite(), -math.inf))

    def adapt(self) -> bool:
        """Fit the next proposal to the draws of all rounds.

        :returns: whether the effective draws were enough.
        """
        most = self._policy.max_components
        found = matched_modes(self._points, self._weights(), most, self._policy)
        if found is not None:
            self._modes.append(found)
        return found is not None

    def guide(self) -> AutoImplicit | AutoMixture:
        """Return a guide with the mean density of all proposals, without their wider noise."""
        used = self._modes[: len(self._proposals)]
        log_weights = torch.cat([one.elbo.log_softmax(0) for one in used])
        loc, scale_tril = (torch.cat(part) for part in list(zip(*used, strict=True))[:2])
        return guide_of(self._target, Modes(loc, scale_tril, log_weights))


def _widened(modes: Modes, policy: CorrectionPolicy) -> Distribution:
    """Return the mixture of Gaussians, each of which is mixed with wider ones."""
    loc = modes.loc
    shares, scales = map(loc.new_tensor, policy.widths)
    log_weights = modes.elbo.log_softmax(0).unsqueeze(-1) + shares.log()
    scale_tril = modes.scale_tril.unsqueeze(1) * scales.reshape(-1, 1, 1)
    parts = MultivariateNormal(
        loc.repeat_interleave(len(scales), 0), scale_tril=scale_tril.flatten(0, 1)
    )
    return MixtureSameFamily(Categorical(logits=log_weights.flatten()), parts)
