# SPDX-License-Identifier: Apache-2.0
"""Shapes, expansion and gradients, which Implicit and SemiImplicit share; and what Implicit is."""

from __future__ import annotations

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_implicit import MLP, Implicit, SemiImplicit

NOISE, CONTEXT, VALUE = 3, 2, 5
BATCH_SHAPES = [(), (4,), (5, 4)]
SAMPLE_SHAPES = [(), (3,), (2, 3)]
KINDS = ["implicit", "semi_implicit"]


def make(kind: str, generator=None, noise=NOISE, **kwargs) -> Implicit:
    if generator is None:
        generator = MLP(NOISE, VALUE, context_dim=CONTEXT if "context" in kwargs else 0)
    if kind == "implicit":
        return Implicit(generator, noise, **kwargs)
    return SemiImplicit(generator, noise, scale=0.1, **kwargs)


def assert_rows_differ(value: Tensor, event_dim: int = 1) -> None:
    """Every element of the batch is a draw of its own."""
    rows = value.reshape((-1,) + value.shape[value.dim() - event_dim :]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("sample_shape", SAMPLE_SHAPES)
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("how", ["expand", "context", "noise", "expand_by"])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind, how, batch_shape, sample_shape):
    if how == "context":
        q = make(kind, context=torch.randn(batch_shape + (CONTEXT,)))
    elif how == "noise":
        q = make(kind, noise=dist.Normal(0.0, 1.0).expand(batch_shape + (NOISE,)).to_event(1))
    elif how == "expand":
        q = make(kind).expand(torch.Size(batch_shape))
    else:
        q = make(kind).expand_by(batch_shape)
    assert type(q) is (Implicit if kind == "implicit" else SemiImplicit)
    assert q.batch_shape == batch_shape and q.event_shape == (VALUE,)
    for draw in (q.rsample, q.sample, q):
        value = draw(torch.Size(sample_shape))
        assert value.shape == sample_shape + batch_shape + (VALUE,)
        assert value.requires_grad == (draw != q.sample)
        assert_rows_differ(value)
    noise, value, linearisation = q.draw(torch.Size(sample_shape))
    assert noise.shape == sample_shape + batch_shape + (NOISE,)
    assert q.generate(noise).shape == value.shape == sample_shape + batch_shape + (VALUE,)
    assert linearisation is None
    assert_rows_differ(noise)
    assert_rows_differ(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), (6,)])
@pytest.mark.parametrize(
    "noise_batch,context_batch", [((4,), ()), ((), (4,)), ((5, 1), (4,)), ((4,), (5, 1))]
)
def test_context_and_noise_broadcast(kind, noise_batch, context_batch, more):
    noise = dist.Normal(0.0, 1.0).expand(noise_batch + (NOISE,)).to_event(1)
    context = torch.randn(context_batch + (CONTEXT,))
    q = make(kind, noise=noise, context=context)
    assert q.batch_shape == torch.broadcast_shapes(noise_batch, context_batch)
    q = q.expand(more + q.batch_shape)
    noise, value, _ = q.draw((7,))
    assert_rows_differ(noise)
    # Each row has met the context of its own batch element.
    contexts = context.expand((7,) + q.batch_shape + (CONTEXT,)).reshape(-1, CONTEXT)
    rows = [q.generator(z, c) for z, c in zip(noise.view(-1, NOISE), contexts, strict=True)]
    torch.testing.assert_close(q.generate(noise), torch.stack(rows).view(value.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_plates_give_each_element_its_own_draw(kind):
    q = make(kind)
    context = torch.randn(10, CONTEXT)
    encoder = MLP(NOISE, VALUE, context_dim=CONTEXT)

    def guide():
        pyro.sample("outside", q)
        with pyro.plate("rows", 4, dim=-2):
            with pyro.plate("columns", 6, dim=-1):
                pyro.sample("inside", q)
        with pyro.plate("data", 10, subsample_size=3) as index:
            pyro.sample("local", make(kind, encoder, context=context[index]))
        with pyro.plate("pair", 2, dim=-1):
            pyro.sample("declared", q.expand_by([2]).to_event(1))

    trace = pyro.poutine.trace(guide).get_trace()
    shapes = {"outside": (5,), "inside": (4, 6, 5), "local": (3, 5), "declared": (2, 2, 5)}
    for name, shape in shapes.items():
        assert trace.nodes[name]["value"].shape == shape
        assert_rows_differ(trace.nodes[name]["value"])


@pytest.mark.parametrize("kind", KINDS)
def test_to_event(kind):
    q = make(kind).expand((5, 4))
    assert q.to_event(1).batch_shape == (5,) and q.to_event(1).event_shape == (4, VALUE)
    assert q.to_event(2).sample((3,)).shape == (3, 5, 4, VALUE)
    assert q.to_event(1).expand((6, 5)).sample().shape == (6, 5, 4, VALUE)
    assert_rows_differ(q.to_event(1).expand((6, 5)).sample())


class Reshape(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.linear = nn.Linear(NOISE, 6)
        self.shape = shape

    def forward(self, noise: Tensor) -> Tensor:
        return self.linear(noise).unflatten(-1, self.shape)


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "generator,event_shape",
    [
        (nn.Linear(NOISE, 6), (6,)),
        (nn.Sequential(nn.Linear(NOISE, 4), nn.ReLU(), nn.Linear(4, 2)), (2,)),
        (torch.sinh, (NOISE,)),
        (lambda z: z.sum(-1), ()),
        (Reshape(2, 3), (2, 3)),
        (Reshape(1, 2, 3), (1, 2, 3)),
    ],
    ids=["linear", "sequential", "function", "scalar", "matrix", "array"],
)
def test_event_shape_of_any_generator(generator, event_shape, kind, batch_shape):
    q = make(kind, generator).expand(batch_shape)
    assert q.event_shape == event_shape and q.event_dim == len(event_shape)
    value = q.rsample((2,))
    assert value.shape == (2,) + batch_shape + event_shape
    assert q.support.event_dim == len(event_shape)
    assert q.support.check(value).shape == (2,) + batch_shape


@pytest.mark.parametrize("kind", KINDS)
def test_one_function_for_noise_of_two_sizes(kind):
    def generator(noise: Tensor) -> Tensor:
        return noise.exp()

    assert make(kind, generator, 3).event_shape == (3,)
    assert make(kind, generator, 5).event_shape == (5,)


@pytest.mark.parametrize("kind", KINDS)
def test_support_and_reparameterisation(kind):
    q = make(kind)
    assert q.has_rsample and not q.has_enumerate_support
    assert q.support.event_dim == 1
    assert q.support.base_constraint is constraints.real


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_generator_and_context(kind):
    context = torch.randn(4, CONTEXT, requires_grad=True)
    q = make(kind, context=context).expand((6, 4))
    noise, value, _ = q.draw((2,))
    weight = torch.randn_like(value)
    inputs = [context, *q.generator.parameters()]
    found = torch.autograd.grad((weight * value).sum(), inputs)
    expected = torch.autograd.grad((weight * q.generate(noise)).sum(), inputs)
    torch.testing.assert_close(found, expected)
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_implicit_value_is_its_noise_generated():
    q = make("implicit", context=torch.randn(4, CONTEXT))
    noise, value, _ = q.draw((3,))
    assert q.generate(noise).equal(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies(kind, duplicate):
    q = make(kind, context=torch.randn(4, CONTEXT)).expand((6, 4))
    again = duplicate(q)
    assert type(again) is type(q) and again.batch_shape == (6, 4)
    torch.manual_seed(1)
    value = q.sample((2,))
    torch.manual_seed(1)
    assert again.sample((2,)).equal(value)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_after_a_draw(kind):
    q = make(kind)
    q.draw(linearise=True)
    values = []
    for each in (q, copy.deepcopy(q)):
        pyro.set_rng_seed(1)
        values.append(each.sample((2,)))
    assert values[0].equal(values[1])
