# SPDX-License-Identifier: Apache-2.0
"""The implicit sites of a guide, as they are drawn."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_implicit import LIVI_ELBO, MLP, Implicit, InjectiveELBO, SemiImplicit
from pyro_implicit.infer.engine.traces import DrawMessenger

pytestmark = pytest.mark.usefixtures("double")


def guide():
    with pyro.plate("rows", 4):
        exp = dist.transforms.ExpTransform()
        pyro.sample("x", dist.TransformedDistribution(Implicit(MLP(3, 2), 3), [exp]))
    pyro.sample("z", SemiImplicit(nn.Linear(2, 2), 2, 0.1), infer={"latents": ["a", "b"]})
    pyro.sample("explicit", dist.Normal(0.0, 1.0))


def linearised(q):
    return q.draw(linearise=True)


def test_tells_what_made_each_value():
    with DrawMessenger(linearised, lambda site: None) as drawn:
        trace = poutine.trace(guide).get_trace()
    assert list(drawn.sites) == ["x", "z"]
    x, z = drawn.sites.values()
    assert x.draw is trace.nodes["x"]["value"] and z.draw is trace.nodes["z"]["value"]
    assert x.noise.shape == (4, 3) and x.value.shape == x.draw.shape == (4, 2)
    assert x.value.equal(x.linearisation.value)
    torch.testing.assert_close(x.draw, x.value.exp())
    torch.testing.assert_close(x.push(x.value), x.draw)
    torch.testing.assert_close(x.log_abs_det, x.value.sum(-1))
    assert x.batch_shape == (4,) and x.plates == {"rows"} and x.latents == ("x",)
    assert x.distribution.batch_shape == (4,) and isinstance(x.distribution, Implicit)
    assert z.latents == ("a", "b") and z.value is z.draw and z.log_abs_det == 0.0
    assert z.plates == frozenset()


def test_a_transported_value_takes_the_place_of_the_draw():
    def transport(site):
        return site.draw + 100.0 if site.name == "z" else None

    with DrawMessenger(lambda q: q.draw(), transport) as drawn:
        trace = poutine.trace(guide).get_trace()
    assert trace.nodes["x"]["value"] is drawn.sites["x"].draw
    assert trace.nodes["z"]["value"].equal(drawn.sites["z"].draw + 100.0)


def test_score_and_gradient_at_the_draw():
    """By the chain rule of the exponential, and without a transform unchanged."""
    with DrawMessenger(linearised, lambda site: None) as drawn:
        guide()
    x, z = drawn.sites.values()
    slope = torch.randn_like(x.value)
    torch.testing.assert_close(x.gradient_at_draw(slope), slope / x.draw.detach())
    torch.testing.assert_close(x.score_at_draw(slope), (slope - 1) / x.draw.detach())
    slope = torch.randn_like(z.value)
    assert z.gradient_at_draw(slope).equal(slope) and z.score_at_draw(slope).equal(slope)


def model():
    pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))


@pytest.mark.parametrize(
    "elbo", [LIVI_ELBO(1), LIVI_ELBO(3), InjectiveELBO(3)], ids=["livi", "livi-3", "injective-3"]
)
def test_refuses_a_value_that_was_given(elbo):
    kind = Implicit if isinstance(elbo, InjectiveELBO) else SemiImplicit
    options = {} if kind is Implicit else {"scale": 0.1}
    generator = nn.Linear(3, 3)

    def guide():
        pyro.sample("weights", kind(generator, 3, **options))

    with pytest.raises(ValueError, match=r"implicit site 'weights' of the guide was given.*Cure"):
        elbo.loss(model, poutine.replay(guide, poutine.trace(guide).get_trace()))
    elbo.loss(model, guide)
    with pytest.raises(ValueError, match="'weights'"), DrawMessenger(elbo.draw, lambda site: None):
        poutine.condition(guide, {"weights": torch.zeros(3)})()


def test_noise_of_the_step_reaches_the_method_with_its_gradient():
    """InjectiveELBO asks for a leaf where it differentiates in it, and for none in evaluation."""
    generator = MLP(3, 3)
    elbo = InjectiveELBO(2)
    assert elbo.draw(Implicit(generator, 3)).noise.requires_grad
    with torch.no_grad():
        assert not elbo.draw(Implicit(generator, 3)).linearisation.value.requires_grad
