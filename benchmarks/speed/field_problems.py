# SPDX-License-Identifier: Apache-2.0
"""The six posteriors of ``field.py``: Pyro models and references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.posteriordb import data as posteriordb_data
from benchmarks.targets import make_target
from benchmarks.zoo import registry
from benchmarks.zoo.metrics import read_reference

__all__ = ["NAMES", "NETWORK_REFERENCE", "Problem", "load"]

Draws = dict[str, Tensor]
NAMES = ("funnel", "eight_schools", "regression", "network", "garch_loop", "gp")
NUM_REFERENCE = 10_000
NETWORK_REFERENCE = Path(__file__).parent / "network_reference.npz"
NOISE, UNITS = 0.2, 50


@dataclass(frozen=True)
class Problem:
    """A model, its arguments, and its posterior.

    ``features`` maps draws by site to ``(num_draws, num_features)``; ``reference`` has draws of
    these features.
    """

    model: Callable[..., Any]
    args: tuple[Tensor, ...]
    features: Callable[[Draws], Tensor]
    reference: Tensor | None


def load(name: str, data_dir: Path | None) -> Problem:
    """Return one of :data:`NAMES`.

    :param data_dir: the folder that contains ``posteriordb``.
    """
    return _MAKERS[name](data_dir)


def _funnel(data_dir: Path | None) -> Problem:
    target = make_target("funnel")
    return Problem(target.model, (), target.flatten, target.truth(NUM_REFERENCE, 1))


def _eight_schools(data_dir: Path | None) -> Problem:
    posterior = posteriordb_data.load("eight_schools-eight_schools_centered", data_dir)
    reference = posterior.unconstrain(posterior.reference())
    return Problem(posterior.model, posterior.args, posterior.unconstrain, reference)


def _garch(data_dir: Path | None) -> Problem:
    zoo, found = registry.load("garch_loop"), read_reference("garch_loop")
    assert found is not None
    args = zoo.data()
    return Problem(zoo.model(), args, lambda draws: zoo.features(draws, args)[0], found.values)


def _gaussian(mean: Tensor, precision: Tensor) -> Tensor:
    """Draws of a Gaussian posterior."""
    draws = torch.randn(NUM_REFERENCE, len(mean), generator=torch.Generator().manual_seed(1))
    factor = torch.linalg.cholesky(precision)
    return mean + torch.linalg.solve_triangular(factor.mT, draws.mT, upper=True).mT


def regression(x: Tensor, y: Tensor) -> None:
    """Ten predictors with correlations of .999."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((x @ weight.unsqueeze(-1)).squeeze(-1), 0.5), obs=y)


def _regression(data_dir: Path | None) -> Problem:
    rng = np.random.default_rng(0)
    x = np.sqrt(0.999) * rng.normal(size=(100, 1)) + np.sqrt(0.001) * rng.normal(size=(100, 10))
    x, y = registry.floats(x, x.sum(-1) / 10 + 0.5 * rng.normal(size=100))
    precision = torch.eye(10) + x.mT @ x / 0.25
    mean = torch.linalg.solve(precision, x.mT @ y / 0.25)
    return Problem(regression, (x, y), lambda draws: draws["weight"], _gaussian(mean, precision))


def gp(factor: Tensor, y: Tensor) -> None:
    """A function at a hundred points with a Gaussian process prior of known kernel."""
    prior = dist.MultivariateNormal(torch.zeros_like(y), scale_tril=factor)
    f = pyro.sample("f", prior)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def _gp(data_dir: Path | None) -> Problem:
    t = torch.linspace(0, 1, 100)
    kernel = torch.exp(-0.5 * ((t - t.unsqueeze(-1)) / 0.2).square()) + 1e-3 * torch.eye(100)
    noise = np.random.default_rng(0).normal(size=100)
    (y,) = registry.floats(np.sin(6 * t.numpy()) + 0.3 * noise)
    precision = torch.linalg.inv(kernel) + torch.eye(100) / 0.09
    mean = torch.linalg.solve(precision, y / 0.09)
    factor = torch.linalg.cholesky(kernel)
    return Problem(gp, (factor, y), lambda draws: draws["f"], _gaussian(mean, precision))


def network(x: Tensor, y: Tensor) -> None:
    """One hidden layer of 50 units, 151 latents, 20 rows."""
    scale = x.new_ones(UNITS)
    slope = pyro.sample("slope", dist.Normal(0.0, scale).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, scale).to_event(1))
    weight = pyro.sample("weight", dist.Normal(0.0, scale).to_event(1))
    offset = pyro.sample("offset", dist.Normal(x.new_zeros(()), 1.0))
    mean = ((x.unsqueeze(-1) * slope + bias).tanh() * weight).sum(-1) + offset
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def _predictions(draws: Draws) -> Tensor:
    """Features of the network that do not depend on the order of units."""
    grid = torch.linspace(-2.5, 2.5, 11, dtype=draws["bias"].dtype)
    slope, bias, weight = (draws[site].unsqueeze(-1) for site in ("slope", "bias", "weight"))
    return ((slope * grid + bias).tanh() * weight).sum(-2) + draws["offset"].reshape(-1, 1)


def _network(data_dir: Path | None) -> Problem:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-2, 2, 20))
    args = registry.floats(x, np.sin(2 * x) + NOISE * rng.normal(size=20))
    reference = None
    if NETWORK_REFERENCE.exists():
        reference = torch.as_tensor(np.load(NETWORK_REFERENCE)["values"]).double()
    return Problem(network, args, _predictions, reference)


_MAKERS: dict[str, Callable[[Path | None], Problem]] = {
    "funnel": _funnel,
    "eight_schools": _eight_schools,
    "regression": _regression,
    "network": _network,
    "garch_loop": _garch,
    "gp": _gp,
}
