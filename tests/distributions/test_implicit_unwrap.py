# SPDX-License-Identifier: Apache-2.0
"""Drawing through to_event and transforms, and what cannot be drawn through."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import transforms
from torch import nn

from pyro_implicit import Implicit, SemiImplicit
from pyro_implicit.distributions import Draw, draw_through, find_implicit

BATCH_SHAPES = [(), (4,), (5, 4)]

SLOPES = torch.tensor([2.0, -3.0, 0.5], dtype=torch.double)
TRANSFORMS = {
    "exp": lambda: [transforms.ExpTransform()],
    "affine": lambda: [transforms.AffineTransform(1.0, SLOPES)],
    "event_affine": lambda: [transforms.AffineTransform(1.0, SLOPES, event_dim=1)],
    "several": lambda: [
        transforms.AffineTransform(-1.0, 0.5),
        transforms.SigmoidTransform(),
        transforms.StickBreakingTransform(),
    ],
    "composed": lambda: [
        transforms.ComposeTransform(
            [transforms.AffineTransform(0.5, -2.0), transforms.ExpTransform()]
        )
    ],
}


def draw(q: Implicit) -> Draw:
    return q.draw()


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
    through = draw_through(q, draw)
    base, value = through.draw.value, through.value
    assert isinstance(through.distribution, Implicit)
    assert through.distribution is find_implicit(q)
    assert through.draw.noise.shape == batch_shape + (2,)
    assert base.shape == batch_shape + (3,)
    assert through.distribution.generate(through.draw.noise).equal(base)
    rebuilt = base
    for part in TRANSFORMS[name]():
        rebuilt = part(rebuilt)
    torch.testing.assert_close(value, rebuilt)
    assert value.shape == q.batch_shape + q.event_shape
    rebuilt = base
    for part in through.transforms:
        rebuilt = part(rebuilt)
    torch.testing.assert_close(value, rebuilt)
    # The same transforms of a distribution with a density show the change of variables.
    normal = dist.Normal(torch.zeros(3, dtype=torch.double), 1.0).expand(batch_shape + (3,))
    explicit = dist.TransformedDistribution(normal.to_event(1), TRANSFORMS[name]())
    expected = normal.to_event(1).log_prob(base) - explicit.log_prob(value)
    if event_dims:
        expected = expected.flatten(len(batch_shape) - event_dims).sum(-1)
    assert through.log_abs_det.shape == q.batch_shape
    torch.testing.assert_close(through.log_abs_det, expected)


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_exp_has_the_sum_of_its_values(batch_shape):
    q = dist.TransformedDistribution(implicit(), TRANSFORMS["exp"]()).expand(batch_shape)
    through = draw_through(q, draw)
    torch.testing.assert_close(through.log_abs_det, through.value.log().sum(-1))


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_without_transforms_there_is_no_log_abs_det(batch_shape):
    q = SemiImplicit(nn.Linear(2, 3), 2, 0.1).expand(batch_shape)
    for wrapped in (q, q.to_event(len(batch_shape)), q.to_event(0)):
        drawn = q.draw()
        through = draw_through(wrapped, lambda root: drawn)  # noqa: B023
        assert through.distribution is q and through.draw is drawn
        assert through.value is drawn.value
        assert through.log_abs_det == 0.0 and through.transforms == ()


def test_to_event_below_the_transform():
    base = implicit().expand((4,)).to_event(1)
    q = dist.TransformedDistribution(base, TRANSFORMS["exp"]()).expand((5,))
    through = draw_through(q, draw)
    assert through.draw.noise.shape == (5, 4, 2)
    torch.testing.assert_close(through.log_abs_det, through.value.log().sum((-1, -2)))


def test_in_a_plate_of_a_guide():
    def guide():
        with pyro.plate("plate", 4):
            pyro.sample("x", dist.TransformedDistribution(implicit(), TRANSFORMS["exp"]()))

    site = poutine.trace(guide).get_trace().nodes["x"]
    through = draw_through(site["fn"], draw)
    assert len(through.draw.noise.unique(dim=0)) == 4
    torch.testing.assert_close(through.log_abs_det, through.value.log().sum(-1))


def test_gradient_of_log_abs_det_reaches_the_generator():
    q = implicit()
    transformed = dist.TransformedDistribution(q, TRANSFORMS["exp"]())
    through = draw_through(transformed, draw)
    (found,) = torch.autograd.grad(through.log_abs_det, q.generator.weight)
    torch.testing.assert_close(found, through.draw.noise.expand(3, 2))


@pytest.mark.parametrize("cache_size", [0, 1])
def test_transforms_may_be_cached_or_not(cache_size):
    """The log-determinant belongs to this draw, whatever was drawn in between."""
    parts = [transforms.SigmoidTransform(cache_size=cache_size)]
    q = dist.TransformedDistribution(implicit(), parts).expand((4,))
    through = draw_through(q, draw)
    q.rsample()
    draw_through(q, draw)
    value = through.value
    torch.testing.assert_close(value, through.draw.value.sigmoid())
    torch.testing.assert_close(through.log_abs_det, (value * (1 - value)).log().sum(-1))


def test_far_in_the_tails_nothing_is_inverted():
    """A sigmoid that has reached 1 cannot be undone; its draw need not be."""
    q = Implicit(lambda z: 0.0 * z + 800.0, dist.Normal(torch.zeros(3).double(), 1).to_event(1))
    transformed = dist.TransformedDistribution(q, [transforms.SigmoidTransform()])
    found = draw_through(transformed, draw).log_abs_det
    torch.testing.assert_close(found, torch.tensor(-2400.0, dtype=torch.double))


def test_asks_the_root_alone_once():
    q = implicit()
    wrapped = dist.TransformedDistribution(q, TRANSFORMS["several"]()).expand((4,)).to_event(1)
    asked = []

    def count(root):
        asked.append(root)
        return root.draw(linearise=True)

    through = draw_through(wrapped, count)
    assert asked == [through.distribution]
    assert through.draw.linearisation.value.equal(through.draw.value)


def test_refuses_other_wrappers():
    q = implicit().expand((4,))
    for wrapped in (q.mask(torch.ones(4, dtype=torch.bool)), q.mask(False).to_event(1)):
        with pytest.raises(ValueError, match=r"inside MaskedDistribution.*mask by pyro\.poutine"):
            draw_through(wrapped, draw)
    with pytest.raises(ValueError, match="inside Normal"):
        draw_through(dist.Normal(0.0, 1.0), draw)


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
