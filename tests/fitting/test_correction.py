# SPDX-License-Identifier: Apache-2.0
"""When the weights of a guide's draws are taken for reliable."""

from __future__ import annotations

import re

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import Modes, Target
from pyro_implicit.fitting import CorrectionPolicy, exact_guide
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
            "too few weights in the tail for a k-hat, effective sample size 50%",
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
