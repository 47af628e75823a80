# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes, a disease map and a network with latent positions."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats, integers


def _cox_data() -> tuple:
    rng = np.random.default_rng(401)
    t = np.linspace(0, 10, 100)
    return floats(t, rng.poisson(np.exp(1.0 + np.sin(t) - 0.1 * t)))


def _smooth(t, z, length, amplitude):
    """A Gaussian process from white noise."""
    covariance = amplitude**2 * torch.exp(-0.5 * ((t[:, None] - t) / length) ** 2)
    return torch.linalg.cholesky(covariance + 1e-5 * torch.eye(len(t))) @ z


@add(_cox_data)
def cox_process_100(t, counts):
    """A log-Gaussian Cox process on 100 cells."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    length = pyro.sample("length", dist.InverseGamma(4.0, 6.0))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.5))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(t)]).to_event(1))
    f = pyro.deterministic("f", mean + _smooth(t, z, length, amplitude))
    with pyro.plate("cells", len(t)):
        pyro.sample("counts", dist.Poisson(f.exp()), obs=counts)


def _robust_data() -> tuple:
    rng = np.random.default_rng(402)
    t = np.sort(rng.uniform(0, 10, 100))
    return floats(t, np.sin(t) + 0.1 * t + 0.2 * rng.standard_t(2.5, 100))


@add(_robust_data)
def gp_student(t, y):
    """Regression by a Gaussian process with heavy-tailed noise."""
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.InverseGamma(4.0, 6.0))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(2.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(t)]).to_event(1))
    with pyro.plate("data", len(t)):
        pyro.sample("y", dist.StudentT(nu, _smooth(t, z, length, amplitude), sigma), obs=y)


def _map_data() -> tuple:
    rng = np.random.default_rng(403)
    cell = np.arange(150).reshape(10, 15)
    first = np.concatenate([cell[:, :-1].ravel(), cell[:-1].ravel()])
    second = np.concatenate([cell[:, 1:].ravel(), cell[1:].ravel()])
    row, column = np.divmod(np.arange(150), 15)
    x = rng.normal(size=150)
    expected = rng.uniform(2.0, 20.0, 150)
    smooth = 0.5 * np.sin(row / 3) * np.cos(column / 4)
    y = rng.poisson(expected * np.exp(0.1 + 0.2 * x + smooth + 0.2 * rng.normal(size=150)))
    return integers(first), integers(second), *floats(x, expected, y)


@add(_map_data)
def disease_map(first, second, x, expected, y):
    """Besag, York and Mollie: an intrinsic autoregression and independent effects of 150 areas."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    sd_smooth = pyro.sample("sd_smooth", dist.HalfNormal(1.0))
    sd_rough = pyro.sample("sd_rough", dist.HalfNormal(1.0))
    with pyro.plate("areas", len(y)):
        smooth = pyro.sample("smooth", dist.Normal(0.0, 10.0))
        rough = pyro.sample("rough", dist.Normal(0.0, 1.0))
    pyro.factor("neighbours", -0.5 * ((smooth[first] - smooth[second]) ** 2).sum(-1))
    pyro.sample("centre", dist.Normal(smooth.mean(-1), 0.01), obs=torch.tensor(0.0))
    log_risk = intercept + slope * x + sd_smooth * smooth + sd_rough * rough
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(expected * log_risk.exp()), obs=y)


def _friends_data() -> tuple:
    rng = np.random.default_rng(404)
    known, hidden = 1.5 * rng.normal(size=(12, 2)), 1.5 * rng.normal(size=(60, 2))
    position = np.concatenate([known, hidden])
    first, second = np.triu_indices(72, 1)
    first, second = first[second >= 12], second[second >= 12]
    distance = np.sqrt(((position[first] - position[second]) ** 2).sum(-1))
    tie = rng.random(len(first)) < 1 / (1 + np.exp(-(1.5 - 1.2 * distance)))
    return *floats(known), integers(first), integers(second), *floats(tie)


@add(_friends_data)
def latent_space(known, first, second, tie):
    """A network: 60 positions in the plane are latent, 12 are known."""
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
    with pyro.plate("people", 60):
        hidden = pyro.sample("hidden", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    position = torch.cat([known, hidden])
    distance = ((position[first] - position[second]) ** 2).sum(-1).add(1e-6).sqrt()
    with pyro.plate("pairs", len(tie)):
        pyro.sample("tie", dist.Bernoulli(logits=intercept - slope * distance), obs=tie)
