# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes of three likelihoods, and a lattice of neighbours."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats


def rbf(x, variance, lengthscale, jitter=1e-4):
    squared = (x[:, None] - x[None, :]) ** 2
    return variance * torch.exp(-0.5 * squared / lengthscale**2) + jitter * torch.eye(len(x))


def _regression_data() -> tuple:
    rng = np.random.default_rng(31)
    x = np.sort(rng.uniform(0, 6, 60))
    return floats(x, np.sin(2 * x) * np.exp(-0.2 * x) + 0.2 * rng.normal(size=60))


@add(_regression_data)
def gp_regression(x, y):
    variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    covariance = rbf(x, variance, lengthscale) + noise**2 * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def _poisson_data() -> tuple:
    rng = np.random.default_rng(32)
    x = np.linspace(0, 5, 40)
    return floats(x, rng.poisson(np.exp(1.0 + np.sin(1.5 * x))))


@add(_poisson_data)
def gp_poisson(x, counts):
    eta = pyro.sample("eta", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.InverseGamma(5.0, 5.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    L = torch.linalg.cholesky(rbf(x, eta**2, rho, jitter=1e-6))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(x)), torch.ones(len(x))).to_event(1))
    f = pyro.deterministic("f", mu + L @ z)
    with pyro.plate("bins", len(x)):
        pyro.sample("counts", dist.Poisson(torch.exp(f)), obs=counts)


def _bernoulli_data() -> tuple:
    rng = np.random.default_rng(33)
    x = np.sort(rng.uniform(-3, 3, 60))
    return floats(x, rng.random(60) < 1 / (1 + np.exp(-2 * np.sin(2 * x))))


@add(_bernoulli_data)
def gp_bernoulli(x, y):
    """Centred: the values of the function are sampled from the process."""
    lengthscale = pyro.sample("lengthscale", dist.Gamma(3.0, 3.0))
    variance = pyro.sample("variance", dist.Gamma(2.0, 1.0))
    K = rbf(x, variance, lengthscale, jitter=1e-3)
    f = pyro.sample("f", dist.MultivariateNormal(x.new_zeros(len(x)), covariance_matrix=K))
    pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def _lattice_data() -> tuple:
    rng = np.random.default_rng(34)
    size = 12
    adjacency = np.zeros((size * size, size * size))
    for row in range(size):
        for column in range(size):
            here = row * size + column
            if column + 1 < size:
                adjacency[here, here + 1] = adjacency[here + 1, here] = 1
            if row + 1 < size:
                adjacency[here, here + size] = adjacency[here + size, here] = 1
    precision = 2.0 * (np.diag(adjacency.sum(1)) - 0.95 * adjacency)
    phi = np.linalg.solve(np.linalg.cholesky(precision).T, rng.normal(size=size * size))
    exposure = rng.uniform(2, 10, size * size)
    return floats(adjacency, exposure, rng.poisson(exposure * np.exp(0.2 + phi)))


@add(_lattice_data)
def car_lattice(adjacency, exposure, counts):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    alpha = pyro.sample("alpha", dist.Beta(4.0, 1.0))
    degree = torch.diag(adjacency.sum(-1))
    precision = tau * (degree - alpha * adjacency)
    zero = torch.zeros(len(counts))
    phi = pyro.sample("phi", dist.MultivariateNormal(zero, precision_matrix=precision))
    with pyro.plate("cells", len(counts)):
        pyro.sample("counts", dist.Poisson(exposure * (intercept + phi).exp()), obs=counts)
