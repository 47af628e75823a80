# SPDX-License-Identifier: Apache-2.0
"""What is data, of all that Pyro marks as observed."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, init_to_mean
from pyro.infer.reparam import LocScaleReparam

from pyro_implicit.density.target import Target
from pyro_implicit.fitting import HeldOut
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.sites import is_data


def everything(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("tilt", -x.square())
    with pyro.plate("rows", 6, subsample_size=len(y)):
        pyro.deterministic("twice", 2 * x.expand(len(y)))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    pyro.param("learnt", torch.tensor(1.0))


def test_deterministic_sites_and_what_is_computed_are_none():
    non_centred = poutine.reparam(everything, config={"x": LocScaleReparam(0.0)})
    for one in (everything, non_centred):
        nodes = poutine.trace(one).get_trace(torch.zeros(2)).nodes
        assert [name for name, site in nodes.items() if is_data(site)] == ["tilt", "y"]
        assert [n for n, site in nodes.items() if is_data(site, factors=False)] == ["y"]


@pytest.mark.parametrize("config", [{}, {"x": LocScaleReparam(0.0)}])
def test_held_out_rows_are_those_of_the_data_alone(config):
    @poutine.reparam(config=config)
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 100, subsample_size=len(y)):
            pyro.deterministic("twice", 2 * x.expand(len(y)))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoDelta(model, init_loc_fn=init_to_mean)
    score = HeldOut(model, torch.zeros(20).split(5))(guide)
    assert score == pytest.approx(0.91894, abs=1e-5)


def test_a_scaled_site_that_is_no_data_scales_none():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("columns", 9, subsample_size=3):
            pyro.deterministic("thrice", x.expand(3))
        pyro.sample("y", dist.Normal(x, 1.0).expand(y.shape).to_event(1), obs=y)

    density = Target.of_minibatches(model, batch=(torch.zeros(2),))
    assert not density.scaled and density.subsampled is None


def test_a_guide_may_be_reparameterised():
    def guide():
        pyro.sample("x", dist.Normal(torch.tensor(1.0), 2.0))

    non_centred = poutine.reparam(guide, config={"x": LocScaleReparam(0.0)})
    assert draw(non_centred, 3)["x_decentered"].shape == (3,)
