# SPDX-License-Identifier: Apache-2.0
"""Permutations, beside all of them written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pyro_implicit.ops import linear_assignment, permutation_log_prob


def every(size: int) -> torch.Tensor:
    return torch.tensor(list(itertools.permutations(range(size))))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_probabilities_of_all_permutations_sum_to_one(size) -> None:
    log_weights = 3 * torch.randn(4, 1, size, size, dtype=torch.float64)
    orders = every(size).expand(4, -1, size)
    weights = log_weights.expand(4, orders.shape[1], size, size)
    log_prob = permutation_log_prob(weights, orders)
    torch.testing.assert_close(log_prob.logsumexp(-1), torch.zeros(4).double())


def test_probabilities_are_near_those_in_proportion_to_the_weights() -> None:
    # Other units each time: six of them may be apart, or near each other.
    loc = torch.randn(1000, 6, 3, dtype=torch.float64)
    order = torch.stack([torch.randperm(6) for _ in range(1000)])
    units = loc.gather(1, order.unsqueeze(-1).expand_as(loc))
    units = units + 0.7 * torch.randn_like(loc)
    distances = units.unsqueeze(-2) - loc.unsqueeze(-3)
    log_weights = -0.5 * (distances / 0.7).square().sum(-1)
    total = torch.stack(
        [log_weights[:, torch.arange(6), other].sum(-1) for other in every(6)]
    ).logsumexp(0)
    exact = log_weights.gather(-1, order.unsqueeze(-1)).sum((-1, -2)) - total
    found = permutation_log_prob(log_weights, order)
    lost = (exact - found).mean()  # a Kullback-Leibler divergence
    information = exact.mean() + math.lgamma(7)
    assert 1.0 < information < math.lgamma(7) - 0.5  # else there was nothing to find out
    assert -0.02 < lost < 0.05 * information


def test_probabilities_at_the_ends() -> None:
    order = torch.randperm(5)
    apart = torch.full((5, 5), -50.0, dtype=torch.float64)
    apart[torch.arange(5), order] = 0.0
    log_prob = permutation_log_prob(apart, order)
    assert log_prob.item() == pytest.approx(math.log(0.99 + 0.01 / 120), abs=1e-9)
    same = torch.randn(5, 1).double() + torch.randn(5).double()
    assert permutation_log_prob(same, order).item() == pytest.approx(-math.log(120), abs=1e-9)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_the_assignment_is_the_cheapest(size) -> None:
    cost = torch.randn(3, 4, size, size, dtype=torch.float64)
    cost[0] = cost[0].round()  # ties
    found = linear_assignment(cost)
    assert (found.sort(-1).values == torch.arange(size)).all()
    costs = cost.unsqueeze(2).expand(3, 4, math.factorial(size), size, size)
    orders = every(size).expand(3, 4, -1, size)
    least = costs.gather(-1, orders.unsqueeze(-1)).sum((-1, -2)).min(-1).values
    torch.testing.assert_close(cost.gather(-1, found.unsqueeze(-1)).sum((-1, -2)), least)
