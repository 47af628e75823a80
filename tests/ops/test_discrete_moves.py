# SPDX-License-Identifier: Apache-2.0
"""Moves of discrete elements leave their distribution invariant."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.ops.discrete_moves import choose_other, classes_of, windows

PROBABILITIES = torch.tensor([0.05, 0.2, 0.4, 0.1, 0.25], dtype=torch.float64)


def transition(log_weights: torch.Tensor) -> torch.Tensor:
    """The Metropolised Gibbs sampler's matrix, from its definition."""
    weights = log_weights.softmax(0)
    matrix = torch.zeros(len(weights), len(weights), dtype=weights.dtype)
    for i, own in enumerate(weights):
        for j, other in enumerate(weights):
            if i != j:
                matrix[i, j] = other / (1 - own) * min(1.0, (1 - own) / (1 - other))
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


@pytest.mark.parametrize("number", [2, 5])
def test_probabilities_of_the_metropolised_gibbs_sampler(number):
    count, log_weights = 40_000, PROBABILITIES[:number].log()
    expected = transition(log_weights)
    for current in range(number):
        turned = log_weights.roll(-current)
        chosen, probability = choose_other(turned.unsqueeze(-1).expand(-1, count))
        found = torch.bincount((chosen + current) % number, minlength=number) / count
        row = expected[current].clamp(0, 1)
        error = (row * (1 - row) / count).sqrt()
        assert ((found - expected[current]).abs() <= 5 * error + 1e-12).all()
        torch.testing.assert_close(probability.mean(), 1 - row[current], rtol=0.02, atol=0.0)


def test_impossible_candidates_are_never_chosen():
    log_weights = torch.full((3, 100), -math.inf)
    log_weights[0] = 0.0
    chosen, probability = choose_other(log_weights)
    assert (chosen == 0).all() and (probability == 0).all()
    log_weights[2] = -1.0
    assert set(choose_other(log_weights)[0].tolist()) <= {0, 2}


@pytest.mark.parametrize(
    ("number", "stride", "is_whole"), [(5, 1, True), (3, 1, False), (2, 2, False), (4, 2, False)]
)
def test_windows_leave_a_distribution_invariant(number, stride, is_whole):
    """At the ends, windows hold fewer values: they must be as likely from each of them."""
    count = 100_000
    value = torch.multinomial(PROBABILITIES, count, replacement=True).unsqueeze(-1).double()
    low, high = torch.zeros(1, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64)
    log_prob = PROBABILITIES.log()
    for _ in range(3):
        strides = torch.full_like(value, stride)
        candidates, is_possible = windows(value, low, high, strides, number, is_whole)
        assert torch.equal(candidates[0], value) and is_possible[0].all()
        weights = log_prob[candidates.long()] - log_prob[value.long()]
        chosen, _ = choose_other(weights.masked_fill(~is_possible, -math.inf))
        value = candidates.gather(0, chosen.unsqueeze(0))[0]
    found = torch.bincount(value.flatten().long(), minlength=5) / count
    error = (PROBABILITIES * (1 - PROBABILITIES) / count).sqrt()
    assert ((found - PROBABILITIES).abs() < 4.5 * error).all()


def test_classes_share_no_term():
    depends = torch.rand(30, 50) < 0.05
    kind = torch.arange(30) % 2
    classes = classes_of(depends, kind)
    assert sorted(torch.cat(classes).tolist()) == list(range(30))
    for some in classes:
        assert (depends[some].sum(0) <= 1).all() and len(kind[some].unique()) == 1
    assert len(classes_of(torch.eye(30).bool(), torch.zeros(30))) == 1
    assert len(classes_of(torch.ones(30, 1).bool(), torch.zeros(30))) == 30
