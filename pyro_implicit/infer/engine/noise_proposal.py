# SPDX-License-Identifier: Apache-2.0
"""Where the noise behind a value may lie: a few Gaussians and the prior, sampled in strata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NoiseGaussian", "NoiseProposal"]

PRIOR_SHARE = 0.1


class NoiseGaussian(NamedTuple):
    """``mean`` ``(*batch, d)``, and the lower Cholesky ``factor`` of the precision
    ``(*batch, d, d)``."""

    mean: Tensor
    factor: Tensor

    def log_ratio(self, noise: Tensor) -> Tensor:
        """Its density over that of the standard normal distribution, ``(n, *batch)`` for noise
        ``(n, *batch, d)``."""
        # The noises as columns, so that no factor is copied for each of them.
        white = self.factor.mT @ (noise - self.mean).movedim(0, -1)
        squares = noise.square().sum(-1) - white.square().sum(-2).movedim(-1, 0)
        return self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * squares

    def sample(self, num: int) -> Tensor:
        """Draws ``(num, *batch, d)``."""
        white = torch.randn_like(self.mean.expand((num, *self.mean.shape)))
        steps = torch.linalg.solve_triangular(self.factor.mT, white.movedim(0, -1), upper=True)
        return self.mean + steps.movedim(-1, 0)


class NoiseProposal:
    r"""The mixture :math:`\tau = \sum_k n_k \tau_k / n` of Gaussians and the standard normal prior,
    from each of which a fixed number of noises come.

    :param gaussians: that share all but a tenth of the noises; the last are left out where there
        are too few noises for all.
    :param num_noises: n, at least 2.
    """

    def __init__(self, gaussians: Sequence[NoiseGaussian], num_noises: int) -> None:
        num_prior = max(1, round(PRIOR_SHARE * num_noises))
        num_left = num_noises - num_prior
        self.gaussians = list(gaussians[:num_left])
        num_parts = len(self.gaussians)
        counts = [num_left // num_parts] * num_parts
        counts[0] += num_left - sum(counts)
        self.counts, self.num_noises = [*counts, num_prior], num_noises

    def sample(self, made_by: Tensor) -> Tensor:
        """One noise that is known to have made the value, among fresh ones.

        It takes the place of a draw of one stratum, by the odds of each having made it.

        :param made_by: ``(*batch, d)``.
        :returns: ``(num_noises, *batch, d)``.
        """
        strata = [q.sample(n) for q, n in zip(self.gaussians, self.counts, strict=False)]
        strata.append(torch.randn_like(made_by.expand((self.counts[-1], *made_by.shape))))
        noise = torch.cat(strata)
        odds = self._log_parts(made_by.unsqueeze(0)).squeeze(1).movedim(0, -1)
        choice = torch.distributions.Categorical(logits=odds).sample().unsqueeze(-1)
        start = 0
        for index, count in enumerate(self.counts):
            noise[start] = torch.where(choice == index, made_by, noise[start])
            start += count
        return noise

    def log_ratio(self, noise: Tensor) -> Tensor:
        r""":math:`\log \tau(z) - \log N(z \mid 0, I)`.

        :param noise: ``(n, *batch, d)``.
        :returns: ``(n, *batch)``.
        """
        return self._log_parts(noise).logsumexp(0) - math.log(self.num_noises)

    def _log_parts(self, noise: Tensor) -> Tensor:
        """Of each stratum, its number of noises times its density over the prior's."""
        parts = [q.log_ratio(noise) for q in self.gaussians]
        parts.append(torch.zeros_like(parts[0]))
        numbers = [part + math.log(n) for part, n in zip(parts, self.counts, strict=True)]
        return torch.stack(numbers)
