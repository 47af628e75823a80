# SPDX-License-Identifier: Apache-2.0
"""Twins of the time series. Chains of loops are vectors with a Markov factor."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def _vector(name, length):
    """Return a vector with a flat density; its elements are sites, as in the Pyro model."""
    value = sample(name, dist.ImproperUniform(dist.constraints.real, (), (length,)))
    for t in range(length):
        numpyro.deterministic(f"{name}_{t}", value[t])
    return value


def student_walk_400(y):
    nu = sample("nu", dist.Gamma(2.0, 0.1))
    scale = sample("scale", dist.HalfNormal(1.0))
    noise = sample("noise", dist.HalfNormal(1.0))
    start = sample("start", dist.Normal(0.0, 2.0))
    steps = sample("steps", dist.StudentT(nu, 0.0, 1.0).expand([len(y)]))
    sample("y", dist.Normal(start + scale * jnp.cumsum(steps), noise), obs=y)


def ricker_markov_60(counts):
    r = sample("r", dist.LogNormal(0.0, 0.5))
    capacity = sample("capacity", dist.LogNormal(4.0, 0.5))
    sigma = sample("sigma", dist.HalfNormal(0.5))
    first = sample("x_init", dist.Normal(3.0, 1.0))
    x = _vector("x", len(counts))
    before = jnp.concatenate([first[None], x[:-1]])
    growth = dist.Normal(before + r * (1 - jnp.exp(before) / capacity), sigma)
    numpyro.factor("growth", growth.log_prob(x).sum())
    sample("y", dist.Poisson(jnp.exp(x)), obs=counts)


def volatility_1000(returns):
    sigma = sample("sigma", dist.Exponential(10.0))
    nu = sample("nu", dist.Gamma(2.0, 0.1))
    start = sample("start", dist.Normal(-4.0, 2.0))
    steps = sample("steps", dist.Normal(0.0, sigma).expand([len(returns)]))
    sample("returns", dist.StudentT(nu, 0.0, jnp.exp(start + jnp.cumsum(steps))), obs=returns)


def volatility_2500(y):
    sigma = sample("sigma", dist.HalfNormal(0.5))
    start = sample("start", dist.Normal(-1.0, 2.0))
    steps = sample("steps", dist.Normal(0.0, sigma).expand([len(y)]))
    sample("y", dist.Normal(0.0, jnp.exp((start + jnp.cumsum(steps)) / 2)), obs=y)


def local_level_2000(y):
    sd_level = sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = sample("sd_noise", dist.HalfNormal(2.0))
    start = sample("start", dist.Normal(0.0, 5.0))
    innovations = sample("innovations", dist.Normal(0.0, 1.0).expand([len(y)]))
    sample("y", dist.Normal(start + sd_level * jnp.cumsum(innovations), sd_noise), obs=y)


def elo_seasons(season, home, away, won):
    sd = sample("sd", dist.HalfNormal(1.0))
    drift = sample("drift", dist.HalfNormal(0.5))
    advantage = sample("advantage", dist.Normal(0.0, 1.0))
    skills = [sample("skill_0", dist.Normal(0.0, sd).expand([20]))]
    for t in range(1, 15):
        skills.append(sample(f"skill_{t}", dist.Normal(skills[-1], drift)))
    skill = jnp.stack(skills)
    logits = skill[season, home] - skill[season, away] + advantage
    sample("won", dist.Bernoulli(logits=logits), obs=won)


def poisson_markov_150(counts):
    mu = sample("mu", dist.Normal(0.0, 2.0))
    phi = sample("phi", dist.Beta(4.0, 1.5))
    sigma = sample("sigma", dist.HalfNormal(1.0))
    h = _vector("h", len(counts))
    before = jnp.concatenate([mu[None], h[:-1]])
    numpyro.factor("walk", dist.Normal(mu + phi * (before - mu), sigma).log_prob(h).sum())
    sample("y", dist.Poisson(jnp.exp(h)), obs=counts)


def hierarchical_ar(y):
    mean = sample("mean", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.HalfNormal(1.0))
    a = sample("a", dist.Gamma(2.0, 0.5))
    b = sample("b", dist.Gamma(2.0, 0.5))
    log_sigma = sample("log_sigma", dist.Normal(0.0, 1.0))
    spread = sample("spread", dist.HalfNormal(0.5))
    mu = sample("mu", dist.Normal(mean, tau).expand([y.shape[1]]))
    phi = sample("phi", dist.Beta(a, b).expand([y.shape[1]]))
    sigma = sample("sigma", dist.LogNormal(log_sigma, spread).expand([y.shape[1]]))
    sample("y", dist.Normal(mu + phi * (y[:-1] - mu), sigma), obs=y[1:])


def survival_walks(x, exposure, deaths):
    start = sample("start", dist.Normal(0.0, 2.0).expand([3]))
    drift = sample("drift", dist.HalfNormal(0.3).expand([3]))
    steps = sample("steps", dist.Normal(0.0, 1.0).expand([len(deaths), 3]))
    walk = start + drift * jnp.cumsum(steps, 0)
    log_hazard = walk[:, :1] + walk[:, 1:] @ x.T
    sample("deaths", dist.Poisson(exposure * jnp.exp(log_hazard)), obs=deaths)
