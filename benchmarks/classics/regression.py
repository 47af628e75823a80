# SPDX-License-Identifier: Apache-2.0
"""Regressions, survival times and models with enumerated latents.

The models are from Spiegelhalter, Thomas, Best and Gilks (1996), BUGS examples volumes 1 and 2.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch

from benchmarks.classics.data import arguments, cervix_rows
from benchmarks.zoo.registry import add


@add(arguments("stacks"))
def stacks(x, loss):
    """Volume 1: ridge regression with double exponential errors (Brownlee's stack losses)."""
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 316.0))
    phi = pyro.sample("phi", dist.Gamma(0.01, 0.01))
    beta = pyro.sample("beta", dist.Normal(0.0, phi**-0.5).expand([3]).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    z = (x - x.mean(0)) / x.std(0)
    with pyro.plate("days", len(loss)):
        pyro.sample("loss", dist.Laplace(beta0 + z @ beta, 1 / tau), obs=loss)


@add(arguments("mice"))
def mice(group, week, died):
    """Volume 1: censored Weibull times of mice in four groups (Dellaportas and Smith, 1993)."""
    r = pyro.sample("r", dist.Exponential(0.001))
    with pyro.plate("groups", 4):
        beta = pyro.sample("beta", dist.Normal(0.0, 100.0))
    scale = torch.exp(-beta[group] / r)
    with pyro.plate("mice", len(week)):
        with pyro.poutine.mask(mask=died > 0):
            pyro.sample("week", dist.Weibull(scale, r), obs=week)
        with pyro.poutine.mask(mask=died == 0):
            pyro.factor("survived", -((week / scale) ** r))


@add(arguments("leukfr"))
def leukfr(pair, time, died, treatment, times):
    """Volume 1: Cox regression with a frailty of each pair of patients, as counting process."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with pyro.plate("times", 17):
        hazard = pyro.sample("hazard", dist.Gamma(1e-4 * times.diff(), 0.001))
    with pyro.plate("pairs", 21):
        b = pyro.sample("b", dist.Normal(0.0, tau**-0.5))
    at_risk = time.unsqueeze(-1) >= times[:-1]
    events = died.unsqueeze(-1) * (time.unsqueeze(-1) == times[:-1])
    rate = torch.exp(beta * treatment + b[pair]).unsqueeze(-1) * hazard
    with pyro.plate("patients", 42, dim=-2), pyro.plate("intervals", 17, dim=-1):
        with pyro.poutine.mask(mask=at_risk):
            pyro.sample("events", dist.Poisson(rate), obs=events)


@add(arguments("dogs"))
def dogs(avoided):
    """Volume 1: a loglinear model of learning by 30 dogs (Solomon and Wynne, 1953)."""
    alpha = pyro.sample("alpha", dist.HalfNormal(316.0))
    beta = pyro.sample("beta", dist.HalfNormal(316.0))
    avoidances = avoided.cumsum(-1)[:, :-1]
    shocks = (1 - avoided).cumsum(-1)[:, :-1]
    with pyro.plate("dogs", 30, dim=-2), pyro.plate("trials", 24, dim=-1):
        p_shock = torch.exp(-alpha * avoidances - beta * shocks)
        pyro.sample("shocked", dist.Bernoulli(p_shock), obs=1 - avoided[:, 1:])


@add(arguments("beetles"))
def beetles(dose, exposed, killed):
    """Volume 2: mortality of beetles with the complementary log-log link (Bliss, 1935)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    with pyro.plate("doses", len(dose)):
        p = 1 - torch.exp(-torch.exp(alpha + beta * (dose - dose.mean())))
        pyro.sample("killed", dist.Binomial(exposed, p), obs=killed)


@add(arguments("dugongs"))
def dugongs(age, length):
    """Volume 2: a nonlinear growth curve (Carlin and Gelfand, 1991)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    gamma = pyro.sample("gamma", dist.Uniform(0.5, 1.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    with pyro.plate("dugongs", len(age)):
        pyro.sample("length", dist.Normal(alpha - beta * gamma**age, tau**-0.5), obs=length)


@add(arguments("stagnant"), max_plate_nesting=1)
def stagnant(x, y):
    """Volume 2: two joined lines with an unknown change point (Carlin et al., 1992)."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta1 = pyro.sample("beta1", dist.Normal(0.0, 1000.0))
    beta2 = pyro.sample("beta2", dist.Normal(0.0, 1000.0))
    tau = pyro.sample("tau", dist.Gamma(0.001, 0.001))
    change = pyro.sample(
        "change", dist.Categorical(torch.ones(29) / 29), infer={"enumerate": "parallel"}
    )
    with pyro.plate("rows", len(y)):
        slope = torch.where(torch.arange(len(y)) <= change, beta1, beta2)
        mean = alpha + slope * (x - x[change])
        pyro.sample("y", dist.Normal(mean, tau**-0.5), obs=y)


@add(cervix_rows, max_plate_nesting=1)
def cervix(exposed, smear, case, other_smear, other_case):
    """Volume 2: an exposure that 1,929 of 2,044 women have only with measurement error."""
    phi = pyro.sample("phi", dist.Beta(1.0, 1.0).expand([2, 2]).to_event(2))
    q = pyro.sample("q", dist.Beta(1.0, 1.0))
    beta0 = pyro.sample("beta0", dist.Normal(0.0, 316.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 316.0))
    with pyro.plate("complete", len(exposed)):
        pyro.sample("exposed", dist.Bernoulli(q), obs=exposed)
        pyro.sample("case", dist.Bernoulli(logits=beta0 + beta * exposed), obs=case)
        pyro.sample("smear", dist.Bernoulli(phi[exposed.long(), case.long()]), obs=smear)
    with pyro.plate("incomplete", len(other_smear)):
        x = pyro.sample("x", dist.Bernoulli(q), infer={"enumerate": "parallel"})
        pyro.sample("other_case", dist.Bernoulli(logits=beta0 + beta * x), obs=other_case)
        p_smear = phi[x.long(), other_case.long()]
        pyro.sample("other_smear", dist.Bernoulli(p_smear), obs=other_smear)
