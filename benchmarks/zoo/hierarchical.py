# SPDX-License-Identifier: Apache-2.0
"""Mixed effects: correlated, crossed, nested; 8 to 1,000 groups."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats, integers


def _mixed_poisson_data() -> tuple:
    rng = np.random.default_rng(11)
    group = np.repeat(np.arange(30), 8)
    x = rng.normal(size=240)
    scale = np.diag([0.6, 0.4, 0.3]) @ np.linalg.cholesky([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]])
    effect = rng.normal(size=(30, 3)) @ scale.T + [0.8, 0.3, -0.2]
    z = rng.integers(0, 2, 240)
    rate = np.exp(effect[group, 0] + effect[group, 1] * x + effect[group, 2] * z)
    return integers(group), *floats(x, z, rng.poisson(rate))


@add(_mixed_poisson_data)
def mixed_poisson_lkj(group, x, z, y):
    num_groups = int(group.max()) + 1
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([3]).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    scale_tril = tau.unsqueeze(-1) * corr
    with pyro.plate("groups", num_groups):
        effect = pyro.sample("effect", dist.MultivariateNormal(mean, scale_tril=scale_tril))
    log_rate = effect[group, 0] + effect[group, 1] * x + effect[group, 2] * z
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


def _mixed_linear_data() -> tuple:
    rng = np.random.default_rng(12)
    group = rng.integers(0, 300, 1500)
    x = rng.normal(size=1500)
    effect = rng.normal(size=(300, 2)) @ np.array([[0.8, 0.2], [0.0, 0.3]]) + [1.0, -0.5]
    y = effect[group, 0] + effect[group, 1] * x + 0.7 * rng.normal(size=1500)
    return integers(group), *floats(x, y)


@add(_mixed_linear_data)
def mixed_linear_lkj_300(group, x, y):
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    sd = pyro.sample("sd", dist.Exponential(torch.ones(2)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(2, concentration=1.0))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("groups", 300):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    u = z @ (torch.diag(sd) @ corr).T
    mean = b[0] + u[group, 0] + (b[1] + u[group, 1]) * x
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def _crossed_data() -> tuple:
    rng = np.random.default_rng(13)
    subject, item = (a.ravel() for a in np.meshgrid(np.arange(25), np.arange(12)))
    condition = rng.integers(0, 2, 300)
    logit = 0.3 + 0.8 * condition + rng.normal(size=25)[subject] + 0.6 * rng.normal(size=12)[item]
    y = rng.random(300) < 1 / (1 + np.exp(-logit))
    return integers(subject), integers(item), *floats(condition, y)


@add(_crossed_data)
def crossed_logit(subject, item, condition, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.5))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.5))
    sd_subject = pyro.sample("sd_subject", dist.HalfCauchy(1.0))
    sd_item = pyro.sample("sd_item", dist.HalfCauchy(1.0))
    with pyro.plate("subjects", 25):
        u = pyro.sample("u", dist.Normal(0.0, sd_subject))
    with pyro.plate("items", 12):
        v = pyro.sample("v", dist.Normal(0.0, sd_item))
    logits = intercept + slope * condition + u[subject] + v[item]
    with pyro.plate("trials", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def _nested_data() -> tuple:
    rng = np.random.default_rng(14)
    district = np.repeat(np.arange(8), 5)
    school = np.repeat(np.arange(40), 6)
    mean = 0.5 + 0.7 * rng.normal(size=8)[district] + 0.4 * rng.normal(size=40)
    return integers(district), integers(school), *floats(mean[school] + rng.normal(size=240))


@add(_nested_data)
def nested_schools(district, school, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    sd_district = pyro.sample("sd_district", dist.HalfNormal(2.0))
    sd_school = pyro.sample("sd_school", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("districts", 8):
        district_mean = pyro.sample("district_mean", dist.Normal(mu, sd_district))
    with pyro.plate("schools", 40):
        school_mean = pyro.sample("school_mean", dist.Normal(district_mean[district], sd_school))
    with pyro.plate("pupils", len(y)):
        pyro.sample("y", dist.Normal(school_mean[school], sigma), obs=y)


def _players_data() -> tuple:
    rng = np.random.default_rng(15)
    at_bats = rng.integers(20, 60, 18)
    return floats(at_bats, rng.binomial(at_bats, rng.beta(20, 55, 18)))


@add(_players_data)
def binomial_players(at_bats, hits):
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", len(hits)):
        ability = pyro.sample("ability", dist.Beta(phi * kappa, (1 - phi) * kappa))
        pyro.sample("hits", dist.Binomial(at_bats, ability), obs=hits)


def _groups_data() -> tuple:
    rng = np.random.default_rng(16)
    mean = 1.5 + 0.8 * rng.normal(size=1000)
    return floats(mean[:, None] + rng.normal(size=(1000, 3)))


@add(_groups_data)
def groups_1000(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(5.0))
    with pyro.plate("groups", y.shape[0], dim=-2):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with pyro.plate("repeats", y.shape[1], dim=-1):
            pyro.sample("y", dist.Normal(theta, sigma), obs=y)
