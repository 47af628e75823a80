# SPDX-License-Identifier: Apache-2.0
"""Twins of the regressions, survival times and models with enumerated latents."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample

VAGUE = dist.Gamma(0.001, 0.001)


def stacks(x, loss):
    beta0 = sample("beta0", dist.Normal(0.0, 316.0))
    phi = sample("phi", dist.Gamma(0.01, 0.01))
    beta = sample("beta", dist.Normal(0.0, phi**-0.5).expand([3]))
    tau = sample("tau", VAGUE)
    z = (x - x.mean(0)) / x.std(0, ddof=1)
    sample("loss", dist.Laplace(beta0 + z @ beta, 1 / tau), obs=loss)


def mice(group, week, died):
    r = sample("r", dist.Exponential(0.001))
    beta = sample("beta", dist.Normal(0.0, 100.0).expand([4]))[group]
    log_hazard = jnp.log(r) + (r - 1) * jnp.log(week) + beta
    numpyro.factor("survival", (died * log_hazard - jnp.exp(beta) * week**r).sum())


def leukfr(pair, time, died, treatment, times):
    beta, tau = sample("beta", dist.Normal(0.0, 1000.0)), sample("tau", VAGUE)
    hazard = sample("hazard", dist.Gamma(1e-4 * jnp.diff(times), 0.001))
    b = sample("b", dist.Normal(0.0, tau**-0.5).expand([21]))
    log_rate = beta * treatment + b[pair]
    exposure = jnp.where(time[:, None] >= times[:-1], hazard, 0.0).sum(-1)
    own = hazard[jnp.searchsorted(times, time).clip(max=16)]
    survival = died * (log_rate + jnp.log(own)) - jnp.exp(log_rate) * exposure
    numpyro.factor("survival", survival.sum())


def cervix(exposed, smear, case, other_smear, other_case):
    phi = sample("phi", dist.Beta(1.0, 1.0).expand([2, 2]))
    q = sample("q", dist.Beta(1.0, 1.0))
    beta0 = sample("beta0", dist.Normal(0.0, 316.0))
    beta = sample("beta", dist.Normal(0.0, 316.0))
    x, d, w = jnp.meshgrid(*3 * [jnp.arange(2)], indexing="ij")
    log_prob = dist.Bernoulli(q).log_prob(x) + dist.Bernoulli(phi[x, d]).log_prob(w)
    log_prob += dist.Bernoulli(logits=beta0 + beta * x).log_prob(d)
    cells = ((exposed * 2 + case) * 2 + smear).astype(int)
    counts = jnp.zeros(8).at[cells].add(1.0).reshape(2, 2, 2)
    others = jnp.zeros(4).at[(other_case * 2 + other_smear).astype(int)].add(1.0).reshape(2, 2)
    numpyro.factor("complete", (counts * log_prob).sum())
    numpyro.factor("incomplete", (others * jnp.logaddexp(log_prob[0], log_prob[1])).sum())
