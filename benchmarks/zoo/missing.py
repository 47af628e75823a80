# SPDX-License-Identifier: Apache-2.0
"""Missing and mismeasured data, deterministic sites and energies."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats


def _missing_data() -> tuple:
    rng = np.random.default_rng(81)
    x = rng.normal(1.0, 1.5, size=(60, 2))
    y = 0.5 + x @ [1.0, -0.7] + 0.6 * rng.normal(size=60)
    x[rng.random((60, 2)) < 0.2] = np.nan
    return floats(x, y)


@add(_missing_data)
def missing_covariates(x, y):
    """Missing covariates are latent variables, inserted in their places."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(2.0).expand([2]).to_event(1))
    missing = torch.isnan(x)
    column = missing.nonzero()[:, 1]
    with pyro.plate("missing", len(column)):
        imputed = pyro.sample("imputed", dist.Normal(mu[column], sd[column]))
    complete = x.clone()
    complete[missing] = imputed
    with pyro.plate("cells", int((~missing).sum())):
        column = (~missing).nonzero()[:, 1]
        pyro.sample("x", dist.Normal(mu[column], sd[column]), obs=x[~missing])
    intercept = pyro.sample("intercept", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(intercept + complete @ beta, sigma), obs=y)


def _mismeasured_data() -> tuple:
    rng = np.random.default_rng(82)
    true = rng.normal(10.0, 2.0, 40)
    error = rng.uniform(0.5, 1.5, 40)
    return floats(true + error * rng.normal(size=40), error, 3.0 + 0.8 * true + rng.normal(size=40))


@add(_mismeasured_data)
def measurement_error(x_seen, x_error, y):
    mu_x = pyro.sample("mu_x", dist.Normal(10.0, 5.0))
    sd_x = pyro.sample("sd_x", dist.HalfCauchy(5.0))
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 5.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(5.0))
    with pyro.plate("data", len(y)):
        x = pyro.sample("x", dist.Normal(mu_x, sd_x))
        pyro.sample("x_seen", dist.Normal(x, x_error), obs=x_seen)
        pyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def _dose_data() -> tuple:
    rng = np.random.default_rng(83)
    dose = np.tile([0.5, 1.0, 2.0, 4.0, 8.0], (12, 1))
    top = 10 * np.exp(0.2 * rng.normal(size=(12, 1)))
    return floats(dose, top * dose / (2.0 + dose) + 0.5 * rng.normal(size=(12, 5)))


@add(_dose_data)
def deterministic_sites(dose, response):
    """A dose and its effect, not centred, with deterministic sites for all results."""
    log_top = pyro.sample("log_top", dist.Normal(2.0, 1.0))
    log_half = pyro.sample("log_half", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("patients", len(dose), dim=-2):
        raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
        top = pyro.deterministic("top", torch.exp(log_top + spread * raw))
        half = pyro.deterministic("half", log_half.exp())
        effect = pyro.deterministic("effect", top * dose / (half + dose))
        with pyro.plate("doses", dose.shape[1], dim=-1):
            pyro.sample("response", dist.Normal(effect, sigma), obs=response)


@add(lambda: ())
def factor_energy():
    """A user-defined energy function: a curved ridge."""
    x = pyro.sample("x", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    bend = 2.0 * (x[1] - 0.5 * x[0] ** 2) ** 2
    energy = 0.5 * x[0] ** 2 + bend + 0.5 * (x[2] - torch.sin(2 * x[0])) ** 2 / 0.25
    pyro.factor("energy", -energy)
