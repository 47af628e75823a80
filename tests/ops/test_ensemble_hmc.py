# SPDX-License-Identifier: Apache-2.0
"""The ensemble's transitions: invariance, what is rejected, and the ChEES criterion."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_implicit.ops.ensemble_hmc import (
    ChainState,
    chees,
    ensemble_move,
    score_of,
    van_der_corput,
)


def gaussian(z):
    return -0.5 * z.square().sum(-1), -z


def state(z, score=gaussian):
    return ChainState(z, *score(z))


def double_well(z):
    return -(z.square() - 1).square().sum(-1), -4 * z * (z.square() - 1)


def test_leaves_a_double_well_invariant_at_a_coarse_step():
    """Exact draws by rejection stay exact, though every fourth trajectory is refused."""
    torch.manual_seed(0)
    z = 4 * torch.rand(400_000, 1, dtype=torch.double) - 2
    z = z[torch.rand(len(z)) < double_well(z)[0].exp()]
    before = z.square()
    current = state(z, double_well)
    sizes = 0.6 * torch.rand(len(z), 1, dtype=torch.double)
    for _ in range(5):
        move = ensemble_move(double_well, current, sizes, 4)
        current = move.state
    assert move.acceptance.mean() < 0.95
    error = (current.position.square() - before).mean() / (before.std() * (2 / len(z)) ** 0.5)
    assert error.abs() < 4
    torch.testing.assert_close(current.gradient, double_well(current.position)[1])


def test_a_trajectory_that_leaves_the_finite_numbers_is_rejected():
    def wall(z):
        log_prob, gradient = gaussian(z)
        outside = z[:, 0] > 0.5
        return (
            log_prob.masked_fill(outside, -math.inf),
            gradient.masked_fill(outside.unsqueeze(-1), math.nan),
        )

    torch.manual_seed(0)
    start = state(torch.zeros(1000, 2), wall)
    move = ensemble_move(wall, start, 0.5, 3)
    assert (move.state.position[:, 0] <= 0.5).all() and (move.acceptance == 0).any()
    assert all(part.isfinite().all() for part in (*move.state, move.proposal, move.velocity))


def test_chees_on_a_gaussian():
    """The flow is z cos t + p sin t, so the criterion is sin(t)² d, if the centre is known."""
    torch.manual_seed(0)
    start = state(torch.randn(100_000, 3, dtype=torch.double))
    for length in (0.4, 1.2, 2.0):
        move = ensemble_move(gaussian, start, length / 50, 50)
        criterion, slope = chees(start.position, move, length)
        assert abs(criterion - 3 * math.sin(length) ** 2) < 0.05
        assert abs(slope - length * 3 * math.sin(2 * length)) < 0.15


def test_van_der_corput_is_even():
    values = [van_der_corput(index) for index in range(1, 256)]
    assert sorted(values) == [index / 256 for index in range(1, 256)]


def correlated(covariance: torch.Tensor):
    distribution = MultivariateNormal(covariance.new_zeros(len(covariance)), covariance)
    return distribution, distribution.log_prob


@pytest.mark.parametrize("step_size", [0.2, 0.6])  # nearly always accepted, and often not
def test_hmc_leaves_its_target_alone(step_size):
    covariance = torch.tensor([[1.0, 0.5], [0.5, 0.5]], dtype=torch.double)
    target, log_density = correlated(covariance)
    start = target.sample((100, 400))
    score = score_of(log_density)
    current = state(start, score)
    rates = []
    for _ in range(20):
        move = ensemble_move(score, current, step_size, 4)
        current = move.state
        rates.append(move.acceptance.mean().item())
    assert move.acceptance.shape == (100, 400)
    assert (min(rates) > 0.95) == (step_size == 0.2)
    draws = current.position.reshape(-1, 2)
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0, atol=0.03)
    assert draws.mean(0).abs().max() < 0.03
    both = torch.cat([draws, start.reshape(-1, 2)], -1).T.corrcoef()
    assert both[:2, 2:].abs().max() < 0.2  # the start is forgotten
    torch.testing.assert_close(current.log_density, log_density(current.position))
    expected = -torch.linalg.solve(covariance, current.position.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(current.gradient, expected)


def test_hmc_reaches_its_target_from_elsewhere():
    covariance = torch.tensor([[1.0, 0.5], [0.5, 0.5]], dtype=torch.double)
    _, log_density = correlated(covariance)
    score = score_of(log_density)
    current = state(torch.full((40_000, 2), 3.0, dtype=torch.double), score)
    for _ in range(40):
        current = ensemble_move(score, current, 0.5, 4).state
    torch.testing.assert_close(current.position.T.cov(), covariance, rtol=0, atol=0.03)
    assert current.position.mean(0).abs().max() < 0.03


def test_hmc_rejects_what_diverges():
    log_density = lambda z: -z.pow(4).sum(-1)  # noqa: E731
    score = score_of(log_density)
    current = state(torch.ones(6, 2), score)
    move = ensemble_move(score, current, 1e9, 5)
    assert not move.acceptance.any()
    assert all(a.equal(b) for a, b in zip(move.state, current, strict=True))
