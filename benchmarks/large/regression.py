# SPDX-License-Identifier: Apache-2.0
"""Sparse regressions, splines, and covariates measured with errors."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats, integers


def _lasso_data() -> tuple:
    rng = np.random.default_rng(101)
    x = rng.normal(size=(100, 200))
    beta = np.zeros(200)
    beta[:6] = [2.0, -2.0, 1.5, 1.0, -1.0, 0.5]
    y = rng.random(100) < 1 / (1 + np.exp(-(0.3 + x @ beta)))
    return floats(x, y)


@add(_lasso_data)
def bayesian_lasso_200(x, y):
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    with pyro.plate("features", x.shape[1]):
        beta = pyro.sample("beta", dist.Laplace(0.0, tau))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def _horseshoe_data() -> tuple:
    rng = np.random.default_rng(102)
    x = rng.normal(size=(150, 100))
    beta = np.zeros(100)
    beta[:5] = [0.8, -0.6, 0.5, 0.4, -0.3]
    return floats(x, rng.poisson(np.exp(0.5 + x @ beta)))


@add(_horseshoe_data)
def horseshoe_poisson(x, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfCauchy(0.2))
    with pyro.plate("features", x.shape[1]):
        lam = pyro.sample("lam", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    beta = pyro.deterministic("beta", z * lam * tau)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(torch.exp(intercept + x @ beta)), obs=y)


def _cauchy_data() -> tuple:
    rng = np.random.default_rng(103)
    x = rng.normal(size=(200, 150))
    beta = 0.02 * rng.standard_cauchy(150)
    return floats(x, 1.0 + x @ beta + 0.7 * rng.normal(size=200))


@add(_cauchy_data)
def cauchy_sparse(x, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    beta = pyro.sample("beta", dist.Cauchy(0.0, tau).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(intercept + x @ beta, sigma), obs=y)


def _spline_data() -> tuple:
    rng = np.random.default_rng(104)
    x = rng.random((250, 3))
    knots = np.linspace(0, 1, 40)
    basis = np.maximum(0, 1 - np.abs(x[:, :, None] - knots) * 39)  # linear B-splines
    mean = 1 + np.sin(6 * x[:, 0]) + 2 * (x[:, 1] - 0.5) ** 2 + 0.5 * x[:, 2]
    return floats(basis, mean + 0.3 * rng.normal(size=250))


@add(_spline_data)
def additive_splines(basis, y):
    """Three smooth functions, each a random walk of 40 coefficients."""
    num_functions, num_knots = basis.shape[1:]
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    with pyro.plate("functions", num_functions, dim=-2):
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        with pyro.plate("knots", num_knots, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
    walk = (tau * z).cumsum(-1)
    smooth = walk - walk.mean(-1, keepdim=True)
    mean = intercept + torch.einsum("nfk,...fk->...n", basis, smooth)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def _measurement_data() -> tuple:
    rng = np.random.default_rng(105)
    x = 1.0 + 1.2 * rng.normal(size=300)
    measured = x + 0.6 * rng.normal(size=300)
    y = rng.random(300) < 1 / (1 + np.exp(-(-0.8 + 1.1 * x)))
    return floats(measured, y)


@add(_measurement_data)
def measurement_error_300(measured, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(mu, tau))
        pyro.sample("measured", dist.Normal(x, 0.6), obs=measured)
        pyro.sample("y", dist.Bernoulli(logits=intercept + slope * x), obs=y)


def _three_parameter_data() -> tuple:
    rng = np.random.default_rng(106)
    ability, difficulty = rng.normal(size=150), rng.normal(size=25)
    slope, guess = np.exp(0.4 * rng.normal(size=25)), rng.beta(5, 20, 25)
    logit = slope * (ability[:, None] - difficulty)
    return floats(rng.random((150, 25)) < guess + (1 - guess) / (1 + np.exp(-logit)))


@add(_three_parameter_data)
def irt_3pl(y):
    num_people, num_items = y.shape
    with pyro.plate("items", num_items, dim=-1):
        slope = pyro.sample("slope", dist.LogNormal(0.0, 0.5))
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.5))
        guess = pyro.sample("guess", dist.Beta(5.0, 17.0))
    with pyro.plate("people", num_people, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("answers", num_items, dim=-1):
            correct = torch.sigmoid(slope * (ability - difficulty))
            pyro.sample("y", dist.Bernoulli(guess + (1 - guess) * correct), obs=y)


def _tournament_data() -> tuple:
    rng = np.random.default_rng(107)
    skill = 0.9 * rng.normal(size=100)
    home = rng.integers(0, 100, 900)
    away = (home + rng.integers(1, 100, 900)) % 100
    won = rng.random(900) < 1 / (1 + np.exp(-(skill[home] - skill[away] + 0.3)))
    return integers(home), integers(away), *floats(won)


@add(_tournament_data)
def bradley_terry_100(home, away, won):
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    advantage = pyro.sample("advantage", dist.Normal(0.0, 1.0))
    with pyro.plate("teams", 100):
        skill = pyro.sample("skill", dist.Normal(0.0, sd))
    with pyro.plate("games", len(won)):
        logits = skill[..., home] - skill[..., away] + advantage
        pyro.sample("won", dist.Bernoulli(logits=logits), obs=won)
