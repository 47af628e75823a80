# SPDX-License-Identifier: Apache-2.0
"""``fit`` of networks with unusual data: the right result, or an error that names the cure."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import fit
from pyro_implicit.fitting import FitPolicy, NetworkPolicy
from pyro_implicit.nn import classifier, predict, regressor, to_bayesian_

POLICY = FitPolicy(
    network=NetworkPolicy(
        num_members=3,
        cost_ratio=1.0,
        training_seconds=0.3,
        chain_seconds=1e3,
        most_gradients=200,
        least_held_out=4,
    )
)
LONGER = replace(POLICY, network=replace(POLICY.network, most_gradients=1000))
ROWS = 40


def make(outputs, inputs=3, noise=0.3, rows=ROWS, labels=False, dtype=None):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(inputs, 25), nn.Tanh(), nn.Linear(25, outputs)).to(dtype)
    net = to_bayesian_(layers)
    return classifier(net, rows) if labels else regressor(net, rows, noise=noise)


def run(model, x, y, policy=POLICY):
    result = fit(model, "auto", x, y, seed=0, progress=False, policy=policy)
    (found,) = predict(result, [x], 30)
    return result, found


@pytest.fixture
def x():
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))


def test_a_constant_target(x):
    result, found = run(make(1), x, torch.full((ROWS,), 2.0))
    assert (found.mean - 2).abs().max() < 0.5
    assert set(result.held_out) == {"ensemble", "mclmc, held out"}
    assert (list(result.held_out)[-1] == "ensemble") == (result.refined is None)


def test_a_constant_column(x):
    x[:, 1] = 7.0
    _, found = run(make(1), x, x[:, 0])
    assert (found.mean - x[:, 0]).square().mean().sqrt() < 0.3


def test_one_row(x):
    result, found = run(make(1, rows=1), x[:1], torch.tensor([1.0]), LONGER)
    assert not result.held_out and (found.mean - 1).abs() < 0.5


def test_double_precision(x):
    x = x.double()
    result, found = run(make(1, dtype=torch.float64), x, x[:, 0])
    assert found.mean.dtype == torch.float64
    assert (found.mean - x[:, 0]).square().mean().sqrt() < 0.3
    assert result.held_out["ensemble"].log_prob.dtype == torch.float64


def test_integer_targets_of_a_regression(x):
    y = (x[:, 0] > 0).long()
    result, found = run(make(1), x, y)
    assert (found.mean - y).square().mean().sqrt() < 0.3
    assert len(result.held_out["ensemble"].log_prob) == 4


def test_a_class_without_rows(x):
    y = 2 * (x[:, 0] > 0).long()  # neither 1 nor 3
    result, found = run(make(4, labels=True), x, y)
    assert found.probability.shape == (ROWS, 4)
    assert (found.probability.argmax(-1) == y).float().mean() > 0.9
    assert result.held_out["ensemble"].num_rows == 4


class Ignores(nn.Module):
    """A constant, whatever the input."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.randn(120))

    def forward(self, x):
        return self.values.mean().expand(len(x))


def test_a_network_that_ignores_its_input(x):
    model = regressor(to_bayesian_(Ignores(), dist.Normal(0.0, 1.0)), ROWS, noise=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = 0.5 + 0.3 * x[:, 0]
        _, found = run(model, x, y, LONGER)
    # The prior of the mean is N(0, 1 / 120), the likelihood has the variance 0.3**2 / 40.
    mean = y.mean() * (ROWS / 0.09) / (ROWS / 0.09 + 120)
    assert (found.mean - mean).abs().max() < 0.08


def test_batch_normalisation_in_training_mode(x):
    net = nn.Sequential(nn.Linear(3, 25), nn.BatchNorm1d(25), nn.Tanh(), nn.Linear(25, 1))
    model = regressor(to_bayesian_(net), ROWS, noise=0.3)
    with pytest.raises(ValueError, match=r"layer '1', a BatchNorm1d, normalises .* Cure: net.eval"):
        fit(model, "auto", x, x[:, 0], progress=False, policy=POLICY)
    net.eval()
    result, _ = run(model, x, x[:, 0])
    assert result.stages[0].name == "ensemble"


@pytest.mark.parametrize("column", [0, 1])
def test_missing_values_are_refused(x, column):
    y = x[:, 0].clone()
    (x if column else y).view(-1)[5] = torch.nan
    with pytest.raises(ValueError, match="(?i)nan|finite"):
        fit(make(1), "auto", x, y, progress=False, policy=POLICY)
