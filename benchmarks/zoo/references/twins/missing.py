# SPDX-License-Identifier: Apache-2.0
"""Twins of missing and mismeasured data, deterministic sites and energies."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def missing_covariates(x, y):
    mu = sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sd = sample("sd", dist.HalfNormal(2.0).expand([2]).to_event(1))
    missing = np.isnan(x)
    row, column = np.nonzero(missing)
    imputed = sample("imputed", dist.Normal(mu[column], sd[column]))
    complete = jnp.asarray(x).at[row, column].set(imputed)
    row, column = np.nonzero(~missing)
    sample("x", dist.Normal(mu[column], sd[column]), obs=x[row, column])
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    beta = sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    sample("y", dist.Normal(intercept + complete @ beta, sigma), obs=y)


def measurement_error(x_seen, x_error, y):
    mu_x = sample("mu_x", dist.Normal(10.0, 5.0))
    sd_x = sample("sd_x", dist.HalfCauchy(5.0))
    alpha = sample("alpha", dist.Normal(0.0, 10.0))
    beta = sample("beta", dist.Normal(0.0, 5.0))
    sigma = sample("sigma", dist.HalfCauchy(5.0))
    x = sample("x", dist.Normal(mu_x, sd_x).expand([len(y)]))
    sample("x_seen", dist.Normal(x, x_error), obs=x_seen)
    sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def deterministic_sites(dose, response):
    log_top = sample("log_top", dist.Normal(2.0, 1.0))
    log_half = sample("log_half", dist.Normal(0.0, 1.0))
    spread = sample("spread", dist.HalfNormal(0.5))
    sigma = sample("sigma", dist.HalfNormal(1.0))
    raw = sample("raw", dist.Normal(0.0, 1.0).expand([len(dose), 1]))
    effect = jnp.exp(log_top + spread * raw) * dose / (jnp.exp(log_half) + dose)
    sample("response", dist.Normal(effect, sigma), obs=response)


def factor_energy():
    x = sample("x", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    bend = 2.0 * (x[1] - 0.5 * x[0] ** 2) ** 2
    energy = 0.5 * x[0] ** 2 + bend + 0.5 * (x[2] - jnp.sin(2 * x[0])) ** 2 / 0.25
    numpyro.factor("energy", -energy)
