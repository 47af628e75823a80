# SPDX-License-Identifier: Apache-2.0
"""Hierarchical models of 60 to 1,000 groups with priors of several families."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats, integers


def _hospital_data() -> tuple:
    rng = np.random.default_rng(201)
    patients = rng.integers(10, 200, 120)
    logit = -1.5 + 0.5 * rng.normal(size=120)
    return floats(patients, rng.binomial(patients, 1 / (1 + np.exp(-logit))))


@add(_hospital_data)
def hospitals_loop_120(patients, deaths):
    """One site for each hospital, in a Python loop."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    for i in range(len(patients)):
        theta = pyro.sample(f"theta_{i}", dist.Normal(mu, tau))
        pyro.sample(f"y_{i}", dist.Binomial(patients[i], logits=theta), obs=deaths[i])


def _negative_binomial_data() -> tuple:
    rng = np.random.default_rng(202)
    group = np.repeat(np.arange(1000), 3)
    exposure = rng.uniform(0.5, 3.0, 3000)
    x = rng.normal(size=3000)
    mean = exposure * np.exp(0.7 + 0.5 * rng.normal(size=1000)[group] + 0.3 * x)
    y = rng.poisson(rng.gamma(3.0, mean / 3.0))
    return integers(group), *floats(exposure, x, y)


@add(_negative_binomial_data)
def negative_binomial_1000(group, exposure, x, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    phi = pyro.sample("phi", dist.Gamma(2.0, 0.5))
    with pyro.plate("groups", 1000):
        effect = pyro.sample("effect", dist.Normal(mu, tau))
    mean = exposure * torch.exp(effect[..., group] + slope * x)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.GammaPoisson(phi, phi / mean), obs=y)


def _beta_binomial_data() -> tuple:
    rng = np.random.default_rng(203)
    trials = rng.integers(5, 60, 300)
    return floats(trials, rng.binomial(trials, rng.beta(0.3 * 8, 0.7 * 8, 300)))


@add(_beta_binomial_data)
def beta_binomial_300(trials, hits):
    mean = pyro.sample("mean", dist.Beta(1.0, 1.0))
    concentration = pyro.sample("concentration", dist.HalfCauchy(20.0))
    with pyro.plate("groups", len(trials)):
        rate = pyro.sample("rate", dist.Beta(mean * concentration, (1 - mean) * concentration))
        pyro.sample("hits", dist.Binomial(trials, rate), obs=hits)


def _dirichlet_data() -> tuple:
    rng = np.random.default_rng(204)
    shares = rng.dirichlet([1.0, 2.0, 4.0, 0.7, 2.5], 60)
    return floats(np.stack([rng.multinomial(40, share) for share in shares]))


@add(_dirichlet_data)
def dirichlet_groups(counts):
    alpha = pyro.sample("alpha", dist.Gamma(2.0, 0.5).expand([counts.shape[1]]).to_event(1))
    with pyro.plate("groups", len(counts)):
        shares = pyro.sample("shares", dist.Dirichlet(alpha))
        pyro.sample("counts", dist.Multinomial(40, shares), obs=counts)


def _frailty_data() -> tuple:
    rng = np.random.default_rng(205)
    cluster = np.repeat(np.arange(150), 4)
    treated = rng.integers(0, 2, 600)
    frailty = rng.gamma(1.5, 1 / 1.5, 150)[cluster]
    rate = frailty * np.exp(-0.5 - 0.7 * treated)
    time = (rng.exponential(size=600) / rate) ** (1 / 1.4)
    return integers(cluster), *floats(treated, np.minimum(time, 3.0), time < 3.0)


@add(_frailty_data)
def weibull_frailty(cluster, treated, time, died):
    """Weibull survival times with gamma frailties of clusters, censored."""
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    variance = pyro.sample("variance", dist.HalfNormal(1.0))
    with pyro.plate("clusters", 150):
        frailty = pyro.sample("frailty", dist.Gamma(1 / variance, 1 / variance))
    rate = frailty[..., cluster] * torch.exp(intercept + effect * treated)
    log_hazard = rate.log() + shape.log() + (shape - 1) * time.log()
    with pyro.plate("data", len(time)):
        pyro.factor("survival", died * log_hazard - rate * time**shape)


def _zero_inflated_data() -> tuple:
    rng = np.random.default_rng(206)
    group = np.repeat(np.arange(200), 8)
    rate = np.exp(1.0 + 0.5 * rng.normal(size=200))[group]
    gate = 1 / (1 + np.exp(-(-0.7 + 0.8 * rng.normal(size=200))))[group]
    return integers(group), *floats(rng.poisson(rate) * (rng.random(1600) > gate))


@add(_zero_inflated_data)
def zero_inflated_200(group, y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(2)).to_event(1))
    with pyro.plate("groups", 200):
        log_rate = pyro.sample("log_rate", dist.Normal(mean[0], sd[0]))
        gate = pyro.sample("gate", dist.Normal(mean[1], sd[1]))
    with pyro.plate("data", len(y)):
        counts = dist.ZeroInflatedPoisson(log_rate[group].exp(), gate_logits=gate[group])
        pyro.sample("y", counts, obs=y)


def _gamma_data() -> tuple:
    rng = np.random.default_rng(207)
    group = rng.integers(0, 200, 1000)
    x = rng.normal(size=1000)
    mean = np.exp(1.0 + 0.4 * rng.normal(size=200)[group] - 0.3 * x)
    return integers(group), *floats(x, rng.gamma(2.5, mean / 2.5))


@add(_gamma_data)
def gamma_glm_200(group, x, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.Exponential(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.Gamma(2.0, 0.5))
    with pyro.plate("groups", 200):
        effect = pyro.sample("effect", dist.Normal(mu, tau))
    mean = torch.exp(effect[..., group] + slope * x)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Gamma(shape, shape / mean), obs=y)


def _school_data() -> tuple:
    rng = np.random.default_rng(208)
    school = np.repeat(np.arange(100), 8)
    x = rng.normal(size=(800, 2))
    scale = np.diag([0.8, 0.4, 0.3]) @ np.linalg.cholesky(
        [[1, 0.4, -0.2], [0.4, 1, 0.3], [-0.2, 0.3, 1]]
    )
    effect = (rng.normal(size=(100, 3)) @ scale.T + [1.0, 0.5, -0.3])[school]
    y = effect[:, 0] + effect[:, 1] * x[:, 0] + effect[:, 2] * x[:, 1]
    return integers(school), *floats(x, y + rng.normal(size=800))


@add(_school_data)
def schools_lkj_100(school, x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([3]).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("schools", 100):
        scale_tril = torch.diag_embed(tau) @ corr
        effect = pyro.sample("effect", dist.MultivariateNormal(mean, scale_tril=scale_tril))
    own = effect[school]
    with pyro.plate("data", len(y)):
        location = own[:, 0] + own[:, 1] * x[:, 0] + own[:, 2] * x[:, 1]
        pyro.sample("y", dist.Normal(location, sigma), obs=y)


def _probit_data() -> tuple:
    rng = np.random.default_rng(209)
    subject, item = (a.ravel() for a in np.meshgrid(np.arange(80), np.arange(40)))
    x = rng.integers(0, 2, 3200) - 0.5
    slope = 0.5 + 0.4 * rng.normal(size=80)
    eta = 0.2 + 0.6 * rng.normal(size=80)[subject] + 0.5 * rng.normal(size=40)[item]
    return (
        integers(subject),
        integers(item),
        *floats(x, rng.normal(size=3200) < eta + slope[subject] * x),
    )


@add(_probit_data)
def probit_crossed(subject, item, x, y):
    """Crossed intercepts of subjects and items, and slopes of subjects."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(torch.ones(3)).to_event(1))
    with pyro.plate("subjects", 80):
        ability = pyro.sample("ability", dist.Normal(mean[0], sd[0]))
        slope = pyro.sample("slope", dist.Normal(mean[1], sd[1]))
    with pyro.plate("items", 40):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, sd[2]))
    eta = ability[subject] + slope[subject] * x - difficulty[item]
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(dist.Normal(0.0, 1.0).cdf(eta)), obs=y)


def _studies_data() -> tuple:
    rng = np.random.default_rng(210)
    errors = rng.uniform(0.1, 0.6, 120)
    effects = 0.3 + 0.25 * rng.standard_t(3, 120)
    return floats(effects + errors * rng.normal(size=120), errors)


@add(_studies_data)
def meta_student(y, errors):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("studies", len(y)):
        theta = pyro.sample("theta", dist.StudentT(nu, mu, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=y)


def _rain_data() -> tuple:
    rng = np.random.default_rng(211)
    altitude = rng.normal(size=60)
    location = 30 + 4 * altitude + 3 * rng.normal(size=60)
    scale = np.exp(2.0 + 0.2 * rng.normal(size=60))
    return floats(altitude, rng.gumbel(location, scale, (20, 60)))


@add(_rain_data)
def gumbel_stations(altitude, y):
    """Yearly maxima of rain at 60 stations, rows are years."""
    mu = pyro.sample("mu", dist.Normal(30.0, 10.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    log_scale = pyro.sample("log_scale", dist.Normal(2.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    with pyro.plate("stations", y.shape[1], dim=-1):
        location = pyro.sample("location", dist.Normal(mu + slope * altitude, tau))
        scale = pyro.sample("scale", dist.LogNormal(log_scale, spread))
        with pyro.plate("years", y.shape[0], dim=-2):
            pyro.sample("y", dist.Gumbel(location, scale), obs=y)
