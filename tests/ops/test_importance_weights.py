# SPDX-License-Identifier: Apache-2.0
"""Pareto-smoothed importance weights, beside ArviZ's and an integral that is known."""

from __future__ import annotations

import math

import arviz
import pytest
import torch

from pyro_implicit.ops import pareto_smoothed

TAILS = {
    "light": lambda n: torch.randn(n, dtype=torch.float64),
    "heavy": lambda n: 2 * torch.randn(n, dtype=torch.float64),
    "pareto": lambda n: torch.rand(n, dtype=torch.float64).log() * -0.9,
    "nearly equal": lambda n: 1e-3 * torch.randn(n, dtype=torch.float64),
}


@pytest.mark.skipif(not hasattr(arviz, "psislw"), reason="ArviZ 1 offers it no more")
@pytest.mark.parametrize("size", [30, 4321])
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_the_same_as_arviz(tail, size):
    log_weights = tail(size) + 700
    expected, khat = arviz.psislw(log_weights.numpy())
    found = pareto_smoothed(log_weights)
    torch.testing.assert_close(found.log_weights, torch.as_tensor(expected), rtol=0, atol=1e-6)
    assert found.khat == pytest.approx(float(khat), abs=1e-6)


def test_weighted_means_are_steadier_and_right():
    """The mean of N(1.3, 1), by draws of N(0, 1)."""
    plain, smoothed = [], []
    for _ in range(100):
        z = torch.randn(500, dtype=torch.float64)
        log_weights = 1.3 * z
        plain.append((log_weights.softmax(0) * z).sum())
        smoothed.append((pareto_smoothed(log_weights).log_weights.exp() * z).sum())
    plain, smoothed = torch.stack(plain), torch.stack(smoothed)
    assert smoothed.var() < plain.var()
    assert smoothed.mean() == pytest.approx(1.3, abs=0.1)


def test_draws_without_a_density_and_few_draws():
    found = pareto_smoothed(torch.tensor([0.0, -math.inf, 1.0]))
    torch.testing.assert_close(
        found.log_weights.exp(), torch.tensor([0.0, -math.inf, 1.0]).softmax(0)
    )
    assert found.khat == math.inf
    many = torch.cat([torch.randn(200), torch.full((50,), -math.inf)])
    found = pareto_smoothed(many)
    assert (found.log_weights[200:] == -math.inf).all() and math.isfinite(found.khat)
    assert found.log_weights.dtype == many.dtype


@pytest.mark.parametrize(
    "bad",
    [
        torch.tensor([0.0, math.nan]),
        torch.tensor([0.0, math.inf]),
        torch.full((3,), -math.inf),
        torch.zeros(2, 2),
    ],
)
def test_bad_weights(bad):
    with pytest.raises(ValueError, match="pareto_smoothed needs log-weights"):
        pareto_smoothed(bad)


def test_weights_that_differ_by_rounding():
    """An exact guide's: they are tied, and Pyro's fit of some ties divides by 0."""
    for seed in range(20):
        ties = torch.randint(-20, 21, (1000,), generator=torch.Generator().manual_seed(seed))
        found = pareto_smoothed(70 + 1.4e-14 * ties.double())
        assert found.khat < 0
        assert found.log_weights.exp().mul(1000).sub(1).abs().max() < 1e-11
