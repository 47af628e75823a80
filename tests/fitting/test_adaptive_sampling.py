# SPDX-License-Identifier: Apache-2.0
"""Adaptive importance sampling of densities with tails that no Gaussian has."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import Target, find_modes
from pyro_implicit.fitting import adaptive_sampling
from pyro_implicit.fitting.adaptive_sampling import AdaptiveSampler
from pyro_implicit.fitting.candidates import exact_guide, proposal_of
from pyro_implicit.fitting.policy import DEFAULT, CorrectionPolicy
from pyro_implicit.guides import AutoMixture


def scales() -> None:
    """Unconstrained, the density has two arms that fall as exp(-|u|)."""
    with pyro.plate("arms", 2):
        pyro.sample("scale", dist.HalfNormal(1.0))


def test_weights_have_the_mean_density_of_all_proposals(monkeypatch) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    target, seen, guides = Target(scales), [], [exact_guide(scales, find_modes(Target(scales)))]
    matched = adaptive_sampling.matched_guide

    def watched(target, points, weights, *args):
        seen.append((points, weights))
        guides.append(matched(target, points, weights, *args))
        return guides[-1]

    monkeypatch.setattr(adaptive_sampling, "matched_guide", watched)
    sampler = AdaptiveSampler(target, guides[0], CorrectionPolicy(num_adapted=300))
    for _ in range(3):
        sampler.draw()
        sampler.next_guide()
    points, weights = seen[-1]
    assert len(points) == 900
    with torch.no_grad():
        densities = [proposal_of(target, one, DEFAULT.correction) for one in guides[:3]]
        log_q = torch.stack([one.log_prob(points) for one in densities]).exp().mean(0).log()
        expected = (target.log_prob(points) - log_q).log_softmax(0)
    torch.testing.assert_close(weights.values.log_softmax(0), expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_mixtures_cover_exponential_tails(seed: int) -> None:
    torch.manual_seed(seed)
    target = Target(scales)
    sampler = AdaptiveSampler(target, exact_guide(scales, find_modes(target)))
    shares = [sampler.draw().efficiency]
    for _ in range(5):
        guide = sampler.next_guide()
        shares.append(sampler.draw().efficiency)
    assert isinstance(guide, AutoMixture) and len(guide.components) == 8
    # A fifth of the draws has wider noise, and is worth less.
    assert shares[0] < 0.7 and shares[-1] > 0.75, shares


def test_too_few_effective_draws_make_no_proposal() -> None:
    torch.manual_seed(0)
    policy = CorrectionPolicy(num_adapted=8)
    sampler = AdaptiveSampler(
        Target(scales), exact_guide(scales, find_modes(Target(scales))), policy
    )
    sampler.draw()
    assert sampler.next_guide() is None
