# SPDX-License-Identifier: Apache-2.0
"""When the weights of a guide's draws are taken for reliable."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit
from pyro_implicit.density import Modes, Target
from pyro_implicit.fitting import CorrectionPolicy, FitPolicy, Schedule, exact_guide
from pyro_implicit.fitting import candidates as correction
from pyro_implicit.ops import LogWeights


def two_modes():
    """A tenth of it lies in a narrow mode in the tail of the rest."""
    parts = dist.Normal(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.1]))
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.9, 0.1])), parts)
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    pyro.factor("density", mixture.log_prob(x) - dist.Normal(0.0, 10.0).log_prob(x))


@pytest.mark.parametrize(
    "log_weights, told",
    [
        (torch.zeros(1000), "even weights, effective sample size 100%"),
        (
            torch.cat([torch.zeros(3), torch.full((997,), -torch.inf)]),
            "too few weights in the tail for a k-hat, effective sample size 0%",
        ),
        (
            torch.cat([torch.zeros(500), torch.full((500,), -torch.inf)]),
            r"k-hat -\d.\d\d, effective sample size 50%",
        ),
        (torch.linspace(0, 1, 1000), r"k-hat -\d.\d\d, effective sample size \d\d%"),
    ],
)
def test_weights_without_a_tail_are_said_in_words(log_weights, told):
    assert re.fullmatch(told, str(LogWeights(log_weights)))


@pytest.mark.parametrize("seed", range(5))
def test_a_mode_that_few_draws_reach_is_seen(seed):
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(seed)
    policy = CorrectionPolicy(num_weighed=20)
    found = Modes(loc=torch.zeros(1, 1), scale_tril=torch.ones(1, 1, 1), elbo=torch.zeros(1))
    guide, density = exact_guide(two_modes, found), Target(two_modes)
    assert not policy.accepts(correction.reliability(guide, density, policy))
    # An expensive log-density is not evaluated again.
    policy = CorrectionPolicy(num_weighed=20, seconds=1e-5)
    pyro.set_rng_seed(seed)
    assert policy.accepts(correction.reliability(guide, density, policy))


@pytest.mark.parametrize("seed", range(5))
def test_a_mode_out_of_reach_of_the_guide_is_seen(seed):
    """A fifth of the posterior lies seven standard deviations from a guide that fits the rest."""

    def model():
        parts = dist.Normal(torch.tensor([0.0, 7.0]), torch.tensor([1.0, 0.5]))
        mixture = dist.MixtureSameFamily(dist.Categorical(torch.tensor([0.8, 0.2])), parts)
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.factor("density", mixture.log_prob(x) - dist.Normal(0.0, 10.0).log_prob(x))

    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(seed)
    policy = CorrectionPolicy()
    found = Modes(loc=torch.zeros(1, 1), scale_tril=torch.ones(1, 1, 1), elbo=torch.zeros(1))
    guide, density = exact_guide(model, found), Target(model)
    assert not policy.accepts(correction.reliability(guide, density, policy))


def bent():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    y = pyro.sample("y", dist.Normal(0.0, 3.0))
    pyro.factor("bend", dist.Normal(0.7 * x**2, 0.7).log_prob(y))


def bent_fit(correction, **options):
    policy = FitPolicy(correction=correction, schedule=Schedule(**options))
    return fit(bent, "auto", seed=0, num_steps=100, policy=policy, refine="auto", progress=False)


def test_training_ends_once_weights_are_even():
    first_look = 23
    result = bent_fit(CorrectionPolicy(), first_look=first_look)
    assert len(result.losses) in (first_look, 2 * first_look, 4 * first_look)
    assert result.correction > 0.9 and result.stages[-1].name == "correct"


def test_training_goes_on_if_weights_are_uneven(monkeypatch):
    monkeypatch.setattr("pyro_implicit.fitting.policy.RELIABLE_KHAT", -1.0)
    monkeypatch.setattr("pyro_implicit.fitting.policy.EVEN_EFFICIENCY", 1.0)
    result = bent_fit(CorrectionPolicy(), max_gap=0.0)
    assert len(result.losses) == 100


@pytest.mark.parametrize(
    ("efficiency", "khat", "ends", "accepted"),
    [
        (0.995, 2.0, True, True),
        (0.95, 0.6, True, True),
        (0.95, 0.8, False, False),
        (0.85, 0.3, False, True),
        (0.8, 0.64, False, True),
        (0.8, 0.66, False, False),
        (0.55, 0.53, False, False),
        (0.45, 0.1, False, False),
    ],
)
def test_weights_that_end_a_training_are_accepted(efficiency, khat, ends, accepted):
    class Found(LogWeights):
        pass

    Found.efficiency, Found.khat = efficiency, khat
    policy, weights = CorrectionPolicy(), Found(torch.zeros(1))
    assert (policy.are_even(weights), policy.accepts(weights)) == (ends, accepted)


@pytest.mark.parametrize(
    ("efficiency", "khat", "confirmed"),
    [
        (0.995, 2.0, True),
        (0.85, 0.3, True),
        (0.55, 0.6, True),
        (0.7, 0.8, False),
        (0.5, 0.6, False),
    ],
)
def test_more_weights_confirm_those_that_were_accepted(efficiency, khat, confirmed):
    """By a reliable k-hat and three quarters of the first effective sample size, 85 % of the four
    fifths of draws with the usual noise: 51 %."""

    class Found(LogWeights):
        pass

    Found.efficiency, Found.khat = efficiency, khat
    assert CorrectionPolicy().confirms(Found(torch.zeros(1)), 0.85) == confirmed


def skewed() -> None:
    """The logarithms of six gamma variables."""
    x = pyro.sample("x", dist.Normal(torch.zeros(6), 10.0).to_event(1))
    density = dist.Gamma(2.0, 1.0).log_prob(x.exp()) + x - dist.Normal(0.0, 10.0).log_prob(x)
    pyro.factor("density", density.sum(-1))


def test_adaptive_rounds_replace_a_training() -> None:
    torch.set_default_dtype(torch.float64)
    policy = FitPolicy(
        correction=CorrectionPolicy(num_rounds=6), schedule=Schedule(max_gap=torch.inf)
    )
    result = fit(skewed, "auto", seed=0, policy=policy, progress=False)
    assert [stage.name for stage in result.stages] == ["search", "gaussian", "choose", "correct"]
    told = result.stages[1].outcome
    assert re.search(r"; after \d adaptive rounds? bound -?\d", told), told
    assert result.chosen == "adaptive" and result.correction > 0.5
    x = result.sample(20_000)["x"]
    sd = torch.polygamma(1, torch.tensor(2.0)).sqrt()
    assert (x.mean(0) - torch.digamma(torch.tensor(2.0))).abs().max() < 0.04 * sd
    assert (x.std(0) / sd - 1).abs().max() < 0.06
