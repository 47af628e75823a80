# SPDX-License-Identifier: Apache-2.0
"""Posteriors of a part of the rows, and of all rows as one pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.density import row_pilot
from pyro_implicit.density.pass_target import WholeTarget
from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.row_pilot import find_pilot, largest_num_rows
from pyro_implicit.density.target import Target

NUM_ROWS, FEW = 600, 100


def regression(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, noise), obs=y)


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, NUM_ROWS, generator=generator, dtype=dtype)
    return x, 0.7 * x + 0.5 * noise


def mixture(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        sign = pyro.sample("sign", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal((2 * sign - 1) * slope * x, noise), obs=y)


def without_plate(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    pyro.sample("y", dist.Normal(slope * x, noise).to_event(1), obs=y)


@pytest.mark.parametrize("model", [regression, mixture, without_plate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_row_of_the_pilot_counts_for_many(model, dtype):
    """Its rows are rows of the data, in equal pairs; the prior counts once."""
    data = rows(dtype)
    pilot = find_pilot(Target(model, *data, sample_discrete=True), FEW)
    x, y = pilot.args
    found = {tuple(pair) for pair in torch.stack([x, y], -1).tolist()}
    assert len(found) == FEW and found <= {tuple(p) for p in torch.stack(data, -1).tolist()}
    point = torch.tensor([[0.3, -0.2]], dtype=dtype)

    def log_prob(*part):
        return Target(model, *part).log_prob(point)

    prior = log_prob(x[:50], y[:50]) + log_prob(x[50:], y[50:]) - log_prob(x, y)
    expected = prior + NUM_ROWS / FEW * (log_prob(x, y) - prior)
    torch.testing.assert_close(pilot.log_prob(point), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_another_plate_count_once():
    def both(x, y, others):
        regression(x, y)
        with pyro.plate("others", len(others)):
            pyro.sample("other", dist.Normal(0.0, 1.0), obs=others)

    x, y = rows()
    pilot = find_pilot(Target(both, x, y, torch.ones(7)), FEW)
    alone = find_pilot(Target(regression, x, y), FEW)
    point = torch.tensor([[0.3, -0.2]])
    gain = pilot.log_prob(point) - alone.log_prob(point)
    torch.testing.assert_close(gain, dist.Normal(0.0, 1.0).log_prob(torch.ones(7)).sum()[None],
                               atol=1e-2, rtol=0)  # fmt: skip


def test_rows_in_keywords_arrays_and_dicts():
    x, y = rows()

    def of_dict(data):
        regression(data["x"], data["y"])

    def of_arrays(x, y):
        regression(torch.as_tensor(x), torch.as_tensor(y))

    for target in (
        Target(regression, x, y=y),
        Target(of_dict, {"x": x, "y": y}),
        Target(of_arrays, x.numpy(), np.asarray(y)),
        Target(poutine.scale(regression, 0.5), x, y),
    ):
        assert largest_num_rows(target) == NUM_ROWS
        pilot = find_pilot(target, FEW)
        assert largest_num_rows(pilot) == FEW


def autoregression(y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("steps", len(y) - 1):
        pyro.sample("y", dist.Normal(slope * y[:-1], 1.0), obs=y[1:])


def centred(x, y):
    regression(x - x.mean(), y)


def scaled(x, y):
    with poutine.scale(scale=NUM_ROWS / len(x)):
        regression(x, y)


def random(x, y):
    regression(x + torch.randn(len(x)), y)


def plate_of_all(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", NUM_ROWS):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def closed_over(x):
    regression(x, rows()[1])


@pytest.mark.parametrize(
    ("model", "number"),
    [(autoregression, 1), (centred, 2), (scaled, 2), (plate_of_all, 2), (closed_over, 1)],
)
def test_no_pilot_of_rows_that_are_no_product(model, number):
    """Time series, statistics of all rows, likelihoods of minibatches, and data without rows."""
    assert find_pilot(Target(model, *rows()[:number]), FEW) is None


def test_no_pilot_of_random_models_and_of_few_rows():
    target = Target.of_minibatches(random, batch=rows())
    assert find_pilot(target, FEW) is None
    assert find_pilot(Target(regression, *rows()), NUM_ROWS // 2 + 1) is None
    assert find_pilot(Target(lambda: regression(torch.ones(2), torch.ones(2))), FEW) is None


def test_no_pilot_that_cannot_be_evaluated():
    """A random height leaves all rises alone, but the search would refuse the model."""

    def random_for_few_rows(x, y):
        regression(x, y)
        if len(x) == FEW:
            pyro.factor("height", torch.randn(()))

    target = Target(random_for_few_rows, *rows())
    parts = torch.arange(2 * FEW).split(FEW)
    assert row_pilot._factorises(target, parts, NUM_ROWS)
    assert find_pilot(target, FEW) is None


@pytest.mark.parametrize(("height", "is_large"), [(20.0, False), (2e4, True)])
def test_rounding_in_single_precision_is_no_dependence_of_rows(height, is_large, monkeypatch):
    """A model that mixes dtypes; rounding errors of its sums grow with the height of each row."""

    def tall(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        loc = (x.unsqueeze(-1) @ torch.ones(1, 1)).squeeze(-1) * slope
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
            pyro.factor("height", height * (1 + 0.05 * x) + 0.0 * loc)

    target = Target(tall, *rows())
    assert find_pilot(target, FEW) is not None
    monkeypatch.setattr(row_pilot, "RUNS", replace(RUNS, rounding=0.0))
    assert (find_pilot(target, FEW) is None) == is_large


def test_a_pilot_advances_no_stream():
    target = Target(regression, *rows())
    before = torch.get_rng_state()
    find_pilot(target, FEW)
    assert torch.equal(before, torch.get_rng_state())


def test_all_rows_as_one_pass():
    """Values and derivatives are those of the posterior; centred ones lack its height."""
    data = rows(torch.float64)
    target = Target(regression, *data)
    whole = WholeTarget(target, NUM_ROWS)
    points = torch.tensor([[0.3, -0.2], [0.6, -0.7]], dtype=torch.float64)
    for found, expected in zip(whole.derivatives(points), target.derivatives(points), strict=True):
        torch.testing.assert_close(found, expected)
    assert whole.num_units == NUM_ROWS and whole.num_passes > 0
    whole.centre(points[0])
    heights = target.log_prob(points)
    torch.testing.assert_close(whole.log_prob(points), heights - heights[0])
    assert whole.height(whole.log_prob(points)[1]) == pytest.approx(heights[1].item())


def test_one_pass_widens_its_posterior():
    whole = WholeTarget(Target(regression, *rows()), NUM_ROWS)
    assert not whole.is_wide and whole.widen(torch.zeros(1, 2)) and whole.is_wide
    assert whole.log_prob(torch.zeros(1, 2)).dtype == torch.float32
