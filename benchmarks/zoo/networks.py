# SPDX-License-Identifier: Apache-2.0
"""Bayesian networks of Pyro's modules, compared by predictions, as units may be permuted."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample

from benchmarks.zoo.registry import add, floats


def _layer(inputs: int, outputs: int):
    layer = PyroModule[torch.nn.Linear](inputs, outputs)
    layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([outputs, inputs]).to_event(2))
    layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([outputs]).to_event(1))
    return layer


def _outputs(draws, x, layers):
    """Outputs of the network at the rows of ``x``, ``(num_draws, rows)``."""
    value = x.expand(len(draws[f"{layers[0]}.bias"]), *x.shape)
    for i, layer in enumerate(layers):
        value = value @ draws[f"{layer}.weight"].mT + draws[f"{layer}.bias"].unsqueeze(-2)
        if i + 1 < len(layers):
            value = torch.tanh(value)
    return value.squeeze(-1)


def _curve_data() -> tuple:
    rng = np.random.default_rng(91)
    x = np.concatenate([rng.uniform(-2, -0.5, 25), rng.uniform(0.5, 2, 25)])[:, None]
    return floats(x, np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=50))


def _curve_invariant(draws, x, y):
    grid = torch.linspace(-2.5, 2.5, 11, dtype=y.dtype).unsqueeze(-1)
    return {
        "outputs": _outputs(draws, grid, ("hidden", "out")),
        "sigma": draws["sigma"].log(),
    }


@add(_curve_data, _curve_invariant, name="network_50")
class CurveNetwork(PyroModule):
    """50 latents, one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = _layer(1, 16)
        self.out = _layer(16, 1)

    def forward(self, x, y=None):
        mean = self.out(torch.tanh(self.hidden(x))).squeeze(-1)
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 4.0))
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def _moons_data() -> tuple:
    rng = np.random.default_rng(92)
    angle, label = rng.uniform(0, np.pi, 100), np.arange(100) % 2
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    x = np.where(label[:, None], [1.0, 0.5] - x, x) + 0.15 * rng.normal(size=(100, 2))
    return floats(x, label)


def _moons_invariant(draws, x, y):
    side = torch.linspace(-1.5, 2.5, 5, dtype=y.dtype)
    grid = torch.cartesian_prod(side, 0.6 * side)
    return {"outputs": _outputs(draws, grid, ("first", "second", "third"))}


@add(_moons_data, _moons_invariant, name="network_500")
class MoonsNetwork(PyroModule):
    """501 latents, two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _layer(2, 20)
        self.second = _layer(20, 20)
        self.third = _layer(20, 1)

    def forward(self, x, y=None):
        h = torch.tanh(self.first(x))
        logits = self.third(torch.tanh(self.second(h))).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Bernoulli(logits=logits), obs=y)
