# SPDX-License-Identifier: Apache-2.0
"""Pareto-smoothed importance weights, compared with ArviZ and a known integral."""

from __future__ import annotations

import math

import arviz
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.ops import LogWeights, pareto_smoothed
from pyro_implicit.ops.importance_weights import systematic
from pyro_implicit.ops.quadrature import normal_draws

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


@pytest.mark.parametrize(
    ("p", "q", "low", "high"),
    [
        # Ten spins have eleven weights, up to rounding in float32; all weights are bounded.
        (dist.Bernoulli(torch.full((10,), 0.5)), dist.Bernoulli(torch.full((10,), 0.4)), -1, 0.4),
        (dist.Bernoulli(torch.tensor(0.5)), dist.Bernoulli(torch.tensor(0.4)), -1, -0.9),
        (dist.Poisson(5.0), dist.Poisson(5.0), -1, -0.9),
        (dist.Poisson(5.0), dist.Poisson(6.0), -1, 0.3),
        (dist.Poisson(20.0), dist.Poisson(5.0), 0.7, 3),  # weights 4^n
    ],
)
def test_weights_of_discrete_draws(p, q, low, high):
    for seed in range(10):
        torch.manual_seed(seed)
        x = q.sample((4000,))
        log_weights = (p.log_prob(x) - q.log_prob(x)).reshape(4000, -1).sum(-1)
        found = LogWeights(log_weights)
        assert low <= found.khat <= high
        raw = log_weights.double().softmax(0)
        if high < 0:  # bounded by a tie: the weights stay as they are
            torch.testing.assert_close(found.shares, raw)


def test_few_draws_above_a_tie_leave_the_tail_unknown():
    log_weights = torch.zeros(4000)
    log_weights[:3] = 5.0
    assert pareto_smoothed(log_weights).khat == math.inf


def test_log_weights_of_a_gaussian():
    """p = exp(0.7) N(0, 1) and q = N(0, s^2) with s = 1.2 have closed forms."""
    torch.manual_seed(0)
    s = 1.2
    z = s * torch.randn(200_000, dtype=torch.float64)
    found = LogWeights(0.7 - 0.5 * z**2 + 0.5 * (z / s) ** 2 + math.log(s))
    kl = 0.5 * (s**2 - 1) - math.log(s)
    assert found.mean == pytest.approx(0.7 - kl, abs=4 * found.standard_error)
    sd = (s**2 - 1) / 2**0.5  # of (1 - s^2) / 2 times a chi-squared variable
    assert found.standard_error == pytest.approx(sd / len(z) ** 0.5, rel=0.02)
    assert found.gap == pytest.approx(sd**2 / 2, rel=0.03)
    assert found.log_mean == pytest.approx(0.7, abs=0.003)
    # E[w]^2 / E[w^2], with E[w^2] = s^2 / sqrt(2 s^2 - 1)
    assert found.efficiency == pytest.approx((2 * s**2 - 1) ** 0.5 / s**2, abs=0.002)
    assert found.effective_sample_size == pytest.approx(found.efficiency * len(z))
    assert found.shares.sum().item() == pytest.approx(1.0)
    assert z[found.resample(50_000)].std().item() == pytest.approx(1.0, abs=0.01)


def test_effective_sample_size_and_shares_are_of_smoothed_weights():
    log_weights = TAILS["pareto"](1000)
    found, smoothed = LogWeights(log_weights), pareto_smoothed(log_weights)
    assert found.shares.equal(smoothed.log_weights.exp()) and found.khat == smoothed.khat
    size = 1 / smoothed.log_weights.exp().square().sum().item()
    assert found.effective_sample_size == pytest.approx(size)
    raw = 1 / log_weights.softmax(0).square().sum().item()
    assert found.effective_sample_size != pytest.approx(raw, rel=0.01)


def test_systematic_resampling():
    """Numbers of copies differ from their means by less than one; the order is random."""
    found = LogWeights(torch.tensor([0.5, 0.2, 0.0, 0.3]).log())
    counts = torch.bincount(found.resample(1001), minlength=4)
    assert ((counts - 1001 * torch.tensor([0.5, 0.2, 0.0, 0.3])).abs() < 1).all() and counts[2] == 0
    index = found.resample(1000)
    assert (index.diff() < 0).sum() > 100


def test_resampling_keeps_the_shares_of_neighbours():
    weights = torch.rand(1000, dtype=torch.float64)
    weights = weights / weights.sum()
    rows = systematic(weights, 300)
    counts = rows.bincount(minlength=1000)
    assert (rows.diff() >= 0).all() and len(rows) == 300
    assert ((counts - 300 * weights).cumsum(0).abs() <= 1 + 1e-9).all()


def test_resampling_is_unbiased():
    shares = torch.tensor([0.5, 0.2, 0.0, 0.3])
    found = LogWeights(shares.log())
    counts = [torch.bincount(found.resample(3), minlength=4) for _ in range(2000)]
    error = torch.stack(counts).double().mean(0) - 3 * shares
    assert (error.abs() < 4 * 0.5 / 2000**0.5).all()  # a count is one of two neighbours


def test_resampling_of_sobol_draws():
    """Systematic resampling in the order of the draws is off by up to 0.28 standard deviations."""
    z = normal_draws(2**13, 1, torch.zeros((), dtype=torch.float64), seed=3).squeeze(-1)
    found = LogWeights(0.05 * z)  # the target is Normal(0.05, 1)
    means = torch.stack([z[found.resample(2**13)].mean() for _ in range(20)])
    assert ((means - 0.05).abs() < 0.03).all()


def test_log_weights_without_the_lowest():
    values = torch.cat([torch.full((3,), -math.inf), torch.arange(97.0)])
    found = LogWeights(values[torch.randperm(100)]).trimmed(0.04)
    assert found.values.equal(torch.arange(1.0, 97.0))


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_log_weights_of_draws_without_a_density(value):
    found = LogWeights(torch.full((9,), value))
    assert found.mean == -math.inf and found.gap == found.khat == math.inf
    assert found.efficiency == found.effective_sample_size == 0.0
    one = LogWeights(torch.tensor([0.0, 0.0, value]).nan_to_num(neginf=-math.inf, nan=-math.inf))
    assert one.mean == -math.inf and one.effective_sample_size == pytest.approx(2.0)


def test_a_draw_far_out_makes_no_other_weights_equal():
    torch.manual_seed(0)
    log_weights = torch.randn(2000)
    expected = pareto_smoothed(log_weights)
    log_weights[log_weights.argmin()] = -1e7
    found = pareto_smoothed(log_weights)
    assert found.khat == pytest.approx(expected.khat, abs=1e-6)
