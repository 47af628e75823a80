# SPDX-License-Identifier: Apache-2.0
"""Sums over trees, against sums over all joint values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_implicit.ops.belief_propagation import (
    Forest,
    draw_values,
    find_forest,
    log_marginals,
    sum_product,
)

EDGES = torch.tensor([[3, 0], [3, 1], [1, 4], [0, 3]])  # and 2 alone; one edge twice


def forest_of(edges: Tensor, number: int) -> Forest:
    found = find_forest(edges, number)
    assert found is not None
    return found


@pytest.fixture
def tables() -> tuple[Tensor, Tensor]:
    unary, pairs = torch.randn(2, 5, 3).double(), torch.randn(2, 3, 3, 3).double()
    unary[0, 4, 1] = -math.inf
    pairs[0, 1, :, 2] = -math.inf  # a value of the parent without a possible value of the child
    return unary, pairs


def joint(unary: Tensor, pairs: Tensor, forest: Forest) -> tuple[Tensor, Tensor]:
    """Return all joint values and their log-weights, ``(num_points, 3^5)``."""
    values = torch.cartesian_prod(*[torch.arange(3)] * 5)
    total = sum(unary[:, k, values[:, k]] for k in range(5))
    for place, k in enumerate(forest.children.tolist()):
        total = total + pairs[:, place, values[:, k], values[:, int(forest.parent[k])]]
    return values, total


def test_trees_of_edges() -> None:
    forest = forest_of(EDGES, 5)
    assert [level.tolist() for level in forest.levels] == [[0, 2], [3], [1], [4]]
    assert forest.parent[[1, 3, 4]].tolist() == [3, 0, 1]
    assert forest.is_odd.tolist() == [False, False, False, True, True]
    assert find_forest(torch.tensor([[0, 1], [1, 2], [2, 0]]), 4) is None
    alone = forest_of(torch.zeros(0, 2, dtype=torch.long), 2)
    assert [level.tolist() for level in alone.levels] == [[0, 1]]


def test_sums_and_gradients_are_those_of_all_joint_values(tables: tuple[Tensor, Tensor]) -> None:
    forest = forest_of(EDGES, 5)
    unary, pairs = (table.requires_grad_() for table in tables)
    totals = sum_product(unary, pairs, forest)[0]
    exact = joint(unary, pairs, forest)[1].logsumexp(-1)
    torch.testing.assert_close(totals.sum(-1), exact)
    found = torch.autograd.grad(totals.sum(), (unary, pairs))
    expected = torch.autograd.grad(exact.sum(), (unary, pairs))
    torch.testing.assert_close(found, expected)


def test_marginals_and_draws_are_those_of_all_joint_values(tables: tuple[Tensor, Tensor]) -> None:
    forest, (unary, pairs) = forest_of(EDGES, 5), tables
    values, weights = joint(unary, pairs, forest)
    _, beliefs, messages = sum_product(unary, pairs, forest)
    shares = weights.softmax(-1)
    exact = torch.stack([(shares.unsqueeze(-1) * (values == k)[None]).sum(1) for k in range(3)], -1)
    found = log_marginals(beliefs, messages, pairs, forest).exp()
    torch.testing.assert_close(found, exact)
    number = 20_000
    many = torch.arange(2).repeat_interleave(number)
    places, log_prob = draw_values(beliefs[many], pairs[many], forest)
    index = (places * 3 ** torch.arange(4, -1, -1)).sum(-1)
    torch.testing.assert_close(log_prob, weights.log_softmax(-1)[many, index])
    for point in range(2):
        counts = torch.bincount(index[many == point], minlength=3**5) / number
        error = (counts - shares[point]) / (shares[point] / number + 1e-9).sqrt()
        assert error.abs().max() < 5


def test_a_sum_of_nothing_is_minus_infinity(tables: tuple[Tensor, Tensor]) -> None:
    forest, (unary, pairs) = forest_of(EDGES, 5), tables
    unary[1, 3] = -math.inf
    unary.requires_grad_()
    totals, beliefs, messages = sum_product(unary, pairs, forest)
    assert totals[1, 0] == -math.inf and totals[1, 1].isfinite()
    assert torch.autograd.grad(totals[0].sum(), unary)[0].isfinite().all()
    assert log_marginals(beliefs, messages, pairs, forest)[1, :2].isnan().any()
