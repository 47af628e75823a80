# SPDX-License-Identifier: Apache-2.0
"""Small models with realistic priors; without data they sample the site ``y``."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

__all__ = ["MODELS"]

Data = Tensor | None
X = torch.linspace(-1.5, 1.5, 12, dtype=torch.float64)


def _zero() -> Tensor:
    return X.new_zeros(())


def normal(y: Data = None) -> None:
    """Mean and scale of ten numbers."""
    mean = pyro.sample("mean", dist.Normal(_zero(), 2.0))
    scale = pyro.sample("scale", dist.Gamma(_zero() + 2.0, 2.0))
    with pyro.plate("rows", 10):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


def line(y: Data = None) -> None:
    """A regression with Student-t errors."""
    weight = pyro.sample("weight", dist.Normal(X.new_zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(_zero() - 1.0, 0.5))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.StudentT(4.0, weight[0] + weight[1] * X, scale), obs=y)


def logistic(y: Data = None) -> None:
    """A logistic regression on a line and a parabola."""
    weight = pyro.sample("weight", dist.Normal(X.new_zeros(3), 1.5).to_event(1))
    with pyro.plate("rows", len(X)):
        logits = weight[0] + weight[1] * X + weight[2] * (X * X - 1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def poisson(y: Data = None) -> None:
    """Counts with a random intercept for each of four groups."""
    mean = pyro.sample("mean", dist.Normal(_zero() + 0.5, 0.7))
    scale = pyro.sample("scale", dist.HalfNormal(_zero() + 0.7))
    with pyro.plate("groups", 4, dim=-1):
        offset = pyro.sample("offset", dist.Normal(mean, scale))
        with pyro.plate("rows", 3, dim=-2):
            pyro.sample("y", dist.Poisson(offset.exp()), obs=y)


def schools(y: Data = None) -> None:
    """A centred hierarchy of six groups, with little information on its scale."""
    mean = pyro.sample("mean", dist.Normal(_zero(), 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(_zero() + 2.0))
    with pyro.plate("schools", 6):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(effect, 1.5), obs=y)


def funnel(y: Data = None) -> None:
    """A log-normal scale of four values, each observed once with noise."""
    log_scale = pyro.sample("log_scale", dist.Normal(_zero(), 1.5))
    with pyro.plate("rows", 4):
        child = pyro.sample("child", dist.Normal(0.0, (log_scale / 2).exp()))
        pyro.sample("y", dist.Normal(child, 1.0), obs=y)


def mixture(y: Data = None) -> None:
    """Two ordered components with marginalised assignments."""
    share = pyro.sample("share", dist.Beta(_zero() + 3.0, 3.0))
    low = pyro.sample("low", dist.Normal(_zero() - 1.0, 1.0))
    gap = pyro.sample("gap", dist.Gamma(_zero() + 4.0, 2.0))
    with pyro.plate("rows", 16):
        choice = pyro.sample("choice", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(low + gap * choice, 0.7), obs=y)


def autoregression(y: Data = None) -> None:
    """A stationary series of twenty steps, by its differences."""
    phi = pyro.sample("phi", dist.Uniform(_zero() - 0.95, 0.95))
    scale = pyro.sample("scale", dist.LogNormal(_zero(), 0.4))
    step = torch.arange(20)
    lag = (step[:, None] - step).abs()
    covariance = scale.square() * phi.sign() ** lag * phi.abs().clamp(min=1e-6) ** lag
    covariance = covariance / (1 - phi * phi)
    pyro.sample("y", dist.MultivariateNormal(X.new_zeros(20), covariance), obs=y)


def gaussian_process(y: Data = None) -> None:
    """Counts of a latent function at eight points, with unknown amplitude and length scale."""
    length = pyro.sample("length", dist.InverseGamma(_zero() + 5.0, 5.0))
    amplitude = pyro.sample("amplitude", dist.HalfNormal(_zero() + 1.0))
    x = X[2:10]
    distance = (x[:, None] - x) / length
    kernel = amplitude.square() * (-0.5 * distance.square()).exp() + 1e-4 * torch.eye(8).to(x)
    latent = pyro.sample("latent", dist.MultivariateNormal(X.new_zeros(8), kernel))
    with pyro.plate("rows", 8):
        pyro.sample("y", dist.Poisson((1.0 + latent).exp()), obs=y)


def proportions(y: Data = None) -> None:
    """Shares of a Dirichlet with forty observations, and one share observed by a binomial."""
    share = pyro.sample("share", dist.Dirichlet(X.new_tensor([1.0, 2.0, 3.0])))
    pyro.sample("y", dist.Multinomial(40, share), obs=y)


def rates(y: Data = None) -> None:
    """Gamma rates of five machines with unknown shape and rate."""
    shape = pyro.sample("shape", dist.Gamma(_zero() + 4.0, 2.0))
    rate = pyro.sample("rate", dist.Gamma(_zero() + 3.0, 3.0))
    with pyro.plate("machines", 5):
        each = pyro.sample("each", dist.Gamma(shape, rate))
        pyro.sample("y", dist.Poisson(5 * each), obs=y)


def horseshoe(y: Data = None) -> None:
    """Four weights with half-t scales of three degrees of freedom, in a regression on noise."""
    common = pyro.sample("common", dist.HalfNormal(_zero() + 0.5))
    local = pyro.sample("local", dist.HalfNormal(X.new_ones(4)).to_event(1))
    weight = pyro.sample("weight", dist.Normal(X.new_zeros(4), common * local).to_event(1))
    design = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).to(X)
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Normal(design @ weight, 0.5), obs=y)


def survival(y: Data = None) -> None:
    """Weibull times in two arms."""
    shape = pyro.sample("shape", dist.LogNormal(_zero(), 0.4))
    effect = pyro.sample("effect", dist.Normal(_zero(), 1.0))
    level = pyro.sample("level", dist.Normal(_zero(), 1.0))
    arm = (torch.arange(14) % 2).to(X)
    with pyro.plate("rows", 14):
        pyro.sample("y", dist.Weibull((level + effect * arm).exp(), shape), obs=y)


MODELS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        normal, line, logistic, proportions, survival, autoregression, mixture, poisson, rates,
        schools, funnel, horseshoe, gaussian_process,
    )
}  # fmt: skip
