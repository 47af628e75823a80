# SPDX-License-Identifier: Apache-2.0
"""Groups with priors of families that the conditional space does not map, for ``exact``.

A truncated, a skewed and a simplex family with latent scale or concentration. Given the
hyperparameters the groups are independent, so quadrature or conjugacy gives each group's moments.
"""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["FAMILIES"]

NUM_POINTS, REACH = 401, 8.0  # of a group's quadrature, within so many sds of its datum
SKEW, NUM_SHARES, NUM_TRIALS = 1.8, 4, 20

Exact = tuple[Tensor, Tensor, Tensor]


def errors(y: Tensor) -> Tensor:
    return torch.linspace(0.2, 1.0, len(y)).to(y)


def truncated_data(size: int) -> Tensor:
    theta = torch.as_tensor(np.abs(np.random.default_rng(6).normal(size=size))).float()
    noise = torch.as_tensor(np.random.default_rng(7).normal(size=size)).float()
    return theta + errors(theta) * noise


def truncated(y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.HalfNormal(tau))
        pyro.sample("y", dist.Normal(theta, errors(y)), obs=y)


def by_quadrature(y: Tensor, log_prior: Tensor, points: Tensor) -> Exact:
    """Return the groups' log evidence, means and variances.

    :param log_prior: at the points, ``(grid, num_groups, NUM_POINTS)``.
    """
    log_density = log_prior + dist.Normal(y, errors(y)).log_prob(points.mT).mT
    log_mass = log_density.logsumexp(-1, keepdim=True)
    weight = (log_density - log_mass).exp()
    mean = (weight * points).sum(-1)
    variance = (weight * (points - mean.unsqueeze(-1)).square()).sum(-1)
    widths = points[:, 1] - points[:, 0]
    return (log_mass.squeeze(-1) + widths.log()).sum(-1), mean, variance


def nearby(y: Tensor, low: float) -> Tensor:
    """Return the midpoints of equal cells around each datum, ``(num_groups, NUM_POINTS)``."""
    left = (y - REACH * errors(y)).clamp(min=low)
    share = (torch.arange(NUM_POINTS).to(y) + 0.5) / NUM_POINTS
    return left.unsqueeze(-1) + (y + REACH * errors(y) - left).unsqueeze(-1) * share


def truncated_exact(y: Tensor, values: dict[str, Tensor]) -> Exact:
    tau, points = values["tau"], nearby(y, 0.0)
    log_prior = dist.HalfNormal(tau[:, None, None]).log_prob(points)
    log_mass, mean, variance = by_quadrature(y, log_prior, points)
    return log_mass + dist.HalfNormal(2.0).log_prob(tau), mean, variance


def skewed_data(size: int) -> Tensor:
    rng = np.random.default_rng(8)
    right = rng.exponential(size=size) / SKEW
    theta = torch.as_tensor(3.0 + 0.6 * (right - SKEW * rng.exponential(size=size))).float()
    return theta + errors(theta) * torch.as_tensor(rng.normal(size=size)).float()


def skewed(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.AsymmetricLaplace(mu, tau, SKEW))
        pyro.sample("y", dist.Normal(theta, errors(y)), obs=y)


def skewed_exact(y: Tensor, values: dict[str, Tensor]) -> Exact:
    mu, tau, points = values["mu"], values["tau"], nearby(y, -np.inf)
    prior = dist.AsymmetricLaplace(mu[:, None, None], tau[:, None, None], SKEW)
    log_mass, mean, variance = by_quadrature(y, prior.log_prob(points), points)
    log_mass = log_mass + dist.Normal(0.0, 5.0).log_prob(mu)
    return log_mass + dist.HalfNormal(2.0).log_prob(tau), mean, variance


def simplex_data(size: int) -> Tensor:
    rng = np.random.default_rng(9)
    counts = [rng.multinomial(NUM_TRIALS, one) for one in rng.dirichlet([0.8] * NUM_SHARES, size)]
    return torch.as_tensor(np.stack(counts)).float()


def simplex(y: Tensor) -> None:
    alpha = pyro.sample("alpha", dist.Gamma(2.0, 0.5))
    with pyro.plate("groups", len(y)):
        shares = pyro.sample("shares", dist.Dirichlet(alpha * torch.ones(NUM_SHARES)))
        pyro.sample("y", dist.Multinomial(NUM_TRIALS, shares), obs=y)


def simplex_exact(y: Tensor, values: dict[str, Tensor]) -> Exact:
    alpha = values["alpha"][:, None, None]
    total = NUM_SHARES * alpha.squeeze(-1)
    log_mass = (torch.lgamma(alpha + y) - torch.lgamma(alpha)).sum(-1)
    log_mass = log_mass + torch.lgamma(total) - torch.lgamma(total + NUM_TRIALS)
    mean = (alpha + y) / (total.unsqueeze(-1) + NUM_TRIALS)
    variance = mean * (1 - mean) / (total.unsqueeze(-1) + NUM_TRIALS + 1)
    log_weight = log_mass.sum(-1) + dist.Gamma(2.0, 0.5).log_prob(values["alpha"])
    return log_weight, mean.flatten(1), variance.flatten(1)


def theta_of(draws: dict[str, Tensor]) -> Tensor:
    return draws["theta"]


FAMILIES = {
    "truncated": (truncated, truncated_data, theta_of, truncated_exact, ("tau",)),
    "skewed": (skewed, skewed_data, theta_of, skewed_exact, ("mu", "tau")),
    "simplex": (
        simplex,
        simplex_data,
        lambda draws: draws["shares"].flatten(1),
        simplex_exact,
        ("alpha",),
    ),
}
