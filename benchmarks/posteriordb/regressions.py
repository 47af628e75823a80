# SPDX-License-Identifier: Apache-2.0
"""Linear regressions, which differ in their priors and in what their columns mean.

The rows of ``X`` and ``y`` are one event instead of a plate: then the product of coefficients and
columns stays one matrix product, with any number of particles.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

__all__ = ["autoregression", "blr", "flat_regression", "half_cauchy_regression"]


def _rows(loc: Tensor, sigma: Tensor, y: Tensor) -> None:
    pyro.sample("y", dist.Normal(loc, sigma.unsqueeze(-1)).to_event(1), obs=y)


def flat_regression(X: Tensor, y: Tensor) -> None:
    """Flat priors on the coefficients and on the noise sd (not on its logarithm)."""
    beta = pyro.sample("beta", dist.ImproperUniform(constraints.real_vector, (), X.shape[-1:]))
    sigma = pyro.sample("sigma", dist.ImproperUniform(constraints.positive, (), ()))
    _rows(beta @ X.T, sigma, y)


def half_cauchy_regression(X: Tensor, y: Tensor) -> None:
    """Flat coefficients, a half-Cauchy noise sd."""
    beta = pyro.sample("beta", dist.ImproperUniform(constraints.real_vector, (), X.shape[-1:]))
    sigma = pyro.sample("sigma", dist.HalfCauchy(X.new_tensor(2.5)))
    _rows(beta @ X.T, sigma, y)


def blr(X: Tensor, y: Tensor) -> None:
    """Normal coefficients, a half-normal noise sd."""
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(X[0]), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(X.new_tensor(10.0)))
    _rows(beta @ X.T, sigma, y)


def autoregression(X: Tensor, y: Tensor) -> None:
    """An autoregression: row t of ``X`` contains lags 1, 2, ... of ``y[t]``."""
    alpha = pyro.sample("alpha", dist.Normal(X.new_tensor(0.0), 10.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros_like(X[0]), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(X.new_tensor(2.5)))
    _rows(alpha.unsqueeze(-1) + beta @ X.T, sigma, y)
