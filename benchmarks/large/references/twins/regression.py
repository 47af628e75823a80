# SPDX-License-Identifier: Apache-2.0
"""Twins of the regressions."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.nn import sigmoid
from numpyro import sample


def bayesian_lasso_200(x, y):
    tau = sample("tau", dist.HalfCauchy(0.5))
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    beta = sample("beta", dist.Laplace(0.0, tau).expand([x.shape[1]]))
    sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def horseshoe_poisson(x, y):
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.HalfCauchy(0.2))
    lam = sample("lam", dist.HalfCauchy(1.0).expand([x.shape[1]]))
    z = sample("z", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
    sample("y", dist.Poisson(jnp.exp(intercept + x @ (z * lam * tau))), obs=y)


def cauchy_sparse(x, y):
    intercept = sample("intercept", dist.Normal(0.0, 5.0))
    tau = sample("tau", dist.HalfNormal(0.5))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    beta = sample("beta", dist.Cauchy(0.0, tau).expand([x.shape[1]]))
    sample("y", dist.Normal(intercept + x @ beta, sigma), obs=y)


def additive_splines(basis, y):
    num_functions, num_knots = basis.shape[1:]
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    sigma = sample("sigma", dist.Exponential(1.0))
    tau = sample("tau", dist.HalfNormal(0.5).expand([num_functions, 1]))
    z = sample("z", dist.Normal(0.0, 1.0).expand([num_functions, num_knots]))
    walk = jnp.cumsum(tau * z, -1)
    smooth = walk - walk.mean(-1, keepdims=True)
    mean = intercept + basis.reshape(len(y), -1) @ smooth.reshape(-1)
    sample("y", dist.Normal(mean, sigma), obs=y)


def measurement_error_300(measured, y):
    mu = sample("mu", dist.Normal(0.0, 3.0))
    tau = sample("tau", dist.HalfNormal(2.0))
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    slope = sample("slope", dist.Normal(0.0, 2.0))
    x = sample("x", dist.Normal(mu, tau).expand([len(y)]))
    sample("measured", dist.Normal(x, 0.6), obs=measured)
    sample("y", dist.Bernoulli(logits=intercept + slope * x), obs=y)


def irt_3pl(y):
    num_people, num_items = y.shape
    slope = sample("slope", dist.LogNormal(0.0, 0.5).expand([num_items]))
    difficulty = sample("difficulty", dist.Normal(0.0, 1.5).expand([num_items]))
    guess = sample("guess", dist.Beta(5.0, 17.0).expand([num_items]))
    ability = sample("ability", dist.Normal(0.0, 1.0).expand([num_people, 1]))
    correct = sigmoid(slope * (ability - difficulty))
    sample("y", dist.Bernoulli(guess + (1 - guess) * correct), obs=y)


def bradley_terry_100(home, away, won):
    sd = sample("sd", dist.HalfNormal(1.0))
    advantage = sample("advantage", dist.Normal(0.0, 1.0))
    skill = sample("skill", dist.Normal(0.0, sd).expand([100]))
    sample("won", dist.Bernoulli(logits=skill[home] - skill[away] + advantage), obs=won)
