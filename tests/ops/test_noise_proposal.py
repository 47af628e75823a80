# SPDX-License-Identifier: Apache-2.0
"""The strata of noise behind a value: each keeps its law, and their mixture its density."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from pyro_implicit.ops.semi_implicit import NoiseGaussian, NoiseProposal

DOUBLE = torch.double


@pytest.mark.parametrize("seed", range(2))
def test_the_noise_that_is_known_takes_the_place_of_its_like(seed):
    """If it comes from the mixture, every stratum stays what it is."""
    torch.manual_seed(seed)
    size = 20_000
    mean, sd = torch.full((size, 1), 1.5, dtype=DOUBLE), 0.5
    gaussian = NoiseGaussian(mean, torch.full((size, 1, 1), (1 / sd**2 - 1) ** 0.5, dtype=DOUBLE))
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


def precision_of(rows):
    return torch.eye(rows.shape[-1], dtype=DOUBLE) + rows.mT @ rows


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_the_density_of_the_mixture(m):
    """With fewer rows than dimensions, and with more."""
    torch.manual_seed(0)
    rows = 2 * torch.randn(2, 4, m, 3, dtype=DOUBLE)
    means = torch.randn(2, 4, 3, dtype=DOUBLE)
    gaussians = [NoiseGaussian(mean, a) for mean, a in zip(means, rows, strict=True)]
    proposal = NoiseProposal(gaussians, 30)
    assert proposal.counts == [14, 13, 3]
    noise = torch.randn(5, 4, 3, dtype=DOUBLE)
    parts = [
        MultivariateNormal(mean, precision_matrix=precision_of(a)).log_prob(noise)
        for mean, a in zip(means, rows, strict=True)
    ]
    log_prior = Normal(0.0, 1.0).log_prob(noise).sum(-1)
    weights = torch.tensor([14.0, 13.0, 3.0], dtype=DOUBLE).div(30).log()
    mixture = (torch.stack([*parts, log_prior]) + weights[:, None, None]).logsumexp(0)
    torch.testing.assert_close(proposal.log_ratio(noise), mixture - log_prior)


def test_gaussians_beyond_the_noises_are_left_out():
    gaussian = NoiseGaussian(torch.zeros(2), torch.eye(2))
    assert NoiseProposal([gaussian] * 4, 3).counts == [1, 1, 1]


@pytest.mark.parametrize("m", [1, 2])
def test_draws_have_the_inverse_of_the_precision(m):
    torch.manual_seed(0)
    rows = torch.tensor([[2.0, -1.0], [1.5, 0.8]], dtype=DOUBLE)[:m]
    mean = torch.tensor([1.0, -2.0], dtype=DOUBLE)
    draws = NoiseGaussian(mean, rows).sample(100_000)
    covariance = precision_of(rows).inverse()
    torch.testing.assert_close(draws.mT.cov(), covariance, rtol=0.04, atol=0)
    assert ((draws.mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 300).all()


def test_draws_of_a_steep_generator_in_float32():
    """A precision of 1e12 along one direction: the draws lie in a thin slab, as they must."""
    torch.manual_seed(0)
    rows = torch.tensor([[1e6, 1e6, 0.0], [0.0, 1.0, 1.0]])
    draws = NoiseGaussian(torch.zeros(3), rows).sample(20_000).double()
    assert (draws[:, 0] + draws[:, 1]).std() < 2e-6
    covariance = precision_of(rows.double()).inverse()
    torch.testing.assert_close(draws[:, 1:].mT.cov(), covariance[1:, 1:], rtol=0.05, atol=0)
