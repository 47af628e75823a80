# SPDX-License-Identifier: Apache-2.0
"""Time series of 15 to 2,000 steps, in loops and vectorised."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats, integers
from benchmarks.zoo.time_series import stochastic_volatility_1000, volatility_data


def _walk_data() -> tuple:
    rng = np.random.default_rng(301)
    level = np.cumsum(0.15 * rng.standard_t(2.5, 400))
    return floats(level + 0.4 * rng.normal(size=400))


@add(_walk_data)
def student_walk_400(y):
    """A random walk with heavy-tailed innovations in one site."""
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 2.0))
    steps = pyro.sample("steps", dist.StudentT(nu, 0.0, 1.0).expand([len(y)]).to_event(1))
    level = pyro.deterministic("level", start + scale * steps.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level, noise), obs=y)


def _ricker_data() -> tuple:
    rng = np.random.default_rng(302)
    x, y = np.log(20.0), []
    for _ in range(60):
        x = x + 0.8 * (1 - np.exp(x) / 60) + 0.25 * rng.normal()
        y.append(rng.poisson(np.exp(x)))
    return floats(y)


@add(_ricker_data)
def ricker_markov_60(counts):
    """Growth of a population; one site for each year."""
    r = pyro.sample("r", dist.LogNormal(0.0, 0.5))
    capacity = pyro.sample("capacity", dist.LogNormal(4.0, 0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    x = pyro.sample("x_init", dist.Normal(3.0, 1.0))
    for t in pyro.markov(range(len(counts))):
        x = pyro.sample(f"x_{t}", dist.Normal(x + r * (1 - x.exp() / capacity), sigma))
        pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=counts[t])


def _returns_data() -> tuple:
    rng = np.random.default_rng(303)
    log_volatility = -4.5 + np.cumsum(0.08 * rng.normal(size=1000))
    return floats(np.exp(log_volatility) * rng.standard_t(8, 1000))


@add(_returns_data)
def volatility_1000(returns):
    """The log-volatility is a random walk, the returns have heavy tails."""
    sigma = pyro.sample("sigma", dist.Exponential(10.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    start = pyro.sample("start", dist.Normal(-4.0, 2.0))
    steps = pyro.sample("steps", dist.Normal(0.0, sigma).expand([len(returns)]).to_event(1))
    log_volatility = pyro.deterministic("log_volatility", start + steps.cumsum(-1))
    with pyro.plate("days", len(returns)):
        pyro.sample("returns", dist.StudentT(nu, 0.0, log_volatility.exp()), obs=returns)


@add(lambda: volatility_data(2500, seed=309))
def volatility_2500(y):
    """The zoo's model of stochastic volatility, with 2,500 days."""
    stochastic_volatility_1000(y)


def _level_data() -> tuple:
    rng = np.random.default_rng(304)
    level = np.cumsum(0.2 * rng.normal(size=2000))
    return floats(level + rng.normal(size=2000))


@add(_level_data)
def local_level_2000(y):
    sd_level = pyro.sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = pyro.sample("sd_noise", dist.HalfNormal(2.0))
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    with pyro.plate("steps", len(y)):
        innovations = pyro.sample("innovations", dist.Normal(0.0, 1.0))
    level = pyro.deterministic("level", start + sd_level * innovations.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(level, sd_noise), obs=y)


def _season_data() -> tuple:
    rng = np.random.default_rng(305)
    skill = 0.8 * rng.normal(size=20) + np.cumsum(0.3 * rng.normal(size=(15, 20)), 0)
    season = np.repeat(np.arange(15), 60)
    home = rng.integers(0, 20, 900)
    away = (home + rng.integers(1, 20, 900)) % 20
    logit = 0.3 + skill[season, home] - skill[season, away]
    won = rng.random(900) < 1 / (1 + np.exp(-logit))
    return tuple(map(integers, (season, home, away))) + floats(won)


@add(_season_data)
def elo_seasons(season, home, away, won):
    """Skills of 20 teams that change over 15 seasons, a vector for each season."""
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    drift = pyro.sample("drift", dist.HalfNormal(0.5))
    advantage = pyro.sample("advantage", dist.Normal(0.0, 1.0))
    skill, scale = torch.zeros(20), sd
    for t in pyro.markov(range(15)):
        with pyro.plate(f"teams_{t}", 20):
            skill = pyro.sample(f"skill_{t}", dist.Normal(skill, scale))
        scale = drift
        games = season == t
        logits = skill[home[games]] - skill[away[games]] + advantage
        with pyro.plate(f"games_{t}", int(games.sum())):
            pyro.sample(f"won_{t}", dist.Bernoulli(logits=logits), obs=won[games])


def _counts_data() -> tuple:
    rng = np.random.default_rng(306)
    h, y = 1.0, []
    for _ in range(150):
        h = 1.0 + 0.85 * (h - 1.0) + 0.35 * rng.normal()
        y.append(rng.poisson(np.exp(h)))
    return floats(y)


@add(_counts_data)
def poisson_markov_150(counts):
    """Counts with an autoregressive log-rate; one site for each step."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    phi = pyro.sample("phi", dist.Beta(4.0, 1.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    h = mu
    for t in pyro.markov(range(len(counts))):
        h = pyro.sample(f"h_{t}", dist.Normal(mu + phi * (h - mu), sigma))
        pyro.sample(f"y_{t}", dist.Poisson(h.exp()), obs=counts[t])


def _panel_data() -> tuple:
    rng = np.random.default_rng(307)
    mu, phi = 1.0 + 0.7 * rng.normal(size=60), rng.beta(4, 3, 60)
    sigma = np.exp(-0.5 + 0.3 * rng.normal(size=60))
    y = [mu]
    for _ in range(25):
        y.append(mu + phi * (y[-1] - mu) + sigma * rng.normal(size=60))
    return floats(np.stack(y))


@add(_panel_data)
def hierarchical_ar(y):
    """Sixty series of 25 steps, each with a level, an autoregression and a noise of its own."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    a = pyro.sample("a", dist.Gamma(2.0, 0.5))
    b = pyro.sample("b", dist.Gamma(2.0, 0.5))
    log_sigma = pyro.sample("log_sigma", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    with pyro.plate("series", y.shape[1], dim=-1):
        mu = pyro.sample("mu", dist.Normal(mean, tau))
        phi = pyro.sample("phi", dist.Beta(a, b))
        sigma = pyro.sample("sigma", dist.LogNormal(log_sigma, spread))
        with pyro.plate("steps", len(y) - 1, dim=-2):
            pyro.sample("y", dist.Normal(mu + phi * (y[:-1] - mu), sigma), obs=y[1:])


def _survival_data() -> tuple:
    rng = np.random.default_rng(308)
    t = np.linspace(0, 1, 50)[:, None]
    x = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    log_hazard = -1.5 + 0.8 * np.sin(3 * t) + (1.0 - 1.5 * t) * x[:, 0] + 0.5 * t * x[:, 1]
    exposure = rng.uniform(3.0, 30.0, (50, 4))
    return floats(x, exposure, rng.poisson(exposure * np.exp(log_hazard)))


@add(_survival_data)
def survival_walks(x, exposure, deaths):
    """A piecewise exponential model: baseline and two effects are random walks over time."""
    num_times = len(deaths)
    start = pyro.sample("start", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    drift = pyro.sample("drift", dist.HalfNormal(0.3).expand([3]).to_event(1))
    steps = pyro.sample("steps", dist.Normal(0.0, 1.0).expand([num_times, 3]).to_event(2))
    walk = start + drift * steps.cumsum(-2)
    log_hazard = walk[..., :1] + walk[..., 1:] @ x.T
    with pyro.plate("groups", 4, dim=-1), pyro.plate("times", num_times, dim=-2):
        pyro.sample("deaths", dist.Poisson(exposure * log_hazard.exp()), obs=deaths)
