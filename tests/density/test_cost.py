# SPDX-License-Identifier: Apache-2.0
"""Costs are counted: the same twice, and more of more work."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import Target
from pyro_implicit.density.cost import estimated_seconds, nearby, seconds_near
from pyro_implicit.density.policy import COST


def loop(length):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        for _ in range(length):
            x = torch.tanh(x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.3))

    return model


def test_operations_elements_and_products():
    one, two = torch.ones(30, 20), torch.ones(20, 40)
    found = estimated_seconds(lambda: (one @ two).exp())
    expected = (
        COST.per_run
        + 2 * COST.per_operation
        + 2 * 1200 * COST.per_element
        + 2 * 30 * 20 * 40 * COST.per_flop
    )
    assert found == pytest.approx(expected)


def test_dear_operations_count_for_many():
    matrices = torch.eye(50).expand(40, 50, 50)

    def elements(evaluate):
        return (
            (estimated_seconds(evaluate) - COST.per_run - COST.per_operation)
            / COST.per_element
            / 1e5
        )

    assert elements(lambda: matrices + 1) == pytest.approx(1.0)
    assert elements(lambda: torch.linalg.cholesky_ex(matrices)) == pytest.approx(6.0, rel=1e-2)
    assert elements(lambda: torch.linalg.eigh(matrices)) == pytest.approx(75.0, rel=0.05)
    assert elements(lambda: matrices.lgamma()) == pytest.approx(15.0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_many_points_cost_what_few_points_say(one_by_one):
    def evaluate(points):
        return (
            torch.cat([p.exp() @ torch.ones(3, 4) for p in points.split(1)])
            if one_by_one
            else (points.exp() @ torch.ones(3, 4))
        )

    point, number = torch.zeros(3), 200
    runs, points = number if one_by_one else 1, nearby(point, number)
    direct = estimated_seconds(lambda: evaluate(points), num_runs=runs)
    assert seconds_near(evaluate, point, one_by_one)(number) == pytest.approx(direct, rel=1e-3)


def test_views_cost_no_elements():
    large = torch.ones(1000, 1000)
    assert estimated_seconds(lambda: large.mT) == pytest.approx(COST.per_run + COST.per_operation)
    assert estimated_seconds(lambda: large.add_(1)) > COST.per_run + 1e6 * COST.per_element


def test_a_loop_costs_by_its_length():
    def cost(length):
        density = Target(loop(length))
        return estimated_seconds(lambda: density.score(torch.zeros(8, 1)))

    short, again, long = cost(20), cost(20), cost(220)
    assert short == again
    # Each step is one operation in every run, and more on the way back.
    assert long - short > 2 * 200 * COST.per_operation


def test_what_a_first_call_prepares_is_not_the_cost_of_a_point():
    prepared = []

    def evaluate(points):
        if not prepared:
            prepared.append([torch.ones(()).exp() for _ in range(1000)])
        return points.exp()

    seconds = seconds_near(evaluate, torch.zeros(3))
    assert seconds(256) < 2 * seconds(4)


def test_a_recorded_evaluation_has_neither_pyros_handlers_nor_autograd():
    large = torch.ones(1000, 100)
    plain, recorded = (
        estimated_seconds(lambda: large + 1, is_recorded=found) for found in (False, True)
    )
    saved = COST.per_run + COST.saved_per_operation
    assert plain - recorded == pytest.approx(saved) and recorded > 1e5 * COST.per_element
