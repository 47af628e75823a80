# SPDX-License-Identifier: Apache-2.0
"""Slices against exact laws, and chains of HMC that go on with them at walls and jumps."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit, refine
from pyro_implicit.mcmc.kernels import slice_sampling
from pyro_implicit.mcmc.kernels.slice_sampling import Settings, SliceTuning
from pyro_implicit.mcmc.policy import DEFAULT, SlicePolicy

pytestmark = pytest.mark.usefixtures("double")

QUIET = {"seed": 0, "progress": False}


@pytest.mark.parametrize("num_directions", [1, 7])
def test_leaves_a_triangle_invariant(num_directions):
    """Uniform on 0 < x < y < 1, from exact draws: means 1/3 and 2/3, variances 1/18, cov 1/36."""
    start = torch.rand(40_000, 2).sort(-1).values

    def score(points):
        x, y = points.unbind(-1)
        inside = (x > 0) & (x < y) & (y < 1)
        return torch.where(inside, 0.0, -math.inf), torch.zeros_like(points)

    state = slice_sampling.init(start, score)
    for _ in range(3):
        state, info = slice_sampling.step(state, score, Settings(1.5, num_directions, 60))
    assert (state.position != start).all() and (info.acceptance == 1).all()
    assert info.num_gradients < 40 * num_directions + 60
    torch.testing.assert_close(
        state.position.mean(0), torch.tensor([1 / 3, 2 / 3]).double(), atol=0.006, rtol=0
    )
    expected = torch.tensor([[1 / 18, 1 / 36], [1 / 36, 1 / 18]]).double()
    torch.testing.assert_close(state.position.mT.cov(), expected, atol=0.0015, rtol=0)


def test_a_narrow_interval_reaches_an_exponential():
    """Log-density and gradient of the state are those of its position."""

    def score(points):
        inside = (points > 0).all(-1)
        return torch.where(inside, -points.sum(-1), -math.inf), -torch.ones_like(points)

    state = slice_sampling.init(torch.full((4000, 2), 3.0), score)
    for _ in range(200):
        state, _ = slice_sampling.step(state, score, Settings(1.0, 2, 60))
    assert torch.equal(state.log_density, score(state.position)[0])
    for moment, expected in ((1, 1.0), (2, 2.0)):
        found = state.position.pow(moment).mean(0)
        torch.testing.assert_close(found, torch.full((2,), expected), rtol=0.12, atol=0)


def test_a_chain_that_finds_no_point_stays():
    def score(points):  # nothing but the start has a density
        return torch.where((points == 0).all(-1), 0.0, -math.inf), torch.zeros_like(points)

    start = slice_sampling.init(torch.zeros(8, 3), score)
    state, info = slice_sampling.step(start, score, Settings(4.0, 2, 5))
    assert torch.equal(state.position, start.position) and (info.acceptance == 0).all()
    assert info.num_gradients == 10


def test_limits_of_a_transition():
    policy = SlicePolicy(num_directions=12, usual_shrinks=5)
    tuning = SliceTuning(policy)
    assert tuning.max_gradients == 60
    assert tuning.limited(20).settings(None).num_directions == 4
    assert tuning.limited(1).max_gradients == 5


def uniform(y):
    a = pyro.sample("a", dist.Exponential(0.1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Uniform(0.0, a), obs=y)


@pytest.mark.filterwarnings("ignore:the model's log-density is not finite")
def test_fit_of_a_bound_goes_on_with_slices():
    """The posterior of the bound is close to a Pareto law of the largest observation."""
    y = torch.linspace(0.1, 2.0, 30)
    result = fit(uniform, "auto", y, **QUIET)
    assert result.refined.kernel == "slice" and result.refined.settled
    a = result.sample(4000)["a"]
    assert (a > 2).all()
    # p(a | y) is a ** -30 * exp(-a / 10) for a > 2
    grid = torch.linspace(2.0, 6.0, 400_001)
    weights = (-30 * grid.log() - grid / 10).softmax(0)
    mean = (weights * grid).sum()
    sd = (weights * (grid - mean).square()).sum().sqrt()
    assert abs(a.mean() - mean) < 0.1 * sd
    assert 0.85 < a.std() / sd < 1.15


def test_stiff_smooth_densities_are_as_without_slices():
    def funnel():
        scale = pyro.sample("scale", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(3), scale.exp()).to_event(1))

    starts = {"scale": torch.randn(64), "x": torch.randn(64, 3)}
    options = {"frame": "full", "num_chains": 64, "max_gradients": 1500, **QUIET}
    found = refine(funnel, starts, **options)
    assert found.kernel == "hmc" and found.chains.adaptation.is_stiff
    never = refine(funnel, starts, policy=replace(DEFAULT, slice=SlicePolicy(max_dim=0)), **options)
    assert torch.equal(found.get_samples()["x"], never.get_samples()["x"])


def test_chains_with_discrete_latent_variables_keep_hmc():
    def model(y):
        number = pyro.sample("number", dist.Poisson(3.0))
        a = pyro.sample("a", dist.Exponential(0.1))
        pyro.sample("count", dist.Poisson(number + 1.0), obs=torch.tensor(4.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Uniform(0.0, a), obs=y)

    starts = {"number": torch.full((64,), 3.0), "a": 2.0 + torch.rand(64)}
    y = torch.linspace(0.1, 2.0, 30)
    result = refine(model, starts, y, num_chains=64, max_gradients=600, **QUIET)
    assert result.kernel == "hmc" and result.failed > DEFAULT.warmup.max_failed


def test_refine_with_slices_alone():
    y = torch.linspace(0.1, 2.0, 30)
    starts = {"a": 2.0 + torch.rand(64)}
    result = refine(uniform, starts, y, kernel="slice", num_chains=64, max_gradients=4000, **QUIET)
    assert result.kernel == "slice" and result.drift.r_hat < 1.08
    assert abs(result.get_samples()["a"].mean() - 2.0 * 29 / 28) < 0.02
    longer = result.refine_more(max_gradients=500, progress=False)
    assert longer.kernel == "slice" and longer.num_gradients > result.num_gradients
