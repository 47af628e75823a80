# SPDX-License-Identifier: Apache-2.0
"""Regressions of numbers, counts, classes, ranks and times."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from benchmarks.zoo.registry import add, floats, integers


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def _design(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, columns)), rng


def _coin_data() -> tuple:
    return floats([1, 1, 1, 0, 1, 1, 1, 1])


@add(_coin_data)
def coin(flips):
    fairness = pyro.sample("fairness", dist.Beta(2.0, 2.0))
    with pyro.plate("flips", len(flips)):
        pyro.sample("flip", dist.Bernoulli(fairness), obs=flips)


def _diabetes_data() -> tuple:
    x, y = load_diabetes(return_X_y=True)
    return floats(_standardised(x), _standardised(y))


@add(_diabetes_data)
def linear_diabetes(x, y):
    weights = pyro.sample("weights", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    bias = pyro.sample("bias", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.Exponential(1.0))
    mean = x @ weights + bias
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mean, sigma), obs=y)


def _breast_cancer_data() -> tuple:
    x, y = load_breast_cancer(return_X_y=True)
    return floats(_standardised(x), y)


@add(_breast_cancer_data)
def logistic_breast_cancer(x, y):
    with pyro.plate("features", x.shape[1]):
        w = pyro.sample("w", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    logits = x @ w + b
    with pyro.plate("data", x.shape[0]):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def _poisson_data() -> tuple:
    x, rng = _design(80, 3, 1)
    exposure = rng.uniform(0.5, 5, 80)
    y = rng.poisson(exposure * np.exp(0.3 + x @ [0.5, -0.8, 0.0]))
    return floats(x, exposure, y)


@add(_poisson_data)
def poisson_exposure(x, exposure, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(x.shape[1]), 2.5).to_event(1))
    rate = exposure * torch.exp(intercept + x.matmul(beta))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def _negative_binomial_data() -> tuple:
    x, rng = _design(100, 4, 2)
    mean = np.exp(1.0 + x @ [0.4, 0.0, -0.6, 0.2])
    return floats(x, rng.negative_binomial(1.5, 1.5 / (1.5 + mean)))


@add(_negative_binomial_data)
def negative_binomial(x, y):
    alpha = pyro.sample("alpha", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.size(1)]).to_event(1))
    phi = pyro.sample("phi", dist.HalfCauchy(2.0))
    mu = (alpha + x @ beta).exp()
    with pyro.plate("rows", x.size(0)):
        pyro.sample("y", dist.NegativeBinomial(total_count=phi, logits=(mu / phi).log()), obs=y)


def _ordinal_data() -> tuple:
    x, rng = _design(100, 2, 3)
    latent = x @ [1.0, -0.5] + rng.logistic(size=100)
    return (*floats(x), integers(np.digitize(latent, [-2.0, -0.5, 0.5, 2.0])))


@add(_ordinal_data)
def ordinal(x, y):
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    base = dist.Normal(0.0, 3.0).expand([4]).to_event(1)
    cutpoints = pyro.sample(
        "cutpoints", dist.TransformedDistribution(base, dist.transforms.OrderedTransform())
    )
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(x @ beta, cutpoints), obs=y)


def _counts_data() -> tuple:
    rng = np.random.default_rng(4)
    theta = rng.dirichlet([4.0, 2.0, 1.0, 0.5, 2.5], size=12)
    return floats([rng.multinomial(50, row) for row in theta])


@add(_counts_data)
def dirichlet_multinomial(counts):
    num_groups, num_classes = counts.shape
    share = pyro.sample("share", dist.Dirichlet(torch.ones(num_classes)))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.1))
    with pyro.plate("groups", num_groups):
        theta = pyro.sample("theta", dist.Dirichlet(concentration * share))
        pyro.sample("counts", dist.Multinomial(total_count=50, probs=theta), obs=counts)


def _zero_inflated_data() -> tuple:
    x, rng = _design(150, 2, 5)
    y = rng.poisson(np.exp(0.8 + x @ [0.6, -0.3])) * (rng.random(150) > 0.3)
    return floats(x, y)


@add(_zero_inflated_data)
def zero_inflated_poisson(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.ZeroInflatedPoisson(rate=(a + x @ b).exp(), gate=gate), obs=y)


def _student_data() -> tuple:
    x, rng = _design(60, 2, 6)
    return floats(x, 1.0 + x @ [2.0, -1.0] + 0.5 * rng.standard_t(2.5, 60))


@add(_student_data)
def student_robust(x, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(5.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(nu, intercept + x @ beta, sigma), obs=y)


def _survival_data() -> tuple:
    x, rng = _design(120, 3, 7)
    time = rng.weibull(1.6, 120) * np.exp(1.0 + x @ [0.5, 0.0, -0.4])
    end = rng.uniform(1.0, 6.0, 120)
    return (*floats(x, np.minimum(time, end)), torch.as_tensor(time > end))


@add(_survival_data)
def weibull_survival(x, time, censored):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 3.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    scale = torch.exp(intercept + x @ beta)
    seen = ~censored
    with pyro.plate("seen", int(seen.sum())):
        pyro.sample("time", dist.Weibull(scale[seen], shape), obs=time[seen])
    with pyro.plate("censored", int(censored.sum())):
        # Such a time is after the end of the study.
        pyro.factor("survives", -((time[censored] / scale[censored]) ** shape))


def _wine_data() -> tuple:
    x, y = load_wine(return_X_y=True)
    return (*floats(_standardised(x)), integers(y))


@add(_wine_data)
def softmax_wine(x, y):
    num_features, num_classes = x.shape[1], 3
    with pyro.plate("classes", num_classes):
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        with pyro.plate("features", num_features):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(logits=x @ w + b), obs=y)


def _heteroscedastic_data() -> tuple:
    rng = np.random.default_rng(8)
    x = np.sort(rng.uniform(-2, 2, 70))
    return floats(x, 0.5 + x - 0.4 * x**2 + np.exp(-1 + 0.6 * x) * rng.normal(size=70))


@add(_heteroscedastic_data)
def heteroscedastic(x, y):
    coefficients = pyro.sample("coefficients", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    log_scale = pyro.sample("log_scale", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    powers = torch.stack([torch.ones_like(x), x, x**2], dim=-1)
    mean = pyro.deterministic("mean", powers @ coefficients)
    scale = torch.nn.functional.softplus(powers[:, :2] @ log_scale)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)
