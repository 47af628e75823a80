# SPDX-License-Identifier: Apache-2.0
"""Twins of the hierarchical models."""

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import sample

VAGUE = dist.Gamma(0.001, 0.001)


def rats(age, weight):
    alpha_mean = sample("alpha_mean", dist.Normal(0.0, 1000.0))
    beta_mean = sample("beta_mean", dist.Normal(0.0, 1000.0))
    alpha_tau, beta_tau = sample("alpha_tau", VAGUE), sample("beta_tau", VAGUE)
    tau = sample("tau", VAGUE)
    alpha = sample("alpha", dist.Normal(alpha_mean, alpha_tau**-0.5).expand([30, 1]))
    beta = sample("beta", dist.Normal(beta_mean, beta_tau**-0.5).expand([30, 1]))
    sample("weight", dist.Normal(alpha + beta * (age - age.mean()), tau**-0.5), obs=weight)


def pump(time, failures):
    alpha = sample("alpha", dist.Exponential(1.0))
    beta = sample("beta", dist.Gamma(0.1, 1.0))
    theta = sample("theta", dist.Gamma(alpha, beta).expand([10]))
    sample("failures", dist.Poisson(theta * time), obs=failures)


def seeds(planted, germinated, variety, extract):
    names = ("alpha0", "alpha1", "alpha2", "alpha12")
    alpha = [sample(name, dist.Normal(0.0, 1000.0)) for name in names]
    tau = sample("tau", VAGUE)
    b = sample("b", dist.Normal(0.0, tau**-0.5).expand([21]))
    logits = alpha[0] + alpha[1] * variety + alpha[2] * extract
    logits = logits + alpha[3] * variety * extract + b
    sample("germinated", dist.Binomial(planted, logits=logits), obs=germinated)


def surgical(operations, deaths):
    mu, tau = sample("mu", dist.Normal(0.0, 1000.0)), sample("tau", VAGUE)
    b = sample("b", dist.Normal(mu, tau**-0.5).expand([12]))
    sample("deaths", dist.Binomial(operations, logits=b), obs=deaths)


def salm(dose, colonies):
    names = ("alpha", "beta", "gamma")
    alpha, beta, gamma = (sample(name, dist.Normal(0.0, 1000.0)) for name in names)
    tau = sample("tau", VAGUE)
    effect = sample("effect", dist.Normal(0.0, tau**-0.5).expand([6, 3]))
    x = dose[:, None]
    rate = jnp.exp(alpha + beta * jnp.log(x + 10) + gamma * x + effect)
    sample("colonies", dist.Poisson(rate), obs=colonies)
