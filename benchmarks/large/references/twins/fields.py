# SPDX-License-Identifier: Apache-2.0
"""Twins of the Gaussian processes, the map and the network."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def _smooth(t, z, length, amplitude):
    covariance = amplitude**2 * jnp.exp(-0.5 * ((t[:, None] - t) / length) ** 2)
    return jnp.linalg.cholesky(covariance + 1e-5 * jnp.eye(len(t))) @ z


def cox_process_100(t, counts):
    mean = sample("mean", dist.Normal(0.0, 2.0))
    length = sample("length", dist.InverseGamma(4.0, 6.0))
    amplitude = sample("amplitude", dist.HalfNormal(1.5))
    z = sample("z", dist.Normal(0.0, 1.0).expand([len(t)]))
    sample("counts", dist.Poisson(jnp.exp(mean + _smooth(t, z, length, amplitude))), obs=counts)


def gp_student(t, y):
    nu = sample("nu", dist.Gamma(2.0, 0.1))
    sigma = sample("sigma", dist.HalfNormal(1.0))
    length = sample("length", dist.InverseGamma(4.0, 6.0))
    amplitude = sample("amplitude", dist.HalfNormal(2.0))
    z = sample("z", dist.Normal(0.0, 1.0).expand([len(t)]))
    sample("y", dist.StudentT(nu, _smooth(t, z, length, amplitude), sigma), obs=y)


def disease_map(first, second, x, expected, y):
    intercept = sample("intercept", dist.Normal(0.0, 1.0))
    slope = sample("slope", dist.Normal(0.0, 1.0))
    sd_smooth = sample("sd_smooth", dist.HalfNormal(1.0))
    sd_rough = sample("sd_rough", dist.HalfNormal(1.0))
    smooth = sample("smooth", dist.Normal(0.0, 10.0).expand([len(y)]))
    rough = sample("rough", dist.Normal(0.0, 1.0).expand([len(y)]))
    numpyro.factor("neighbours", -0.5 * ((smooth[first] - smooth[second]) ** 2).sum())
    sample("centre", dist.Normal(smooth.mean(), 0.01), obs=0.0)
    log_risk = intercept + slope * x + sd_smooth * smooth + sd_rough * rough
    sample("y", dist.Poisson(expected * jnp.exp(log_risk)), obs=y)


def latent_space(known, first, second, tie):
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    slope = sample("slope", dist.LogNormal(0.0, 0.5))
    hidden = sample("hidden", dist.Normal(jnp.zeros(2), 1.5).expand([60, 2]))
    position = jnp.concatenate([known, hidden])
    distance = jnp.sqrt(((position[first] - position[second]) ** 2).sum(-1) + 1e-6)
    sample("tie", dist.Bernoulli(logits=intercept - slope * distance), obs=tie)
