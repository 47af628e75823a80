# SPDX-License-Identifier: Apache-2.0
"""The strata of noise behind a value: each keeps its law, and their mixture its density."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_implicit.infer.engine.noise_proposal import NoiseGaussian, NoiseProposal

DOUBLE = torch.double


@pytest.mark.parametrize("seed", range(2))
def test_the_noise_that_is_known_takes_the_place_of_its_like(seed):
    """If it comes from the mixture, every stratum stays what it is."""
    torch.manual_seed(seed)
    size = 20_000
    mean, sd = torch.full((size, 1), 1.5, dtype=DOUBLE), 0.5
    gaussian = NoiseGaussian(mean, torch.full((size, 1, 1), 1 / sd, dtype=DOUBLE))
    proposal = NoiseProposal([gaussian], 2)
    assert proposal.counts == [1, 1]
    from_gaussian = torch.rand(size, 1) < 0.5
    white = torch.randn(size, 1, dtype=DOUBLE)
    noise = proposal.sample(torch.where(from_gaussian, mean + sd * white, white))
    # 20,000 draws: five standard errors.
    assert noise[0].mean().item() == pytest.approx(1.5, abs=5 * sd / size**0.5)
    assert noise[0].std().item() == pytest.approx(sd, rel=0.03)
    assert noise[1].mean().item() == pytest.approx(0.0, abs=5 / size**0.5)
    assert noise[1].std().item() == pytest.approx(1.0, rel=0.03)


def test_the_density_of_the_mixture():
    torch.manual_seed(0)
    factors = torch.randn(2, 4, 3, 3, dtype=DOUBLE).tril()
    factors.diagonal(dim1=-2, dim2=-1).abs_().add_(0.5)
    means = torch.randn(2, 4, 3, dtype=DOUBLE)
    gaussians = [NoiseGaussian(mean, factor) for mean, factor in zip(means, factors, strict=True)]
    proposal = NoiseProposal(gaussians, 30)
    assert proposal.counts == [14, 13, 3]
    noise = torch.randn(5, 4, 3, dtype=DOUBLE)
    parts = [
        MultivariateNormal(mean, precision_matrix=factor @ factor.mT).log_prob(noise)
        for mean, factor in zip(means, factors, strict=True)
    ]
    log_prior = Normal(0.0, 1.0).log_prob(noise).sum(-1)
    weights = torch.tensor([14.0, 13.0, 3.0], dtype=DOUBLE).div(30).log()
    mixture = (torch.stack([*parts, log_prior]) + weights[:, None, None]).logsumexp(0)
    torch.testing.assert_close(proposal.log_ratio(noise), mixture - log_prior)


def test_gaussians_beyond_the_noises_are_left_out():
    gaussian = NoiseGaussian(torch.zeros(2), torch.eye(2))
    assert NoiseProposal([gaussian] * 4, 3).counts == [1, 1, 1]


def test_draws_have_the_inverse_of_the_precision():
    torch.manual_seed(0)
    factor = torch.tensor([[2.0, 0.0], [1.5, 0.8]], dtype=DOUBLE)
    mean = torch.tensor([1.0, -2.0], dtype=DOUBLE)
    draws = NoiseGaussian(mean, factor).sample(40_000)
    covariance = (factor @ factor.mT).inverse()
    torch.testing.assert_close(draws.mT.cov(), covariance, rtol=0.04, atol=0)
    assert ((draws.mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 200).all()
