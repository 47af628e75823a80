# SPDX-License-Identifier: Apache-2.0
"""Time series, in Python loops and vectorised."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats


def _ar_data() -> tuple:
    rng = np.random.default_rng(41)
    y = [0.0, 0.0]
    for _ in range(150):
        y.append(0.3 + 0.6 * y[-1] - 0.3 * y[-2] + 0.8 * rng.normal())
    return floats(y[2:])


@add(_ar_data)
def ar2(y):
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    mean = c + phi[0] * y[1:-1] + phi[1] * y[:-2]
    with pyro.plate("steps", len(y) - 2):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y[2:])


@add(lambda: (_ar_data()[0][:100],))
def ar2_loop(y):
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    phi1 = pyro.sample("phi1", dist.Normal(0.0, 1.0))
    phi2 = pyro.sample("phi2", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    for t in range(2, len(y)):
        mean = c + phi1 * y[t - 1] + phi2 * y[t - 2]
        pyro.sample(f"y_{t}", dist.Normal(mean, sigma), obs=y[t])


def _arma_data() -> tuple:
    rng = np.random.default_rng(42)
    e = rng.normal(size=202)
    y = [0.0]
    for t in range(1, 201):
        y.append(0.5 + 0.7 * y[-1] + 0.4 * e[t - 1] + e[t])
    return floats(y[1:])


@add(_arma_data)
def arma_loop(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = pyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(5.0))
    errors = [y[0] - (mu + phi * mu)]
    for t in range(1, len(y)):
        errors.append(y[t] - (mu + phi * y[t - 1] + theta * errors[t - 1]))
    with pyro.plate("steps", len(y)):
        pyro.sample("errors", dist.Normal(0.0, sigma), obs=torch.stack(errors))


def _garch_data() -> tuple:
    rng = np.random.default_rng(43)
    variance, y = 1.0, []
    for _ in range(200):
        y.append(0.1 + np.sqrt(variance) * rng.normal())
        variance = 0.2 + 0.3 * (y[-1] - 0.1) ** 2 + 0.5 * variance
    return floats(y)


@add(_garch_data)
def garch_loop(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    omega = pyro.sample("omega", dist.HalfNormal(1.0))
    alpha = pyro.sample("alpha", dist.Uniform(0.0, 1.0))
    beta = pyro.sample("beta", dist.Uniform(0.0, 1.0))
    variance = omega / (1 - 0.9 * beta)
    for t in range(len(y)):
        if t > 0:
            variance = omega + alpha * (y[t - 1] - mu) ** 2 + beta * variance
        pyro.sample(f"y_{t}", dist.Normal(mu, variance.sqrt()), obs=y[t])


def _level_data() -> tuple:
    rng = np.random.default_rng(44)
    level = np.cumsum(0.4 * rng.normal(size=100))
    return floats(level + 0.8 * rng.normal(size=100))


@add(_level_data)
def local_level(y):
    sd_level = pyro.sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = pyro.sample("sd_noise", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    with pyro.plate("steps", len(y)):
        steps = pyro.sample("innovations", dist.Normal(0.0, 1.0))
    level = pyro.deterministic("level", start + sd_level * steps.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level, sd_noise), obs=y)


@add(_level_data)
def local_level_loop(y):
    """Centred, with one site per step: 102 latents in a Python loop."""
    sd_level = pyro.sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = pyro.sample("sd_noise", dist.HalfNormal(1.0))
    level = torch.tensor(0.0)
    for t in pyro.markov(range(len(y))):
        scale = sd_level if t > 0 else torch.tensor(5.0)
        level = pyro.sample(f"level_{t}", dist.Normal(level, scale))
        pyro.sample(f"y_{t}", dist.Normal(level, sd_noise), obs=y[t])


def volatility_data(steps: int, seed: int = 45) -> tuple:
    """Return daily returns whose log-variance is an autoregression."""
    rng = np.random.default_rng(seed)
    h = [-1.0]
    for _ in range(steps - 1):
        h.append(-1.0 + 0.95 * (h[-1] + 1.0) + 0.25 * rng.normal())
    return floats(np.exp(np.array(h) / 2) * rng.normal(size=steps))


@add(lambda: volatility_data(1000))
def stochastic_volatility_1000(y):
    """Vectorised: the log-variance is a random walk, the cumulative sum of its steps."""
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    start = pyro.sample("start", dist.Normal(-1.0, 2.0))
    steps = pyro.sample("steps", dist.Normal(0.0, sigma).expand([len(y)]).to_event(1))
    h = pyro.deterministic("h", start + steps.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(0.0, torch.exp(h / 2)), obs=y)


@add(lambda: volatility_data(100))
def stochastic_volatility_100_loop(y):
    """A loop over standardised innovations."""
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    phi = pyro.sample("phi", dist.Beta(20.0, 1.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    h = mu + sigma / torch.sqrt(1 - phi**2) * z[0]
    path = [h]
    for t in range(1, len(y)):
        h = mu + phi * (h - mu) + sigma * z[t]
        path.append(h)
    volatility = torch.exp(torch.stack(path) / 2)
    pyro.sample("y", dist.Normal(torch.zeros(len(y)), volatility).to_event(1), obs=y)
