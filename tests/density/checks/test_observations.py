# SPDX-License-Identifier: Apache-2.0
"""Observations that broadcasting repeats or that have a type without a density, and those meant."""

from __future__ import annotations

import contextlib
import math
import re

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import diagnose, refine
from pyro_implicit.density import Target

ROW, COLUMN = torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4)[:, None]


def regression(x, y, event_dim=0, plates=(4,)):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with contextlib.ExitStack() as stack:
        for dim, size in enumerate(reversed(plates), start=1):
            stack.enter_context(pyro.plate(f"rows{dim}", size, dim=-dim))
        pyro.sample("y", dist.Normal(slope * x, 1.0).to_event(event_dim), obs=y)


def in_column(shape, fn_shape, cure, plate="rows1"):
    where = f", where plate '{plate}' has 4" if plate else ""
    return re.escape(
        f"the observation of site 'y' has shape {shape}, but its distribution {fn_shape}: together "
        f"4 x 4 terms{where}. Cure: {cure}"
    )


REPEATED = [
    ((ROW, COLUMN), in_column((4, 1), (4,), "y.squeeze(-1), or parameters of the same shape; if")),
    ((COLUMN, ROW), in_column((4,), (4, 4), "parameters of shape (4,), for instance by .squeeze")),
    ((COLUMN, COLUMN), in_column((4, 1), (4, 4), "y.squeeze(-1), and .squeeze(-1) of the param")),
    ((ROW, COLUMN, 0, ()), in_column((4, 1), (4,), "y.squeeze(-1), or parameters of", plate="")),
    ((COLUMN, ROW, 0, ()), in_column((4,), (4, 1), "parameters of shape (4,), for", plate="")),
    ((COLUMN, ROW, 2, ()), in_column((4,), (4, 1), "parameters of shape (4,), for", plate="")),
    ((ROW, COLUMN, 1, ()), in_column((4, 1), (4,), "y.squeeze(-1), or parameters of", plate="")),
]


@pytest.mark.parametrize("args, message", REPEATED)
def test_repeated_observations_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        Target(regression, *args)


@pytest.mark.parametrize("function", [refine, diagnose])
def test_nothing_is_made_of_them(function):
    with pytest.raises(ValueError, match="the observation of site 'y' has shape .*together 4 x 4"):
        function(regression, AutoNormal(regression), ROW, COLUMN)


def test_a_mask_may_repeat_them_too():
    column = torch.ones(4, 1, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"its distribution \(4,\) and its mask \(4, 1\): together"
    ):
        Target(poutine.mask(regression, mask=column), ROW, ROW, 0, ())


def masked(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4):
        with poutine.mask(mask=y > 0), poutine.scale(scale=torch.full((4,), 2.0)):
            pyro.sample("one", dist.Normal(x, 1.0), obs=y)
        pyro.sample("two", dist.Normal(x, 1.0).mask(y > 0), obs=y)


def in_turn(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    for i in pyro.plate("rows", len(y)):
        pyro.sample(f"y{i}", dist.Normal(x.expand(3, 1), 1.0), obs=y.expand(3, 4))
    pyro.factor("some", -(x**2) * y[:, None])
    with pyro.plate("columns", 4):
        pyro.factor("others", -(x**2) * y)


def series(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    eye = scale * torch.eye(1)
    noise = dist.MultivariateNormal(torch.zeros(1), eye)
    with pyro.plate("series", 3):
        pyro.sample("many", dist.GaussianHMM(noise, eye, noise, eye, noise).expand([3]), obs=y)


def enumerated(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("rows", len(y)):
        which = pyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(x[which.long()], 1.0), obs=y)


def crossed(y):
    with pyro.plate("columns", 1, dim=-1), pyro.plate("rows", 4, dim=-2):
        pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=y)


@pytest.mark.parametrize(
    "model, args",
    [
        (regression, (torch.tensor(1.0), ROW)),
        (regression, (torch.tensor(1.0), ROW, 0, ())),
        (regression, (ROW, torch.tensor(1.0), 0, ())),
        (regression, (COLUMN, COLUMN, 0, ())),
        (regression, (COLUMN, COLUMN, 1)),
        (regression, (ROW, ROW[:1])),  # one value for the whole plate
        (regression, (torch.zeros(3), COLUMN.expand(4, 3), 1)),
        (regression, (torch.tensor(1.0), COLUMN.expand(4, 3), 0, (4, 3))),
        (regression, (COLUMN, torch.zeros(4, 3), 0, (4, 3))),
        (regression, (ROW, COLUMN.expand(3, 4, 4)[:, 0])),  # as many terms as observations
        (regression, (torch.ones(1, 1), torch.zeros(1), 0, (1,))),
        (masked, (ROW,)),
        (in_turn, (ROW,)),
        (series, (torch.zeros(5, 1),)),
        (enumerated, (ROW,)),
        (crossed, (COLUMN,)),
    ],
)
def test_other_shapes_that_are_meant(model, args):
    density = Target(model, *args)
    assert density.log_prob(density.init_loc.unsqueeze(0)).isfinite()


def test_minibatches():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 100, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    assert Target.of_minibatches(model, batch=(ROW,)).scaled
    assert math.isfinite(Target.of_minibatches(model, batch=(ROW[:1],)).init_loc)
    with pytest.raises(ValueError, match=r"shape \(4, 1\).*where plate 'rows' has 4"):
        Target.of_minibatches(model, batch=(COLUMN,))


def observing(fn, y):
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", fn(x.expand(3)), obs=y)

    return Target(model, y)


BERNOULLI = (lambda x: dist.Bernoulli(logits=x).to_event(1), "Bernoulli")
NORMAL = (lambda x: dist.Normal(x, 1.0).mask(torch.tensor(True)), "Normal")
CATEGORICAL = (lambda x: dist.Categorical(logits=x[:, None].expand(3, 2)), "Categorical")
HALVES = [0.5, 1.5, 2.5]
ZEROS, ONES = torch.zeros(3, dtype=torch.long), torch.tensor([True, False, True])
TENSOR = "but {} takes a tensor. Cure: torch.as_tensor(y{})"


@pytest.mark.parametrize(
    "fn, y, message",
    [
        (BERNOULLI, ONES, "torch.bool, but {} takes torch.float32. Cure: y.float()"),
        (BERNOULLI, ZEROS, "torch.int64, but {} takes torch.float32. Cure: y.float()"),
        (NORMAL, ONES, "torch.bool, but {} takes torch.float32. Cure: y.float()"),
        (NORMAL, np.array(HALVES), f"a NumPy array, {TENSOR}"),
        (NORMAL, HALVES, f"a list, {TENSOR}"),
        (CATEGORICAL, ZEROS.numpy(), f"a NumPy array, {TENSOR}"),
        (BERNOULLI, ZEROS.numpy(), f"a NumPy array, {TENSOR}"),
        (BERNOULLI, [True, False, True], f"a list, {TENSOR}"),
    ],
)
def test_observations_of_a_type_without_a_density(fn, y, message):
    make, kind = fn
    cast = kind == "Bernoulli" and not isinstance(y, torch.Tensor)
    message = message.format(kind, ", dtype=torch.float32" if cast else "")
    message = f"the observation of site 'y' is {message}"
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        observing(make, y)


def test_the_cure_is_of_the_default_type():
    torch.set_default_dtype(torch.float64)
    with pytest.raises(TypeError, match=r"Bernoulli takes torch.float64. Cure: y.double\(\)"):
        observing(BERNOULLI[0], ZEROS)


@pytest.mark.parametrize(
    "fn, y",
    [
        (CATEGORICAL[0], ZEROS),
        (CATEGORICAL[0], ONES),
        (NORMAL[0], ZEROS),
        (NORMAL[0], 1.0),
        (NORMAL[0], 1),
        (BERNOULLI[0], torch.ones(3)),
        (lambda x: dist.Poisson(x.exp()), ZEROS),
        (lambda x: dist.Poisson(x.exp()), ZEROS.int()),
        (lambda x: dist.Binomial(3, logits=x), ZEROS),
        (lambda x: dist.NegativeBinomial(3.0, logits=x), ZEROS),
        (lambda x: dist.BetaBinomial(x.exp(), 1.0, total_count=3), ZEROS),
        (lambda x: dist.OrderedLogistic(x, torch.tensor([-1.0, 1.0])), ZEROS),
        (lambda x: dist.Gamma(x.exp(), 1.0), np.array(HALVES)),
        (lambda x: dist.Gamma(x.exp(), 1.0), HALVES),
    ],
)
def test_types_that_pyro_takes(fn, y):
    density = observing(fn, y)
    assert density.log_prob(density.init_loc.unsqueeze(0)).isfinite()


def test_an_impossible_observation_is_none_of_another_type():
    for y in (torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0, 2.0])):
        with pytest.raises(ValueError, match="outside .* in 1 of 1 elements"):
            observing(lambda x: dist.LogNormal(x, 1.0).to_event(1), y)


@pytest.mark.parametrize(
    ("fn", "y", "message"),
    [
        (
            lambda x: dist.Categorical(x.exp().expand(3)),
            [1, 2, 3],
            "outside .*begin at 0",
        ),
        (lambda x: dist.Beta(2 + x.exp(), 3.0), [0.0, 0.5, 1.0], "edge of .* in 2 of 3 .*Cure"),
        (lambda x: dist.Normal(x, 1.0), [0.0, torch.inf], "infinite in 1 of 2 elements. Cure"),
    ],
)
def test_observations_without_a_density(fn, y, message):
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", fn(x), obs=y)

    with pytest.raises(ValueError, match=f"the observation of site 'y' is .*{message}"):
        Target(model, torch.tensor(y))


def test_observations_at_an_edge_with_a_density():
    def model(y):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Exponential(rate), obs=y)
            pyro.sample("share", dist.Beta(2.0, 2.0).mask(y > 0), obs=y)

    assert Target(model, torch.tensor([0.0, 0.3])).log_prob(torch.zeros(1, 1)).isfinite()


def test_missing_values_in_inputs_are_named():
    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = torch.tensor([1.0, torch.nan, 2.0])
    with pytest.raises(ValueError, match="argument 1 is NaN in 1 of 3 elements. Cure"):
        Target(model, x, torch.ones(3))
