# SPDX-License-Identifier: Apache-2.0
"""Bridge sampling, against a normalising constant that is known."""

from __future__ import annotations

import math

import pyro.distributions as dist
import torch

from pyro_implicit.ops.importance_weights import bridge, bridge_error


def test_bridge_sampling_finds_a_normalising_constant():
    torch.manual_seed(0)
    target, proposal = dist.Normal(0.5, 1.0), dist.Normal(0.0, 1.5)
    ratios = [
        3.0 + target.log_prob(x) - proposal.log_prob(x)
        for x in (target.sample((4000,)), proposal.sample((4000,)))
    ]
    assert abs(bridge(*ratios) - 3.0) < 0.05
    ratios[1][2000:] = -torch.inf  # half of the proposals are elsewhere
    assert abs(bridge(*ratios) - 3.0 - math.log(0.5)) < 0.15


def test_uneven_sets_solve_the_logistic_regression():
    """The optimal bridge is the intercept of a logistic regression of the set on the log-ratio."""
    torch.manual_seed(0)
    target, proposal = dist.Normal(0.5, 1.0), dist.Normal(0.0, 1.5)
    sets = target.sample((500,)).double(), proposal.sample((4000,)).double()
    ratios = [3.0 + target.log_prob(x) - proposal.log_prob(x) for x in sets]
    logits = torch.cat(ratios) - bridge(*ratios) + math.log(500 / 4000)
    torch.testing.assert_close(logits.sigmoid().sum().item(), 500.0, rtol=1e-5, atol=0)


def test_errors_of_bridge_sampling_are_those_of_repeated_runs():
    """Also for dependent draws: each chain of the target repeats its draws five times."""
    torch.manual_seed(0)
    target, proposal = dist.Normal(0.8, 1.0), dist.Normal(0.0, 1.3)
    values, errors = [], []
    for _ in range(300):
        draws = target.sample((40, 10)).repeat(1, 5), proposal.sample((40, 50))
        first, second = (target.log_prob(x) - proposal.log_prob(x) for x in draws)
        value = bridge(first.flatten(), second.flatten())
        values.append(value)
        errors.append(bridge_error(first, second, value))
    ratio = torch.stack(values).std().item() / (sum(errors) / len(errors))
    assert 0.85 < ratio < 1.18  # four standard errors of a standard deviation of 300 runs
