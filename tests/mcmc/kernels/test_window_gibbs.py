# SPDX-License-Identifier: Apache-2.0
"""Sweeps over discrete elements against enumeration; the ridge moves against exact draws."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from pyro_implicit.density.discrete import Elements
from pyro_implicit.mcmc.kernels import shift, window_gibbs
from pyro_implicit.mcmc.policy import DEFAULT, WindowPolicy

SIZES = torch.tensor([2.0, 2.0, 2.0, 200.0], dtype=torch.float64)
ELEMENTS = Elements(torch.zeros_like(SIZES), SIZES - 1, torch.zeros(4, dtype=torch.bool))


def chain_of_terms(values: torch.Tensor) -> torch.Tensor:
    """A path of four elements, the last of which is a count: neighbours share a term."""
    a, b, c, d = values.unbind(-1)
    return torch.stack(
        [
            0.5 * a + 0.1 * d,
            -0.8 * (a - b).abs(),
            0.6 * (b * c),
            -0.3 * (c - d).square(),
            torch.zeros_like(a),
        ],
        -1,
    )


def exact() -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor(list(product(range(2), range(2), range(2), range(12)))).double()
    return grid, chain_of_terms(grid).sum(-1).softmax(0)


def test_dependence_and_classes():
    values = torch.stack([torch.randint(int(size), (8,)) for size in SIZES], -1).double()
    found = window_gibbs.dependence(values, chain_of_terms, ELEMENTS)
    expected = torch.tensor(
        [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 1, 0]]
    ).bool()
    assert torch.equal(found & expected, found)  # c does not matter where b is 0
    assert found[:2].equal(expected[:2]) and found[3].equal(expected[3])
    classes = window_gibbs.move_classes(expected, ELEMENTS, DEFAULT.window)
    assert sorted(one.elements.tolist() for one in classes) == [[0, 2], [1], [3]]
    assert [one.num_values for one in classes].count(DEFAULT.window.num_values) == 1
    assert window_gibbs.move_classes(None, ELEMENTS, DEFAULT.window)[3].owner.dim() == 0


@pytest.mark.parametrize("is_sequential", [False, True])
@pytest.mark.parametrize("num_values", [2, 8])
def test_sweeps_leave_the_density_invariant(num_values, is_sequential, monkeypatch):
    monkeypatch.setattr(window_gibbs, "MAX_ENTRIES", 20_000)
    policy = WindowPolicy(num_values=num_values)
    grid, probabilities = exact()
    count = 6000
    values = grid[torch.multinomial(probabilities, count, replacement=True)]
    depends = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 1, 0]])
    classes = window_gibbs.move_classes(None if is_sequential else depends.bool(), ELEMENTS, policy)
    state = window_gibbs.State(values, chain_of_terms(values))
    reach = torch.full_like(SIZES, 3.0)
    for _ in range(10):
        state, moved = window_gibbs.step(state, chain_of_terms, classes, ELEMENTS, reach)
    torch.testing.assert_close(state.terms, chain_of_terms(state.values))
    assert (moved > 0.1).all() and (state.values != values).any(0).all()
    products = torch.cat([state.values, state.values[:, :1] * state.values, values], -1)[:, :8]
    expected = torch.cat([grid, grid[:, :1] * grid], -1)
    mean = probabilities @ expected
    sd = (probabilities @ (expected - mean).square()).sqrt()
    assert ((products.mean(0) - mean).abs() < 4.5 * sd / math.sqrt(count)).all()


def test_reach_grows_with_the_spread():
    draws = torch.stack([torch.randn(4000) * 40, torch.randn(4000) * 0.1], -1).double()
    elements = Elements(
        *(torch.full((2,), x) for x in (-math.inf, math.inf)), torch.zeros(2).bool()
    )
    reach = window_gibbs.reach_of(draws, elements, DEFAULT.window)
    assert reach[0] == pytest.approx(2 * 2.4 * 40 / 8, rel=0.05) and reach[1] == 1


# Shifts along a ridge


def thinned(white: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The log of a rate with a Gamma(3, 0.1) prior, and three counts of this rate."""
    rate = white[:, 0].exp()
    prior = 3 * white[:, 0] - 0.1 * rate
    counts = torch.distributions.Poisson(rate.unsqueeze(-1), validate_args=False)
    return prior + torch.where(values < 0, -math.inf, counts.log_prob(values)).sum(-1)


def test_shifts_leave_the_density_invariant():
    count = 20_000
    rate = torch.distributions.Gamma(3.0, 0.1).sample((count,)).double()
    values = torch.poisson(rate.unsqueeze(-1).expand(-1, 3))
    white = rate.log().unsqueeze(-1)
    elements = Elements(
        torch.zeros(3), torch.full((3,), math.inf), torch.zeros(3, dtype=torch.bool)
    )
    scaled = white / (white - white.mean()).std() * 3
    ridge = shift.ridge_of(scaled, values, elements, DEFAULT.shift)
    assert ridge is not None and ridge.slopes.shape == (3, 1)
    size = (white - white.mean()).std() / 3
    ridge = shift.Ridge(ridge.directions * size, ridge.slopes)
    x, n, log_density = white, values, thinned(white, values)
    for _ in range(10):
        x, n, log_density, acceptance = shift.step(x, n, log_density, thinned, ridge, 0.3)
    assert 0.1 < acceptance.mean() < 0.9
    torch.testing.assert_close(log_density, thinned(x, n))
    for before, after in ((white, x), (values, n), (values * white, n * x)):
        error = before.std(0) * math.sqrt(2 / count)
        assert ((after.mean(0) - before.mean(0)).abs() < 4.5 * error).all()


def test_the_conditional_factor():
    """For a normal z and counts x = 3 z + noise, the variance of z given x is 1 / (1 + 9 / s²)."""
    white = torch.randn(40_000, 1, dtype=torch.float64)
    white = (white - white.mean()) / white.std()
    values = (3 * white + 2 * torch.randn_like(white)).round()
    elements = Elements(
        *(torch.full((1,), x) for x in (-math.inf, math.inf)), torch.zeros(1).bool()
    )
    factor = shift.conditional_factor(white, values, elements)
    assert factor.item() ** 2 == pytest.approx(1 / (1 + 9 / (4 + 1 / 12)), rel=0.05)
    assert shift.ridge_of(white, values, elements, DEFAULT.shift) is None  # of unit variance
