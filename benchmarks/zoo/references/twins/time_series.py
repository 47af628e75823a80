# SPDX-License-Identifier: Apache-2.0
"""Twins of the time series; a Python loop is a scan here."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def ar2(y):
    c = sample("c", dist.Normal(0.0, 1.0))
    phi = sample("phi", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
    sigma = sample("sigma", dist.HalfNormal(1.0))
    sample("y", dist.Normal(c + phi[0] * y[1:-1] + phi[1] * y[:-2], sigma), obs=y[2:])


def ar2_loop(y):
    c = sample("c", dist.Normal(0.0, 1.0))
    phi1 = sample("phi1", dist.Normal(0.0, 1.0))
    phi2 = sample("phi2", dist.Normal(0.0, 1.0))
    sigma = sample("sigma", dist.HalfCauchy(1.0))
    sample("y", dist.Normal(c + phi1 * y[1:-1] + phi2 * y[:-2], sigma), obs=y[2:])


def arma_loop(y):
    mu = sample("mu", dist.Normal(0.0, 10.0))
    phi = sample("phi", dist.Normal(0.0, 2.0))
    theta = sample("theta", dist.Normal(0.0, 2.0))
    sigma = sample("sigma", dist.HalfCauchy(5.0))

    def step(error, pair):
        before, now = pair
        error = now - (mu + phi * before + theta * error)
        return error, error

    first = y[0] - (mu + phi * mu)
    _, errors = jax.lax.scan(step, first, (y[:-1], y[1:]))
    errors = jnp.concatenate([first[None], errors])
    numpyro.factor("errors", dist.Normal(0.0, sigma).log_prob(errors).sum())


def garch_loop(y):
    mu = sample("mu", dist.Normal(0.0, 1.0))
    omega = sample("omega", dist.HalfNormal(1.0))
    alpha = sample("alpha", dist.Uniform(0.0, 1.0))
    beta = sample("beta", dist.Uniform(0.0, 1.0))

    def step(variance, before):
        variance = omega + alpha * (before - mu) ** 2 + beta * variance
        return variance, variance

    first = omega / (1 - 0.9 * beta)
    _, variances = jax.lax.scan(step, first, y[:-1])
    sample("y", dist.Normal(mu, jnp.sqrt(jnp.concatenate([first[None], variances]))), obs=y)


def local_level(y):
    sd_level = sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = sample("sd_noise", dist.HalfNormal(1.0))
    start = sample("start", dist.Normal(0.0, 5.0))
    steps = sample("innovations", dist.Normal(0.0, 1.0).expand([len(y)]))
    sample("y", dist.Normal(start + sd_level * jnp.cumsum(steps), sd_noise), obs=y)


def local_level_loop(y):
    sd_level = sample("sd_level", dist.HalfNormal(1.0))
    sd_noise = sample("sd_noise", dist.HalfNormal(1.0))
    # All levels are one site, as a hundred take long to compile: the sums of their steps.
    scales = jnp.full(len(y), sd_level).at[0].set(5.0)
    steps = jnp.tril(jnp.broadcast_to(scales, (len(y), len(y))))
    level = sample("level", dist.MultivariateNormal(jnp.zeros(len(y)), scale_tril=steps))
    for t in range(len(y)):
        numpyro.deterministic(f"level_{t}", level[t])
    sample("y", dist.Normal(level, sd_noise), obs=y)


def stochastic_volatility_1000(y):
    sigma = sample("sigma", dist.HalfNormal(0.5))
    start = sample("start", dist.Normal(-1.0, 2.0))
    steps = sample("steps", dist.Normal(0.0, sigma).expand([len(y)]))
    sample("y", dist.Normal(0.0, jnp.exp((start + jnp.cumsum(steps)) / 2)), obs=y)


def stochastic_volatility_100_loop(y):
    mu = sample("mu", dist.Normal(0.0, 3.0))
    phi = sample("phi", dist.Beta(20.0, 1.5))
    sigma = sample("sigma", dist.HalfNormal(0.5))
    z = sample("z", dist.Normal(jnp.zeros(len(y)), 1.0))

    def step(h, noise):
        h = mu + phi * (h - mu) + sigma * noise
        return h, h

    first = mu + sigma / jnp.sqrt(1 - phi**2) * z[0]
    _, path = jax.lax.scan(step, first, z[1:])
    volatility = jnp.exp(jnp.concatenate([first[None], path]) / 2)
    sample("y", dist.Normal(0.0, volatility), obs=y)
