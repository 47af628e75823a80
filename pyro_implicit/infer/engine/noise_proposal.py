# SPDX-License-Identifier: Apache-2.0
"""Proposals for the noise behind a value: a few Gaussians and the prior, sampled in strata."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NoiseGaussian", "NoiseProposal"]

PRIOR_SHARE = 0.1


class NoiseGaussian:
    r"""A Gaussian of precision :math:`I + A^\top A`.

    :param mean: ``(*batch, d)``.
    :param rows: A, ``(*batch, m, d)``. With m < d no matrix of d rows and columns is made.
    """

    def __init__(self, mean: Tensor, rows: Tensor) -> None:
        self.mean, self.rows = mean, rows
        m, d = rows.shape[-2:]
        self.is_low_rank = m < d
        wide = rows.double()
        gram = wide @ wide.mT if self.is_low_rank else wide.mT @ wide
        identity = torch.eye(min(m, d), dtype=torch.double, device=rows.device)
        factor = torch.linalg.cholesky(gram + identity)
        #: Lower Cholesky factor of I + A A^T if that is smaller than I + A^T A, in float64.
        self.factor = factor if self.is_low_rank else factor.to(mean.dtype)

    @property
    def half_log_det(self) -> Tensor:
        """Half the log-determinant of the precision, ``(*batch,)``."""
        return self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).to(self.mean.dtype)

    def squares(self, noise: Tensor) -> Tensor:
        """Squared Mahalanobis distances ``(n, *batch)`` of noise ``(n, *batch, d)``."""
        # The noises as columns, so that no matrix is copied for each of them.
        offsets = (noise - self.mean).movedim(0, -1)
        if not self.is_low_rank:
            return (self.factor.mT @ offsets).square().sum(-2).movedim(-1, 0)
        squares = offsets.square().sum(-2) + (self.rows @ offsets).square().sum(-2)
        return squares.movedim(-1, 0)

    def log_ratio(self, noise: Tensor) -> Tensor:
        """Its density over that of the standard normal distribution, ``(n, *batch)`` for noise
        ``(n, *batch, d)``."""
        return self.half_log_det + 0.5 * (noise.square().sum(-1) - self.squares(noise))

    def sample(self, num: int) -> Tensor:
        """Draws ``(num, *batch, d)``."""
        white = torch.randn_like(self.mean.expand((num, *self.mean.shape))).movedim(0, -1)
        if not self.is_low_rank:
            steps = torch.linalg.solve_triangular(self.factor.mT, white, upper=True)
        else:  # Matheron's rule: a draw of N(0, I), conditioned on A z + e = 0
            rows, white = self.rows.double(), white.double()
            image = rows @ white
            image = image + torch.randn_like(image)
            steps = white - rows.mT @ torch.cholesky_solve(image, self.factor)
        return self.mean + steps.movedim(-1, 0).to(self.mean.dtype)


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
