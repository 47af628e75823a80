# SPDX-License-Identifier: Apache-2.0
"""A Gaussian put into Pyro's full-rank guide."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_implicit.fitting.candidates import gaussian_guide
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.affine_frame import gaussian_frame


def model(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), (2,)))
    pyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)


def gaussian(dtype):
    loc = torch.tensor([0.3, -2.0, 1e4], dtype=dtype)
    scale_tril = torch.tensor([[1e-3, 0.0, 0.0], [3.0, 0.5, 0.0], [-2e4, 7.0, 1e5]], dtype=dtype)
    return loc, scale_tril


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_guide_is_the_gaussian(dtype):
    torch.set_default_dtype(dtype)
    loc, scale_tril = gaussian(dtype)
    kept = loc.clone(), scale_tril.clone()
    guide = gaussian_guide(model, loc, scale_tril, torch.zeros(2))
    posterior = guide.get_posterior()
    torch.testing.assert_close(posterior.loc, loc)
    torch.testing.assert_close(posterior.scale_tril, scale_tril)
    points = loc + torch.randn(5, 3) @ scale_tril.T
    expected = dist.MultivariateNormal(loc, scale_tril=scale_tril).log_prob(points)
    torch.testing.assert_close(posterior.log_prob(points), expected, rtol=1e-4, atol=1e-3)
    # It takes copies: neither training nor the guide's own values touch what was given.
    with torch.no_grad():
        guide.loc.add_(1.0)
        guide.scale_unconstrained.add_(1.0)
    assert torch.equal(loc, kept[0]) and torch.equal(scale_tril, kept[1])


def test_draws_have_its_moments():
    torch.set_default_dtype(torch.float64)
    loc, scale_tril = torch.tensor([0.5, -1.0, 2.0]), torch.eye(3) * 0.5
    scale_tril[2, 0] = 0.8
    guide = gaussian_guide(model, loc, scale_tril, y=torch.zeros(2))
    with pyro.plate("draws", 4000):
        draws = guide(torch.zeros(2))
    # The plate lies left of the event of x.
    points = torch.cat([draws["scale"].log().reshape(4000, 1), draws["x"].reshape(4000, 2)], -1)
    torch.testing.assert_close(points.mean(0), loc, rtol=0, atol=0.06)
    torch.testing.assert_close(points.T.cov(), scale_tril @ scale_tril.T, rtol=0, atol=0.08)


def test_it_can_be_a_frame_and_be_trained():
    loc, scale_tril = torch.tensor([0.5, -1.0, 2.0]), torch.eye(3) * 0.5
    scale_tril[2, 0] = 0.8
    y = torch.tensor([1.0, 3.0])
    guide = gaussian_guide(model, loc, scale_tril, y)
    frame = gaussian_frame(guide, ["scale", "x"], y)
    assert torch.equal(frame.loc, loc) and frame.scale is None
    torch.testing.assert_close(frame.scale_tril, scale_tril)
    implicit = AutoImplicit(model, frame=guide)
    implicit(y)
    torch.testing.assert_close(implicit.frame_loc.detach(), loc)
    assert (implicit.loc == 0).all() and (implicit.scale == 1).all()
    before = guide.loc.detach().clone()
    SVI(model, guide, ClippedAdam({"lr": 0.1}), Trace_ELBO()).step(y)
    assert (guide.loc != before).all()


def test_handlers_outside_do_not_see_it():
    with poutine.trace() as tracer:
        gaussian_guide(model, torch.zeros(3), torch.eye(3), torch.zeros(2))
    assert not [site for site in tracer.trace.nodes.values() if site["type"] == "sample"]


def test_two_guides_keep_their_own_values():
    guides = [
        gaussian_guide(model, torch.full((3,), m), torch.eye(3), torch.zeros(2)) for m in (1.0, 2.0)
    ]
    assert [guide.loc[0].item() for guide in guides] == [1.0, 2.0]
    assert [guide.get_posterior().loc[0].item() for guide in guides] == [1.0, 2.0]
