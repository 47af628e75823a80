# SPDX-License-Identifier: Apache-2.0
"""Groups whose precisions have vague gamma priors.

The models are from Spiegelhalter, Thomas, Best and Gilks (1996), BUGS examples volume 1.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch

from benchmarks.classics.data import arguments
from benchmarks.zoo.registry import add


@add(arguments("rats"))
def rats(age, weight):
    """Volume 1: normal growth curves of 30 rats."""
    alpha_mean = pyro.sample("alpha_mean", dist.Normal(0.0, 1000.0))
    beta_mean = pyro.sample("beta_mean", dist.Normal(0.0, 1000.0))
    alpha_tau = pyro.sample("alpha_tau", dist.Gamma(0.001, 0.001))
    beta_tau = pyro.sample("beta_tau", dist.Gamma(0.001, 0.001))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with pyro.plate("rats", len(weight), dim=-2):
        alpha = pyro.sample("alpha", dist.Normal(alpha_mean, alpha_tau**-0.5))
        beta = pyro.sample("beta", dist.Normal(beta_mean, beta_tau**-0.5))
        with pyro.plate("weeks", len(age), dim=-1):
            mean = alpha + beta * (age - age.mean())
            pyro.sample("weight", dist.Normal(mean, tau**-0.5), obs=weight)


@add(arguments("pump"))
def pump(time, failures):
    """Volume 1: failure rates of ten pumps (George, Makov and Smith, 1993)."""
    alpha = pyro.sample("alpha", dist.Exponential(1.0))
    beta = pyro.sample("beta", dist.Gamma(0.1, 1.0))
    with pyro.plate("pumps", len(time)):
        theta = pyro.sample("theta", dist.Gamma(alpha, beta))
        pyro.sample("failures", dist.Poisson(theta * time), obs=failures)


@add(arguments("dyes"))
def dyes(amount):
    """Volume 1: variance components of six batches (Box and Tiao, 1973)."""
    theta = pyro.sample("theta", dist.Normal(0.0, 1e5))
    tau_between = pyro.sample("tau_between", dist.Gamma(0.001, 0.001))
    tau_within = pyro.sample("tau_within", dist.Gamma(0.001, 0.001))
    with pyro.plate("batches", 6, dim=-2):
        mu = pyro.sample("mu", dist.Normal(theta, tau_between**-0.5))
        with pyro.plate("samples", 5, dim=-1):
            pyro.sample("amount", dist.Normal(mu, tau_within**-0.5), obs=amount)


@add(arguments("seeds"))
def seeds(planted, germinated, variety, extract):
    """Volume 1: logistic regression with random effects of 21 plates (Crowder, 1978)."""
    alpha0 = pyro.sample("alpha0", dist.Normal(0.0, 1000.0))
    alpha1 = pyro.sample("alpha1", dist.Normal(0.0, 1000.0))
    alpha2 = pyro.sample("alpha2", dist.Normal(0.0, 1000.0))
    alpha12 = pyro.sample("alpha12", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with pyro.plate("plates", len(planted)):
        b = pyro.sample("b", dist.Normal(0.0, tau**-0.5))
        logits = alpha0 + alpha1 * variety + alpha2 * extract + alpha12 * variety * extract + b
        pyro.sample("germinated", dist.Binomial(planted, logits=logits), obs=germinated)


@add(arguments("surgical"))
def surgical(operations, deaths):
    """Volume 1: mortality rates in twelve hospitals, with random effects."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with pyro.plate("hospitals", len(operations)):
        b = pyro.sample("b", dist.Normal(mu, tau**-0.5))
        pyro.sample("deaths", dist.Binomial(operations, logits=b), obs=deaths)


@add(arguments("salm"))
def salm(dose, colonies):
    """Volume 1: overdispersed Poisson counts of revertant colonies (Breslow, 1984)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    gamma = pyro.sample("gamma", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    x = dose.unsqueeze(-1)
    with pyro.plate("doses", 6, dim=-2), pyro.plate("plates", 3, dim=-1):
        effect = pyro.sample("effect", dist.Normal(0.0, tau**-0.5))
        rate = torch.exp(alpha + beta * torch.log(x + 10) + gamma * x + effect)
        pyro.sample("colonies", dist.Poisson(rate), obs=colonies)


@add(arguments("magnesium"))
def magnesium(deaths_treated, treated, deaths_control, control):
    """Volume 1: a meta-analysis of eight trials with six priors of the variance of effects."""
    inverse_variance = 1 / (
        1 / (deaths_treated + 0.5)
        + 1 / (treated - deaths_treated + 0.5)
        + 1 / (deaths_control + 0.5)
        + 1 / (control - deaths_control + 0.5)
    )
    s2 = 1 / inverse_variance.mean()
    precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
    variance = pyro.sample("variance", dist.Uniform(0.0, 50.0))
    sd = pyro.sample("sd", dist.Uniform(0.0, 50.0))
    shrinkage = pyro.sample("shrinkage", dist.Uniform(0.0, 1.0))
    dumouchel = pyro.sample("dumouchel", dist.Uniform(0.0, 1.0))
    scale = torch.sqrt(s2 / (0.5 * (1 + math.erf(0.75 / math.sqrt(2)))))
    half_normal = pyro.sample("half_normal", dist.HalfNormal(scale))
    tau = torch.stack([
        precision**-0.5,
        variance**0.5,
        sd,
        torch.sqrt(s2 * (1 - shrinkage) / shrinkage),
        torch.sqrt(s2) * (1 - dumouchel) / dumouchel,
        half_normal**0.5,
    ])  # fmt: skip
    with pyro.plate("priors", 6, dim=-2):
        mu = pyro.sample("mu", dist.Uniform(-10.0, 10.0))
        with pyro.plate("trials", 8, dim=-1):
            theta = pyro.sample("theta", dist.Normal(mu, tau.unsqueeze(-1)))
            risk = pyro.sample("risk", dist.Uniform(0.0, 1.0))
            logits = theta + torch.logit(risk)
            pyro.sample("control", dist.Binomial(control, risk), obs=deaths_control)
            pyro.sample("treated", dist.Binomial(treated, logits=logits), obs=deaths_treated)
