# SPDX-License-Identifier: Apache-2.0
"""Priors with inferred scales: density in closed form, and a posterior by integration."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_implicit.density.target import Target
from pyro_implicit.nn import classifier, regressor, start_values, to_bayesian_

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp(prior="hierarchical", outputs=1):
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)
    return to_bayesian_(nn.Sequential(*layers).double(), prior)


def log_normal(value, sd=1.0):
    one = torch.as_tensor(sd, dtype=value.dtype)
    return (-0.5 * (value / one).square() - one.log() - 0.5 * math.log(2 * math.pi)).sum()


def log_half_normal(value):
    return log_normal(value) + math.log(2)


def test_density_is_that_of_scaled_weights() -> None:
    model = regressor(mlp(), 6, noise="half_normal")
    nodes = poutine.trace(model).get_trace(X, Y).nodes
    expected = torch.zeros((), dtype=torch.float64)
    weights = {}
    for layer, fan_in in [("0", 3), ("2", 5)]:
        scale, unit = (
            nodes[f"{layer}.weight_scale"]["value"],
            nodes[f"{layer}.weight_unit"]["value"],
        )
        weights[layer] = 3.0 / fan_in**0.5 * scale * unit
        bias = nodes[f"{layer}.bias"]["value"]
        expected += log_half_normal(scale) + log_normal(unit) + log_normal(bias)
    noise = nodes["noise"]["value"]
    hidden = (X @ weights["0"].T + nodes["0.bias"]["value"]).tanh()
    mean = (hidden @ weights["2"].T + nodes["2.bias"]["value"]).squeeze(-1)
    expected += log_half_normal(noise) + log_normal(Y - mean, noise)
    values = {name: site["value"] for name, site in nodes.items() if site["type"] == "sample"}
    trace = poutine.trace(poutine.condition(model, values)).get_trace(X, Y)
    torch.testing.assert_close(trace.log_prob_sum(), expected)
    torch.testing.assert_close(nodes["0.weight"]["value"], weights["0"])


def test_initial_values_are_those_of_the_network() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    values = start_values(mlp())
    assert values.keys() == {
        f"{layer}.{part}" for layer in "02" for part in ("bias", "weight_scale", "weight_unit")
    }
    for layer, fan_in in [("0", 3), ("2", 5)]:
        weight = 3 / fan_in**0.5 * values[f"{layer}.weight_scale"] * values[f"{layer}.weight_unit"]
        torch.testing.assert_close(weight, plain.get_parameter(f"{layer}.weight"))
        size = values[f"{layer}.weight_unit"].square().mean()
        torch.testing.assert_close(size, torch.ones_like(size))


def test_one_layer_by_name_and_weights_of_zero() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    nn.init.zeros_(net[2].weight)
    values = start_values(to_bayesian_(net, {"2": "hierarchical", "0": 0.5}))
    assert values["2.weight_scale"] == 1 and not values["2.weight_unit"].any()
    assert "0.weight" in values and "0.weight_scale" not in values


def test_copies_and_dtypes() -> None:
    net = pickle.loads(pickle.dumps(mlp()))
    trace = poutine.trace(net.float()).get_trace(X.float())
    assert trace.nodes["0.weight"]["value"].dtype == torch.float32
    target = Target(classifier(mlp(outputs=2), 6), X, torch.tensor([0, 1] * 3))
    assert target.is_vectorized and target.latent_dim == 15 + 5 + 10 + 2 + 2


def test_linear_posterior_is_that_of_integration() -> None:
    """Given the scale, the weights are Gaussian; a grid integrates over the scale."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    y = 0.3 * x[:, 0] + 0.4 * torch.randn(12, dtype=torch.float64, generator=generator)
    gain, sd = 3 / 4**0.5, 0.4
    grid = torch.linspace(1e-3, 4, 4000, dtype=torch.float64)
    covariance = (gain * grid[:, None, None]) ** 2 * (x @ x.T) + sd**2 * torch.eye(12).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros(12).double(), covariance)
    weight = (normal.log_prob(y) - grid.square() / 2).softmax(0)
    means = (gain * grid[:, None]) ** 2 * (torch.linalg.solve(covariance, y) @ x)
    expected_scale, expected = weight @ grid, weight @ means

    net = to_bayesian_(nn.Linear(4, 1, bias=False).double(), "hierarchical")
    target = Target(regressor(net, 12, noise=sd), x, y)
    torch.manual_seed(0)
    scale, unit = torch.randn(200_000).double().abs(), torch.randn(200_000, 4).double()
    values = {"weight_scale": scale, "weight_unit": unit.unsqueeze(1)}
    latents = target.unconstrain(values)
    # log p of the prior in unconstrained space; its weights leave the likelihood.
    prior = 5 * math.log(2 * math.pi) / 2 - math.log(2)
    log_prior = -(scale.square() + unit.square().sum(-1)) / 2 - prior + scale.log()
    weights = (target.log_prob(latents) - log_prior).softmax(0)
    torch.testing.assert_close(weights @ scale, expected_scale, atol=0.01, rtol=0)
    found = weights @ (gain * scale[:, None] * unit)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_unknown_words() -> None:
    with pytest.raises(ValueError, match='must be "fan_in", "hierarchical" or "moped"'):
        mlp("hierarchic")
    with pytest.raises(TypeError, match='"half_normal", "heteroscedastic" or a distribution'):
        regressor(mlp(), 6, noise="half")
