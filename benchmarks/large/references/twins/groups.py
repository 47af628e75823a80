# SPDX-License-Identifier: Apache-2.0
"""Twins of the hierarchical models."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm
from numpyro import sample


def hospitals_loop_120(patients, deaths):
    mu = sample("mu", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.HalfNormal(1.0))
    theta = sample("theta", dist.Normal(mu, tau).expand([len(patients)]))
    for i in range(len(patients)):
        numpyro.deterministic(f"theta_{i}", theta[i])
    sample("y", dist.Binomial(patients, logits=theta), obs=deaths)


def negative_binomial_1000(group, exposure, x, y):
    mu = sample("mu", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.HalfNormal(1.0))
    slope = sample("slope", dist.Normal(0.0, 1.0))
    phi = sample("phi", dist.Gamma(2.0, 0.5))
    effect = sample("effect", dist.Normal(mu, tau).expand([1000]))
    mean = exposure * jnp.exp(effect[group] + slope * x)
    sample("y", dist.GammaPoisson(phi, phi / mean), obs=y)


def beta_binomial_300(trials, hits):
    mean = sample("mean", dist.Beta(1.0, 1.0))
    concentration = sample("concentration", dist.HalfCauchy(20.0))
    prior = dist.Beta(mean * concentration, (1 - mean) * concentration)
    rate = sample("rate", prior.expand([len(trials)]))
    sample("hits", dist.Binomial(trials, rate), obs=hits)


def dirichlet_groups(counts):
    alpha = sample("alpha", dist.Gamma(2.0, 0.5).expand([counts.shape[1]]))
    shares = sample("shares", dist.Dirichlet(alpha).expand([len(counts)]))
    sample("counts", dist.Multinomial(40, shares), obs=counts)


def weibull_frailty(cluster, treated, time, died):
    shape = sample("shape", dist.LogNormal(0.0, 0.5))
    intercept = sample("intercept", dist.Normal(0.0, 2.0))
    effect = sample("effect", dist.Normal(0.0, 1.0))
    variance = sample("variance", dist.HalfNormal(1.0))
    frailty = sample("frailty", dist.Gamma(1 / variance, 1 / variance).expand([150]))
    rate = frailty[cluster] * jnp.exp(intercept + effect * treated)
    log_hazard = jnp.log(rate) + jnp.log(shape) + (shape - 1) * jnp.log(time)
    numpyro.factor("survival", (died * log_hazard - rate * time**shape).sum())


def zero_inflated_200(group, y):
    mean = sample("mean", dist.Normal(jnp.zeros(2), 2.0))
    sd = sample("sd", dist.HalfNormal(jnp.ones(2)))
    log_rate = sample("log_rate", dist.Normal(mean[0], sd[0]).expand([200]))
    gate = sample("gate", dist.Normal(mean[1], sd[1]).expand([200]))
    counts = dist.ZeroInflatedDistribution(
        dist.Poisson(jnp.exp(log_rate[group])), gate_logits=gate[group]
    )
    sample("y", counts, obs=y)


def gamma_glm_200(group, x, y):
    mu = sample("mu", dist.Normal(0.0, 2.0))
    tau = sample("tau", dist.Exponential(1.0))
    slope = sample("slope", dist.Normal(0.0, 1.0))
    shape = sample("shape", dist.Gamma(2.0, 0.5))
    effect = sample("effect", dist.Normal(mu, tau).expand([200]))
    sample("y", dist.Gamma(shape, shape / jnp.exp(effect[group] + slope * x)), obs=y)


def schools_lkj_100(school, x, y):
    mean = sample("mean", dist.Normal(0.0, 2.0).expand([3]))
    tau = sample("tau", dist.HalfNormal(1.0).expand([3]))
    corr = sample("corr", dist.LKJCholesky(3, 2.0))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    prior = dist.MultivariateNormal(mean, scale_tril=jnp.diag(tau) @ corr)
    own = sample("effect", prior.expand([100]))[school]
    location = own[:, 0] + own[:, 1] * x[:, 0] + own[:, 2] * x[:, 1]
    sample("y", dist.Normal(location, sigma), obs=y)


def probit_crossed(subject, item, x, y):
    mean = sample("mean", dist.Normal(jnp.zeros(2), 1.5))
    sd = sample("sd", dist.HalfNormal(jnp.ones(3)))
    ability = sample("ability", dist.Normal(mean[0], sd[0]).expand([80]))
    slope = sample("slope", dist.Normal(mean[1], sd[1]).expand([80]))
    difficulty = sample("difficulty", dist.Normal(0.0, sd[2]).expand([40]))
    eta = ability[subject] + slope[subject] * x - difficulty[item]
    sample("y", dist.Bernoulli(norm.cdf(eta)), obs=y)


def meta_student(y, errors):
    mu = sample("mu", dist.Normal(0.0, 1.0))
    tau = sample("tau", dist.HalfNormal(0.5))
    nu = sample("nu", dist.Gamma(2.0, 0.1))
    theta = sample("theta", dist.StudentT(nu, mu, tau).expand([len(y)]))
    sample("y", dist.Normal(theta, errors), obs=y)


def gumbel_stations(altitude, y):
    mu = sample("mu", dist.Normal(30.0, 10.0))
    slope = sample("slope", dist.Normal(0.0, 5.0))
    tau = sample("tau", dist.HalfNormal(5.0))
    log_scale = sample("log_scale", dist.Normal(2.0, 1.0))
    spread = sample("spread", dist.HalfNormal(0.5))
    location = sample("location", dist.Normal(mu + slope * altitude, tau))
    scale = sample("scale", dist.LogNormal(log_scale, spread).expand([y.shape[1]]))
    sample("y", dist.Gumbel(location, scale), obs=y)
