# SPDX-License-Identifier: Apache-2.0
"""Twins of the Gaussian processes."""

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import sample


def rbf(x, variance, lengthscale, jitter=1e-4):
    squared = (x[:, None] - x[None, :]) ** 2
    return variance * jnp.exp(-0.5 * squared / lengthscale**2) + jitter * jnp.eye(len(x))


def gp_regression(x, y):
    variance = sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = sample("noise", dist.LogNormal(-1.0, 1.0))
    covariance = rbf(x, variance, lengthscale) + noise**2 * jnp.eye(len(x))
    sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), covariance), obs=y)


def gp_poisson(x, counts):
    eta = sample("eta", dist.HalfNormal(1.0))
    rho = sample("rho", dist.InverseGamma(5.0, 5.0))
    mu = sample("mu", dist.Normal(0.0, 2.0))
    L = jnp.linalg.cholesky(rbf(x, eta**2, rho, jitter=1e-6))
    z = sample("z", dist.Normal(jnp.zeros(len(x)), 1.0))
    sample("counts", dist.Poisson(jnp.exp(mu + L @ z)), obs=counts)


def gp_bernoulli(x, y):
    lengthscale = sample("lengthscale", dist.Gamma(3.0, 3.0))
    variance = sample("variance", dist.Gamma(2.0, 1.0))
    K = rbf(x, variance, lengthscale, jitter=1e-3)
    f = sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), covariance_matrix=K))
    sample("y", dist.Bernoulli(logits=f), obs=y)


def car_lattice(adjacency, exposure, counts):
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.Gamma(2.0, 1.0))
    alpha = sample("alpha", dist.Beta(4.0, 1.0))
    # Of the precision ``tau * (degree - alpha * adjacency)``; needs no factor of it.
    phi = sample("phi", dist.CAR(jnp.zeros(len(counts)), alpha, tau, adjacency))
    sample("counts", dist.Poisson(exposure * jnp.exp(intercept + phi)), obs=counts)
