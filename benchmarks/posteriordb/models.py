# SPDX-License-Identifier: Apache-2.0
"""Hierarchies, mixtures, hidden states and a Gaussian process."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

from benchmarks.posteriordb.markov import hmm_log_likelihood

__all__ = [
    "eight_schools_centered",
    "eight_schools_noncentered",
    "gauss_mix",
    "gauss_mix_unordered",
    "gp_regression",
    "hmm_drive",
]


def eight_schools_centered(y: Tensor, sigma: Tensor) -> None:
    """Effects of the schools around a common mean: a funnel in tau."""
    mu = pyro.sample("mu", dist.Normal(y.new_tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentered(y: Tensor, sigma: Tensor) -> None:
    """The same posterior in the effects standardised by ``mu`` and ``tau``."""
    mu = pyro.sample("mu", dist.Normal(y.new_tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        theta_trans = pyro.sample("theta_trans", dist.Normal(y.new_tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(mu + tau * theta_trans, sigma), obs=y)


def _two_normals(mu: Tensor, y: Tensor) -> None:
    """The other sites of the mixture; its components are the last dimension."""
    two = torch.ones_like(y[:2])
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0 * two).to_event(1))
    theta = pyro.sample("theta", dist.Beta(y.new_tensor(5.0), y.new_tensor(5.0)))
    weights = dist.Categorical(torch.stack([theta, 1 - theta], dim=-1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def gauss_mix(y: Tensor) -> None:
    """Two normals in the order of their means."""
    mu = pyro.sample("mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    pyro.sample("mu_prior", dist.Normal(torch.zeros_like(y[:2]), 2.0).to_event(1), obs=mu)
    _two_normals(mu, y)


def gauss_mix_unordered(y: Tensor) -> None:
    """Two normals in any order: two exactly equal modes."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros_like(y[:2]), 2.0).to_event(1))
    _two_normals(mu, y)


def gp_regression(x: Tensor, y: Tensor) -> None:
    """A Gaussian process with a squared-exponential kernel; ``sigma`` is the noise variance."""
    rho = pyro.sample("rho", dist.Gamma(x.new_tensor(25.0), x.new_tensor(4.0)))
    alpha = pyro.sample("alpha", dist.HalfNormal(x.new_tensor(2.0)))
    sigma = pyro.sample("sigma", dist.HalfNormal(x.new_tensor(1.0)))
    rho, alpha, sigma = (site[..., None, None] for site in (rho, alpha, sigma))
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    kernel = torch.exp(-0.5 * ((x[:, None] - x) / rho).square())
    # The jitter keeps the Cholesky factor finite for extreme parameters.
    covariance = alpha.square() * (kernel + 1e-10 * identity) + sigma * identity
    scale_tril = torch.linalg.cholesky(covariance)
    loc = torch.zeros_like(y)
    pyro.sample("y", dist.MultivariateNormal(loc, scale_tril=scale_tril), obs=y)


def hmm_drive(u: Tensor, v: Tensor, alpha: Tensor) -> None:
    """Two marginalised hidden states with two exponential observations each."""
    theta = [pyro.sample(f"theta{k + 1}", dist.Dirichlet(alpha[k])) for k in range(2)]
    prior = dist.Normal(u.new_tensor([0.0, 3.0]), 1.0).to_event(1)
    rates = []
    for name in ("phi", "lambda"):
        ordered = dist.ImproperUniform(constraints.positive_ordered_vector, (), (2,))
        rates.append(pyro.sample(name, ordered))
        pyro.sample(f"{name}_prior", prior, obs=rates[-1])
    phi, lambda_ = (rate.unsqueeze(-2) for rate in rates)
    emissions = phi.log() + lambda_.log() - phi * u.unsqueeze(-1) - lambda_ * v.unsqueeze(-1)
    pyro.factor("y", hmm_log_likelihood(torch.stack(theta, dim=-2), emissions))
