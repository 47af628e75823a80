# SPDX-License-Identifier: Apache-2.0
"""Draws from elsewhere as a guide."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import Forecaster, ForecastingModel
from pyro.infer import Predictive, Trace_ELBO, WeighedPredictive
from pyro.infer.importance import psis_diagnostic

from pyro_implicit import LIVI_ELBO, compare, diagnose, evidence_bound, fit, refine
from pyro_implicit.guides import StoredDraws
from pyro_implicit.guides.sampler import SitePlates
from pyro_implicit.ops.score_estimators import stein_test


def model(y=None):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("pair", 2):
        z = pyro.sample("z", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def stored(num_draws):
    x = torch.randn(num_draws)
    return StoredDraws({"x": x, "z": x.unsqueeze(-1) + torch.tensor([1.0, 2.0])})


def in_plates(num_draws, model=model, *args):
    guide = stored(num_draws)
    trace = poutine.trace(model).get_trace(*args)
    return StoredDraws(guide.samples, plates=SitePlates.of(trace))


def test_all_sites_are_of_one_draw():
    torch.manual_seed(0)
    guide = stored(7)
    values = guide()
    torch.testing.assert_close(values["z"] - values["x"], torch.tensor([1.0, 2.0]))
    found = Predictive(model, guide=guide, num_samples=30)()
    difference = found["z"].reshape(30, 2) - found["x"].reshape(30, 1)
    torch.testing.assert_close(difference, torch.tensor([[1.0, 2.0]]).expand(30, 2))
    assert len(found["x"].unique()) > 4


@pytest.mark.parametrize("num_samples", [3, 7, 17])
def test_none_comes_twice_before_all_came(num_samples):
    guide = stored(7)
    draws = guide.sample_posterior(num_samples)
    counts = draws["x"].unique(return_counts=True)[1]
    assert draws["z"].shape == (num_samples, 2)
    assert counts.max() == -(-num_samples // 7) and len(counts) == min(num_samples, 7)


def test_fewer_draws_are_evenly_spaced():
    """Neighbours of a chain are correlated, and tests take draws for independent."""
    guide = StoredDraws({"x": torch.arange(1000.0)})
    found = guide.sample_posterior(150)["x"]
    gaps = found.sort().values.diff()
    assert gaps.min() == 6 and gaps.max() == 7
    assert (found.diff() < 0).double().mean() > 0.3  # in random order
    firsts = {int(guide.sample_posterior(10)["x"].min()) for _ in range(60)}
    assert len(firsts) > 30 and min(firsts) < 15 and 85 < max(firsts) < 100


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_correlated_chains_of_the_posterior_pass_the_kernel_test(correlation):
    """One draw in three has a correlated neighbour at random; evenly spaced draws have none."""
    torch.manual_seed(0)
    rejected = 0
    for _ in range(12):
        x = [torch.randn(64, 60)]
        for _ in range(47):
            fresh = (1 - correlation**2) ** 0.5 * torch.randn(64, 60)
            x.append(correlation * x[-1] + fresh)
        chains = torch.stack(x, 1).flatten(0, 1)
        draws = StoredDraws({"x": chains}, num_chains=64).sample_posterior(340)["x"]
        rejected += stein_test(draws, -draws, 400).p_value < 0.03
    assert rejected <= 3


def test_compared_as_any_guide():
    torch.manual_seed(1)
    one, other = stored(500), stored(500)
    y = torch.zeros(2)
    assert compare(model, one, other.samples, y).floor_ratio < 3


@pytest.mark.parametrize(
    "samples", [{}, {"x": torch.zeros(0)}, {"x": torch.zeros(2), "z": torch.zeros(3)}]
)
def test_refused(samples):
    with pytest.raises(ValueError, match="the same number of draws, at least one.*Cure: a dict"):
        StoredDraws(samples)


def test_a_density_is_refused():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(x.unsqueeze(-1) + torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    y = torch.zeros(2)
    guide = in_plates(7, model, y)
    for ask in (
        lambda: WeighedPredictive(model, guide=guide, num_samples=5)(y),
        lambda: psis_diagnostic(model, guide, y, num_particles=20, max_plate_nesting=1),
        lambda: Trace_ELBO().loss(model, guide, y),
        lambda: LIVI_ELBO(2).loss(model, guide, y),
        lambda: evidence_bound(model, guide, y, num_samples=5),
    ):
        with pytest.raises(ValueError, match="stored draws have no density.*Cure: the guide"):
            ask()


def test_what_asks_for_no_density_goes_on():
    guide, y = stored(500), torch.zeros(2)
    assert diagnose(model, guide, y, modes=None, num_transitions=0, progress=False).bound is None
    refined = refine(model, guide, y, max_gradients=100, seed=0, progress=False)
    assert refined.get_samples()["z"].shape[1:] == (2,)


@pytest.mark.parametrize("parallel", [True, False])
def test_predictions_have_their_own_draws(parallel):
    found = Predictive(model, guide=in_plates(500), num_samples=400, parallel=parallel)()
    assert found["x"].shape == (400, 1) and found["y"].shape == (400, 2)
    assert len(found["x"].unique()) > 200
    torch.testing.assert_close(found["z"] - found["x"], torch.tensor([[1.0, 2.0]]).expand(400, 2))


def test_draws_inside_plates():
    guide = in_plates(50)
    with pyro.plate("far", 3, dim=-3), pyro.plate("near", 4, dim=-2), poutine.trace() as trace:
        values = guide()
    assert values["x"].shape == (3, 4, 1) and values["z"].shape == (3, 4, 2)
    assert len(values["x"].unique()) > 5
    frames = [frame.name for frame in trace.trace.nodes["z"]["cond_indep_stack"]]
    assert sorted(frames) == ["far", "near", "pair"]
    with pyro.plate("on top", 3, dim=-1):
        with pytest.raises(ValueError, match="dimension of a plate of site 'z'. Cure: dim=-2"):
            guide()
    with pyro.plate("many", 3, dim=-2):
        with pytest.raises(ValueError, match="site 'x' cannot be selected inside a plate.*Cure"):
            stored(7)()


def test_sites_share_plates_and_have_events():
    def model():
        with pyro.plate("outer", 3, dim=-2), pyro.plate("inner", 2, dim=-1):
            pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("b", dist.Normal(torch.zeros(4), 1.0).to_event(1))

    samples = {"a": torch.randn(9, 3, 2), "b": torch.randn(9, 3, 2, 4)}
    guide = StoredDraws(samples, plates=SitePlates.of(poutine.trace(model).get_trace()))
    with pyro.plate("many", 5, dim=-3), poutine.trace() as trace:
        values = guide()
    assert values["a"].shape == (5, 3, 2) and values["b"].shape == (5, 3, 2, 4)
    assert trace.trace.nodes["b"]["fn"].event_shape == (4,)
    draws = poutine.trace(poutine.condition(model, values)).get_trace()
    assert draws.log_prob_sum().isfinite()


def test_forecasts_by_pyros_forecaster():
    """Pyro replays draws of the past, and draws the future from the model."""

    class Walk(ForecastingModel):
        def model(self, zero_data, covariates):
            bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
            with self.time_plate:
                drift = pyro.sample("drift", dist.Normal(0.0, 0.5))
            level = bias + drift.cumsum(-1)
            self.predict(dist.Normal(0.0, torch.tensor([0.1])), level.unsqueeze(-1))

    y, covariates, walk = torch.zeros(5, 1), torch.zeros(8, 0), Walk()
    result = fit(walk, "auto", y, covariates[:5], seed=0, progress=False)
    with pyro.validation_enabled(False):
        forecaster = Forecaster(walk, y, covariates[:5], guide=result.posterior, num_steps=0)
    found = forecaster(y, covariates, 4000).squeeze(-1)
    assert found.shape == (4000, 3)
    steps = torch.arange(1, 4)
    # The variance of the last level, .0096, is that of Kalman's filter in its steady state.
    sd = (0.0096 + 0.25 * steps + 0.01).sqrt()
    assert (found.mean(0) / sd).abs().max() < 4 / 4000**0.5
    assert (found.std(0) / sd - 1).abs().max() < 4 / 8000**0.5
