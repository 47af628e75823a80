# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal

from pyro_implicit.diagnostics import draw

SHAPES = {"scale": (), "weight": (2, 3), "local": (5,), "simplex": (5, 4)}


def model(data):
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with pyro.plate("data", len(data)):
        local = pyro.sample("local", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2 * local)
        pyro.sample("simplex", dist.Dirichlet(torch.ones(4)))
        pyro.sample("obs", dist.Normal(local, 1.0), obs=data)


def shapes(draws):
    return {name: tuple(value.shape[1:]) for name, value in draws.items()}


@pytest.mark.parametrize("autoguide", [AutoNormal, AutoMultivariateNormal, AutoDelta])
def test_autoguides_before_and_after_the_first_call(autoguide):
    guide = autoguide(model)
    draws = draw(guide, 7, torch.zeros(5))
    assert shapes(draws) == SHAPES
    assert all(len(value) == 7 and not value.requires_grad for value in draws.values())
    torch.testing.assert_close(draws["simplex"].sum(-1), torch.ones(7, 5))
    assert shapes(draw(guide, 3)) == SHAPES


def test_draws_share_no_memory_with_the_parameters():
    guide = AutoDelta(model)
    draws = draw(guide, 2, torch.zeros(5))
    before = guide.median()["weight"].clone()
    draws["weight"].fill_(9.0)
    torch.testing.assert_close(guide.median()["weight"], before, rtol=0, atol=0)


def test_coordinates_keep_their_places():
    guide = AutoNormal(model, init_scale=1e-3)
    guide(torch.zeros(5))
    with torch.no_grad():
        guide.locs.weight.copy_(torch.arange(6.0).reshape(2, 3))
        guide.locs.local.copy_(torch.arange(5.0))
    draws = draw(guide, 4)
    expected = {"weight": torch.arange(6.0).reshape(2, 3), "local": torch.arange(5.0)}
    for name, value in expected.items():
        torch.testing.assert_close(draws[name], value.expand_as(draws[name]), rtol=0, atol=0.01)
    assert (draws["weight"].std(dim=0) > 1e-4).all()


def test_hand_written_guide_that_does_not_broadcast():
    def guide(x):
        noise = pyro.sample("noise", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        z = pyro.sample("z", dist.Normal(torch.full((2,), noise.item()), 0.1).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("local", dist.Normal(z.sum() + x, 1.0))
        pyro.deterministic("ignored", z + 1)

    draws = draw(guide, 400, torch.zeros(3))
    assert shapes(draws) == {"z": (2,), "local": (3,)}
    # The noise is drawn afresh for each draw, and shared by the coordinates.
    assert 0.8 < draws["z"].std() < 1.2
    assert draws["z"].mT.corrcoef()[0, 1] > 0.9


def test_guide_list_with_users_code_inside():
    def part(data):
        z = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        assert z.dim() == 0

    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=["scale"])))
    guide.append(part)
    draws = draw(guide, 6, torch.zeros(5))
    assert shapes(draws) == SHAPES
    assert draws["scale"].unique().numel() == 6


def test_sample_posterior_is_used_where_offered():
    class Guide:
        def __call__(self, x):
            return pyro.sample("z", dist.Normal(0.0, 1.0))

        def sample_posterior(self, num_samples, x):
            return {"z": x.expand(num_samples)}

    torch.testing.assert_close(draw(Guide(), 3, torch.tensor(2.0))["z"], torch.full((3,), 2.0))


def test_leaves_an_outer_trace_alone():
    guide = AutoNormal(model)
    with poutine.trace() as outer:
        draw(guide, 3, torch.zeros(5))
    assert not [site for site in outer.trace.nodes.values() if site["type"] == "sample"]


def test_missing_arguments_are_named_with_the_cure():
    with pytest.raises(TypeError, match=r"AutoNormal could not run without .*'data'.*guide\(x, y"):
        draw(AutoNormal(model), 3)

    def guide(x):
        pyro.sample("z", dist.Normal(x, 1.0))

    with pytest.raises(
        TypeError, match=r"the guide guide could not run .*compare\(model, guide, mcmc"
    ):
        draw(guide, 3)
    with pytest.raises(TypeError, match="positional"):
        draw(guide, 3, 1.0, 2.0)
