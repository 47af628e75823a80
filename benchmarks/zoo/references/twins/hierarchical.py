# SPDX-License-Identifier: Apache-2.0
"""Twins of the hierarchies."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def mixed_poisson_lkj(group, x, z, y):
    mean = sample("mean", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    tau = sample("tau", dist.HalfNormal(1.0).expand([3]).to_event(1))
    corr = sample("corr", dist.LKJCholesky(3, 2.0))
    scale_tril = tau[:, None] * corr
    with numpyro.plate("groups", 30):
        effect = sample("effect", dist.MultivariateNormal(mean, scale_tril=scale_tril))
    log_rate = effect[group, 0] + effect[group, 1] * x + effect[group, 2] * z
    sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)


def mixed_linear_lkj_300(group, x, y):
    b = sample("b", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    sd = sample("sd", dist.Exponential(jnp.ones(2)).to_event(1))
    corr = sample("corr", dist.LKJCholesky(2, concentration=1.0))
    sigma = sample("sigma", dist.Exponential(1.0))
    z = sample("z", dist.Normal(jnp.zeros((300, 2)), 1.0))
    u = z @ (jnp.diag(sd) @ corr).T
    mean = b[0] + u[group, 0] + (b[1] + u[group, 1]) * x
    sample("y", dist.Normal(mean, sigma), obs=y)


def crossed_logit(subject, item, condition, y):
    intercept = sample("intercept", dist.Normal(0.0, 1.5))
    slope = sample("slope", dist.Normal(0.0, 1.5))
    sd_subject = sample("sd_subject", dist.HalfCauchy(1.0))
    sd_item = sample("sd_item", dist.HalfCauchy(1.0))
    u = sample("u", dist.Normal(0.0, sd_subject).expand([25]))
    v = sample("v", dist.Normal(0.0, sd_item).expand([12]))
    logits = intercept + slope * condition + u[subject] + v[item]
    sample("y", dist.Bernoulli(logits=logits), obs=y)


def nested_schools(district, school, y):
    mu = sample("mu", dist.Normal(0.0, 5.0))
    sd_district = sample("sd_district", dist.HalfNormal(2.0))
    sd_school = sample("sd_school", dist.HalfNormal(2.0))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    district_mean = sample("district_mean", dist.Normal(mu, sd_district).expand([8]))
    school_mean = sample("school_mean", dist.Normal(district_mean[district], sd_school))
    sample("y", dist.Normal(school_mean[school], sigma), obs=y)


def binomial_players(at_bats, hits):
    phi = sample("phi", dist.Uniform(0.0, 1.0))
    kappa = sample("kappa", dist.Pareto(1.0, 1.5))
    ability = sample("ability", dist.Beta(phi * kappa, (1 - phi) * kappa).expand([18]))
    sample("hits", dist.Binomial(at_bats.astype(int), ability), obs=hits)


def groups_1000(y):
    mu = sample("mu", dist.Normal(0.0, 10.0))
    tau = sample("tau", dist.HalfCauchy(5.0))
    sigma = sample("sigma", dist.HalfCauchy(5.0))
    theta = sample("theta", dist.Normal(mu, tau).expand([1000, 1]))
    sample("y", dist.Normal(theta, sigma), obs=y)
