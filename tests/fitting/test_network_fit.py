# SPDX-License-Identifier: Apache-2.0
"""``fit`` of networks: an ensemble, then a chain from each member."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import AutoEnsemble, fit
from pyro_implicit.fitting import FitPolicy, NetworkPolicy
from pyro_implicit.nn import evaluate, predict, regressor, to_bayesian_

ROWS, DIM, NOISE = 60, 110, 0.5
#: The cost of these networks is estimated, not measured: budgets give the same steps everywhere.
POLICY = NetworkPolicy(num_members=6, training_seconds=1.0, chain_seconds=1e3, most_gradients=4000)


@pytest.fixture(scope="module")
def linear():
    """A network without hidden layers: conjugate."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, DIM)
    y = x @ torch.randn(DIM) / DIM**0.5 + NOISE * torch.randn(ROWS)
    net = to_bayesian_(nn.Linear(DIM, 1, bias=False), dist.Normal(0.0, DIM**-0.5))
    return regressor(net, ROWS, noise=NOISE), x, y


@pytest.fixture(scope="module")
def fitted(linear):
    model, x, y = linear
    return fit(model, "auto", x, y, seed=0, progress=False, policy=FitPolicy(network=POLICY))


def test_predictions_of_a_conjugate_network(linear, fitted):
    _, x, y = linear
    new = torch.randn(20, DIM, generator=torch.Generator().manual_seed(1)).double()
    x, y = x.double(), y.double()
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + DIM * torch.eye(DIM, dtype=x.dtype))
    mean = new @ covariance @ x.T @ y / NOISE**2
    sd = (new @ covariance * new).sum(-1).sqrt()
    weights = fitted.refined.get_samples()["weight"].squeeze(-2).double()
    found = weights @ new.T
    # About two hundred effective draws, and the step size's two per cent.
    assert ((found.mean(0) - mean) / sd).abs().mean() < 0.15
    assert abs((found.std(0) / sd).mean() - 1) < 0.1
    assert [stage.name for stage in fitted.stages] == ["ensemble", "mclmc"]
    assert isinstance(fitted.guide, AutoEnsemble) and fitted.refined.num_chains == 6
    assert "of the predictions: means may be off" in str(fitted)


def test_results_predict(linear, fitted):
    _, x, y = linear
    (found,) = predict(fitted, [x[:5]], 50)
    assert found.mean.shape == (5,)
    assert evaluate(fitted, [(x, y)]).rmse < 0.6


@pytest.mark.parametrize("refine", ["auto", True])
def test_a_small_budget_ends_with_the_ensemble(linear, refine):
    policy = FitPolicy(network=NetworkPolicy(2, training_seconds=0.1, chain_seconds=0.0))
    model, x, y = linear
    options = {"seed": 0, "progress": False, "policy": policy, "refine": refine}
    result = fit(model, "auto", x, y, **options)
    names = [stage.name for stage in result.stages]
    assert names == (["ensemble"] if refine == "auto" else ["ensemble", "mclmc"])
    assert len(result.sample(4)["weight"]) == 4


def test_small_networks_are_like_other_models(linear):
    _, x, y = linear
    model = regressor(to_bayesian_(nn.Linear(3, 1)), ROWS, noise=NOISE)
    result = fit(model, "auto", x[:, :3], y, seed=0, progress=False)
    assert result.stages[0].name == "search"
