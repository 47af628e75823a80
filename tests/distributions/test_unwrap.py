# SPDX-License-Identifier: Apache-2.0
"""Taking draws apart: to_event, transforms, and what cannot be unwrapped."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import transforms
from torch import nn

from pyro_implicit import Implicit, SemiImplicit
from pyro_implicit.distributions import find_implicit, unwrap_draw

BATCH_SHAPES = [(), (4,), (5, 4)]

SLOPES = torch.tensor([2.0, -3.0, 0.5], dtype=torch.double)
TRANSFORMS = {
    "exp": lambda: [transforms.ExpTransform(cache_size=1)],
    "affine": lambda: [transforms.AffineTransform(1.0, SLOPES, cache_size=1)],
    "event_affine": lambda: [transforms.AffineTransform(1.0, SLOPES, event_dim=1, cache_size=1)],
    "several": lambda: [
        transforms.AffineTransform(-1.0, 0.5, cache_size=1),
        transforms.SigmoidTransform(cache_size=1),
        transforms.StickBreakingTransform(cache_size=1),
    ],
    "composed": lambda: [
        transforms.ComposeTransform(
            [transforms.AffineTransform(0.5, -2.0), transforms.ExpTransform()], cache_size=1
        )
    ],
}


def implicit() -> Implicit:
    return Implicit(nn.Linear(2, 3, dtype=torch.double), 2)


@pytest.mark.parametrize(
    "batch_shape,event_dims",
    [(shape, dims) for shape in BATCH_SHAPES for dims in range(len(shape) + 1)],
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_log_abs_det_by_hand(name, batch_shape, event_dims):
    parts = TRANSFORMS[name]()
    q = dist.TransformedDistribution(implicit(), parts).expand(batch_shape).to_event(event_dims)
    value = q.rsample()
    draw = unwrap_draw(q, value)
    assert isinstance(draw.distribution, Implicit) and draw.distribution is find_implicit(q)
    assert draw.noise.shape == batch_shape + (2,)
    assert draw.value.shape == batch_shape + (3,)
    assert draw.distribution.generate(draw.noise).equal(draw.value)
    rebuilt = draw.value
    for part in TRANSFORMS[name]():
        rebuilt = part(rebuilt)
    torch.testing.assert_close(rebuilt, value)
    # The same transforms of a distribution with a density show the change of variables.
    base = dist.Normal(torch.zeros(3, dtype=torch.double), 1.0).expand(batch_shape + (3,))
    explicit = dist.TransformedDistribution(base.to_event(1), TRANSFORMS[name]())
    expected = base.to_event(1).log_prob(draw.value) - explicit.log_prob(value)
    if event_dims:
        expected = expected.flatten(len(batch_shape) - event_dims).sum(-1)
    assert draw.log_abs_det.shape == q.batch_shape
    torch.testing.assert_close(draw.log_abs_det, expected)


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_exp_has_the_sum_of_its_values(batch_shape):
    q = dist.TransformedDistribution(implicit(), TRANSFORMS["exp"]()).expand(batch_shape)
    value = q.rsample()
    torch.testing.assert_close(unwrap_draw(q, value).log_abs_det, value.log().sum(-1))


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_without_transforms_there_is_no_log_abs_det(batch_shape):
    q = SemiImplicit(nn.Linear(2, 3), 2, 0.1).expand(batch_shape)
    for wrapped in (q, q.to_event(len(batch_shape)), q.to_event(0)):
        value = wrapped.rsample()
        draw = unwrap_draw(wrapped, value)
        assert draw.distribution is q
        assert draw.value is value
        assert draw.noise is q.noise_of(value)
        assert draw.log_abs_det == 0.0


def test_to_event_below_the_transform():
    base = implicit().expand((4,)).to_event(1)
    q = dist.TransformedDistribution(base, TRANSFORMS["exp"]()).expand((5,))
    value = q.rsample()
    draw = unwrap_draw(q, value)
    assert draw.noise.shape == (5, 4, 2)
    torch.testing.assert_close(draw.log_abs_det, value.log().sum((-1, -2)))


def test_in_a_plate_of_a_guide():
    def guide():
        with pyro.plate("plate", 4):
            pyro.sample("x", dist.TransformedDistribution(implicit(), TRANSFORMS["exp"]()))

    site = poutine.trace(guide).get_trace().nodes["x"]
    draw = unwrap_draw(site["fn"], site["value"])
    assert len(draw.noise.unique(dim=0)) == 4
    torch.testing.assert_close(draw.log_abs_det, site["value"].log().sum(-1))


def test_gradient_of_log_abs_det_reaches_the_generator():
    q = implicit()
    transformed = dist.TransformedDistribution(q, TRANSFORMS["exp"]())
    draw = unwrap_draw(transformed, transformed.rsample())
    (found,) = torch.autograd.grad(draw.log_abs_det, q.generator.weight)
    torch.testing.assert_close(found, draw.noise.expand(3, 2))


def test_transforms_must_be_cached():
    q = dist.TransformedDistribution(implicit(), [transforms.ExpTransform()])
    with pytest.raises(ValueError, match="build each with cache_size=1"):
        unwrap_draw(q, q.rsample())


def test_knows_the_last_draw_alone():
    q = dist.TransformedDistribution(implicit(), TRANSFORMS["exp"]())
    value = q.rsample()
    with pytest.raises(ValueError, match="this tensor is another one"):
        unwrap_draw(q, value.clone())
    q.rsample()
    with pytest.raises(ValueError, match="this tensor is another one"):
        unwrap_draw(q, value)


def test_refuses_other_wrappers():
    q = implicit().expand((4,))
    for wrapped in (q.mask(torch.ones(4, dtype=torch.bool)), q.mask(False).to_event(1)):
        with pytest.raises(ValueError, match=r"inside MaskedDistribution.*mask by pyro\.poutine"):
            unwrap_draw(wrapped, wrapped.rsample())
    with pytest.raises(ValueError, match="inside Normal"):
        unwrap_draw(dist.Normal(0.0, 1.0), torch.zeros(()))


def test_find_implicit():
    q = implicit().expand((4,))
    transformed = dist.TransformedDistribution(q, TRANSFORMS["exp"]())
    for wrapped in (q, q.to_event(1), q.mask(False), transformed, transformed.to_event(1)):
        found = find_implicit(wrapped)
        assert isinstance(found, Implicit)
    assert find_implicit(q) is q and find_implicit(q.to_event(1)) is q
    base = dist.Normal(torch.zeros(4, 3), 1.0)
    explicit = dist.TransformedDistribution(base, TRANSFORMS["exp"]())
    for fn in (base, base.to_event(1), base.mask(False), explicit, dist.Delta(torch.zeros(3))):
        assert find_implicit(fn) is None
