# SPDX-License-Identifier: Apache-2.0
"""Adaptive importance sampling of densities with tails that no Gaussian has."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_implicit.density import Modes, Target, find_modes
from pyro_implicit.fitting import adaptive_sampling
from pyro_implicit.fitting.adaptive_sampling import AdaptiveSampler
from pyro_implicit.fitting.candidates import proposal_of
from pyro_implicit.fitting.policy import DEFAULT, CorrectionPolicy, FitPolicy
from pyro_implicit.fitting.stages import Stages, _adapt
from pyro_implicit.guides import AutoMixture
from pyro_implicit.ops import LogWeights
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit


def scales() -> None:
    """Unconstrained, the density has two arms that fall as exp(-|u|)."""
    with pyro.plate("arms", 2):
        pyro.sample("scale", dist.HalfNormal(1.0))


def adapted(sampler: AdaptiveSampler, num_rounds: int) -> AdaptiveSampler:
    sampler.draw()
    for _ in range(num_rounds):
        assert sampler.adapt()
        sampler.draw()
    return sampler


def test_weights_have_the_mean_density_of_all_proposals(monkeypatch) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    target, matched, seen = Target(scales), adaptive_sampling.matched_modes, []

    def watched(points, weights, *args):
        seen.append((points, weights, matched(points, weights, *args)))
        return seen[-1][-1]

    monkeypatch.setattr(adaptive_sampling, "matched_modes", watched)
    first = find_modes(target)
    sampler = adapted(AdaptiveSampler(target, first, CorrectionPolicy(num_adapted=300)), 2)
    sampler.adapt()
    points, weights, _ = seen[-1]
    assert len(points) == 900
    used = (first, seen[0][-1], seen[1][-1])
    log_q = torch.stack([log_density(one, points) for one in used]).exp().mean(0).log()
    expected = (target.log_prob(points) - log_q).log_softmax(0)
    torch.testing.assert_close(weights.values.log_softmax(0), expected)
    # The guide is the mixture of the three drawn from; its generators are almost normal.
    mixture = proposal_of(target, sampler.guide(), DEFAULT.correction)
    torch.testing.assert_close(mixture.log_prob(points), log_q, rtol=0, atol=0.02)


def log_density(modes: Modes, points: Tensor) -> Tensor:
    """A sum over components and widths of their noise."""
    total = torch.zeros(len(points))
    for share, loc, factor in zip(modes.elbo.softmax(0), modes.loc, modes.scale_tril, strict=True):
        for part, scale in ((0.8, 1.0), (0.15, 2.0), (0.05, 4.0)):
            normal = dist.MultivariateNormal(loc, scale_tril=scale * factor)
            total += share * part * normal.log_prob(points).exp()
    return total.log()


@pytest.mark.parametrize("seed", [0, 1])
def test_mixtures_cover_exponential_tails(seed: int) -> None:
    torch.manual_seed(seed)
    target = Target(scales)
    sampler = AdaptiveSampler(target, find_modes(target))
    before = sampler.draw().efficiency
    sampler = adapted(sampler, 5)
    guide, found = sampler.guide(), sampler.draw()
    assert isinstance(guide, AutoMixture) and len(guide.components) == 1 + 5 * 8
    # A fifth of the draws has wider noise, and is worth less.
    assert before < 0.7 and found.efficiency > 0.75, (before, found.efficiency)


def test_too_few_effective_draws_make_no_proposal() -> None:
    torch.manual_seed(0)
    target = Target(scales)
    sampler = AdaptiveSampler(target, find_modes(target), CorrectionPolicy(num_adapted=8))
    sampler.draw()
    assert not sampler.adapt()


def test_the_guide_of_one_round_is_the_first_gaussian() -> None:
    target = Target(scales)
    modes = Modes(torch.zeros(1, 2), torch.eye(2).unsqueeze(0), torch.tensor([-3.0]))
    sampler = AdaptiveSampler(target, modes)
    sampler.draw()
    points = torch.randn(5, 2)
    found = proposal_of(target, sampler.guide()).log_prob(points)
    expected = dist.Normal(0.0, 1.0).log_prob(points).sum(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def state_of(limit: TimeLimit = NO_LIMIT, **options: Any) -> Stages:
    policy = FitPolicy(correction=CorrectionPolicy(num_rounds=5, num_adapted=200, **options))
    return Stages(scales, (), {}, 100, lr=0.01, num_particles=8, limit=limit, policy=policy)


@pytest.mark.parametrize("accepted", [1, 3])
def test_rounds_end_with_the_first_guide_that_fresh_draws_confirm(monkeypatch, accepted) -> None:
    torch.manual_seed(0)
    target, judged = Target(scales), []
    state = state_of()
    good, bad = LogWeights(torch.zeros(10)), LogWeights(10.0 * torch.randn(10))

    def judge(guide, target, policy):
        judged.append(guide)
        return good if len(judged) == accepted else bad

    monkeypatch.setattr(CorrectionPolicy, "accepts", lambda self, found: found is not bad)
    monkeypatch.setattr(state, "reliability_of", judge)
    modes = find_modes(target)
    with state.kept_apart():
        told, found = _adapt(state, target, modes)
        state.choose(target, modes)
    assert found is good and len(judged) == accepted and state.candidates[-1].name == "adaptive"
    assert len(judged[-1].components) == len(state.candidates[-1].guide.components)
    assert f"; after {accepted} adaptive round" in told and state.guides[-1] is not judged[0]


def test_an_accepted_guide_need_not_have_more_even_weights(monkeypatch) -> None:
    """The first weights may be even, and have a heavy tail."""
    torch.manual_seed(0)
    target, state, good = Target(scales), state_of(), LogWeights(torch.zeros(10))
    monkeypatch.setattr(LogWeights, "efficiency", 0.9)
    monkeypatch.setattr(CorrectionPolicy, "accepts", lambda self, found: True)
    monkeypatch.setattr(state, "reliability_of", lambda *_: good)
    modes = find_modes(target)
    with state.kept_apart():
        assert _adapt(state, target, modes)[1] is good
        state.choose(target, modes)


@pytest.mark.parametrize("state", [state_of(TimeLimit(-1.0)), state_of(adaptive_seconds=0.0)])
def test_no_round_begins_without_time(monkeypatch, state) -> None:
    monkeypatch.delattr(AdaptiveSampler, "draw")
    target = Target(scales)
    assert _adapt(state, target, find_modes(target)) == ("", None)
