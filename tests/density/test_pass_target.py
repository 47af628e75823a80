# SPDX-License-Identifier: Apache-2.0
"""The density of all rows as a sum over minibatches."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit.density import Target, pass_target
from pyro_implicit.density.pass_target import RowsTarget
from pyro_implicit.density.policy import GROUPS
from pyro_implicit.fitting.passes import OnePass
from pyro_implicit.runtime.minibatches import BatchStream

NUM_ROWS = 23


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_ROWS, 2, generator=generator, dtype=torch.float64)
    return x, torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)


def regression(power, x, y):
    """Uses an argument that all minibatches share, and data outside of the plate."""
    zeros = x.new_zeros(2)
    weights = pyro.sample("weights", dist.Normal(zeros, 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(zeros[0], 1.0))
    pyro.sample("known", dist.Normal(weights.sum(), noise), obs=zeros[0] + 0.5)
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weights, noise**power), obs=y)


def target_of(batches):
    return RowsTarget(Target.of_minibatches(regression, 2.0, batch=batches[0]), batches)


def split(*sizes):
    return list(zip(*(part.split(sizes) for part in data()), strict=True))


@pytest.mark.parametrize("sizes", [(23,), (5, 7, 1, 10)])
def test_the_density_is_that_of_all_rows(sizes):
    """Value, score and Hessian, also if minibatches differ in size."""
    target, whole = target_of(split(*sizes)), Target(regression, 2.0, *data())
    points = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
    for found, expected in zip(target.derivatives(points), whole.derivatives(points), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(target.score(points), whole.score(points), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(target.sums(points), whole.log_prob(points), atol=1e-9, rtol=1e-9)
    assert target.num_passes == 3 and target.num_units == target.num_evaluations == NUM_ROWS


def test_centred_densities_keep_their_differences():
    target, whole = target_of(split(11, 12)), Target(regression, 2.0, *data())
    points = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
    target.centre(points[0])
    expected = whole.log_prob(points)
    torch.testing.assert_close(target.log_prob(points), expected - expected[0])
    assert target.height(target.log_prob(points[1:])) == pytest.approx(expected[1].item())


def test_missing_rows_are_scaled_to_the_size_of_the_plate():
    """The likelihood of 15 rows, whose plate has 23, counts 23 / 15 times; the prior once."""
    x, y = data()
    target, point = target_of([(x[:10], y[:10]), (x[10:15], y[10:15])]), torch.zeros(1, 3).double()
    rows = dist.Normal(0.0, 1.0).log_prob(y)
    prior = Target(regression, 2.0, x, y).log_prob(point) - rows.sum()
    expected = prior + NUM_ROWS / 15 * rows[:15].sum()
    torch.testing.assert_close(target.log_prob(point), expected)


def in_a_dict(data):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(data["y"])):
        pyro.sample("y", dist.Normal(w, 1.0), obs=data["y"])


def scaled_by_a_number(y, number):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    padded = torch.nn.functional.pad(y, (0, 12 - len(y)))
    is_row = torch.arange(12) < number
    with poutine.scale(scale=NUM_ROWS / number), pyro.plate("rows", 12):
        pyro.sample("y", dist.Normal(w, 1.0).mask(is_row), obs=padded)


def weighted(y, weights):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(y)), poutine.scale(scale=weights):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "arguments", "weights"),
    [
        (in_a_dict, lambda y: ({"y": y},), 1.0),
        (scaled_by_a_number, lambda y: (y, len(y)), 1.0),
        (weighted, lambda y: (y, y.exp()), data()[1].exp()),
    ],
)
def test_rows_count_equally_whatever_the_arguments(model, arguments, weights):
    """Minibatches of 12, 7 and 4 rows; the model's weights of rows are none of the minibatches'."""
    y = data()[1]
    batches = [arguments(part) for part in y.split((12, 7, 4))]
    target = RowsTarget(Target.of_minibatches(model, batch=batches[0]), batches)
    points = torch.tensor([[0.0], [1.5]]).double()
    rows = dist.Normal(points, 1.0).log_prob(y) * weights
    expected = dist.Normal(0.0, 1.0).log_prob(points.squeeze(-1)) + rows.sum(-1)
    torch.testing.assert_close(target.sums(points), expected, atol=1e-5, rtol=0)
    by_site = target.log_prob_by_site({"w": points.squeeze(-1)})
    torch.testing.assert_close(by_site, expected, atol=1e-5, rtol=0)


def test_rows_are_those_of_the_plate():
    """Not the longest dimension of an argument."""

    def model(x, table):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 6, subsample_size=x.shape[1]):
            pyro.sample("y", dist.Normal(w, table[0]).expand([28]).to_event(1), obs=x.mT)

    batches = [(torch.zeros(28, size), torch.ones(50)) for size in (2, 4)]
    target = RowsTarget(Target.of_minibatches(model, batch=batches[0]), batches)
    target.sums(torch.zeros(1, 1))
    assert target.num_units == 6


def test_all_minibatches_are_evaluated_in_double_precision():
    def model(y):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 5.0))
        with pyro.plate("rows", 4, subsample_size=len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    batches = [(torch.tensor([1e6]),), (torch.tensor([1.1e6, 1e6, 9e5]),)]
    exact = [tuple(part.double() for part in batch) for batch in batches]
    points = torch.tensor([[13.8], [13.81]])
    expected = RowsTarget(Target.of_minibatches(model, batch=exact[0]), exact).sums(points.double())
    target = RowsTarget(Target.of_minibatches(model, batch=batches[0]), batches)
    assert (target.sums(points) - expected).abs().max() > 0.1  # rounding
    torch.testing.assert_close(target.in_double().sums(points.double()), expected)
    assert target.widen(points) and target.is_wide
    torch.testing.assert_close(target.sums(points), expected)


def test_impossible_points():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4, subsample_size=len(y)):
            pyro.sample("y", dist.Uniform(-1.0, x.exp()), obs=y)

    batches = [(torch.full((2,), 0.5),), (torch.full((2,), 2.0),)]
    target = RowsTarget(Target.of_minibatches(model, batch=batches[0]), batches)
    log_prob, score = target.score(torch.tensor([[0.0], [1.0]]))
    assert log_prob.isfinite().tolist() == [False, True] and score.isfinite().all()


def test_few_vectors_at_a_time_give_the_same_sums(monkeypatch):
    expected = target_of(split(11, 12)).derivatives(torch.eye(3).double())
    monkeypatch.setattr(pass_target, "GROUPS", replace(GROUPS, elements_at_once=24))
    found = target_of(split(11, 12)).derivatives(torch.eye(3).double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_seconds_are_those_of_a_pass():
    first = Target.of_minibatches(regression, 2.0, batch=split(5, 18)[0])
    seconds = first.seconds()  # which this target remembers
    assert RowsTarget(first, split(*[1] * 23)).seconds() > 5 * seconds


def test_runs_of_one_vector_at_a_time_cost_more_than_their_rows():
    def branching(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        scale = float(x) ** 2 + 1  # no operation of vmap
        with pyro.plate("rows", 4, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, scale), obs=y)

    batches = [(torch.zeros(1),), (torch.ones(3),)]
    target = RowsTarget(Target.of_minibatches(branching, batch=batches[0]), batches)
    with pytest.warns(UserWarning, match="one particle at a time"):
        target.sums(torch.zeros(1, 1))
    assert target.num_units == 4 and target.num_evaluations == 2 * GROUPS.rows_of_run


def test_each_pass_has_all_rows():
    """An iteration that ends early leaves a shuffled loader within a pass."""
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True)
    batches = OnePass(BatchStream(loader))
    for _ in range(3):
        for index, _ in enumerate(batches):
            if index == 2:
                break
        assert torch.cat([rows for (rows,) in batches]).sort().values.tolist() == list(range(20))
