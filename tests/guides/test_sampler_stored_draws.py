# SPDX-License-Identifier: Apache-2.0
"""Draws from elsewhere as a guide."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO, WeighedPredictive
from pyro.infer.importance import psis_diagnostic

from pyro_implicit import LIVI_ELBO, compare, diagnose, evidence_bound, refine
from pyro_implicit.guides import StoredDraws
from pyro_implicit.ops.score_estimators import stein_test


def model(y=None):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("pair", 2):
        z = pyro.sample("z", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def stored(num_draws):
    x = torch.randn(num_draws)
    return StoredDraws({"x": x, "z": x.unsqueeze(-1) + torch.tensor([1.0, 2.0])})


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

    guide, y = stored(7), torch.zeros(2)
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
    with pyro.plate("many", 3, dim=-2), poutine.trace() as trace:
        guide()
    assert trace.trace.nodes["x"]["fn"].batch_shape == (3, 1)
