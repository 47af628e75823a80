# SPDX-License-Identifier: Apache-2.0
"""Twins of the shrinking regressions."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def _horseshoe(x, y):
    num_features = x.shape[1]
    tau = sample("tau", dist.HalfCauchy(1.0))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    lam = sample("lam", dist.HalfCauchy(1.0).expand([num_features]))
    z = sample("z", dist.Normal(0.0, 1.0).expand([num_features]))
    sample("y", dist.Normal(x @ (z * lam * tau), sigma), obs=y)


horseshoe_30 = horseshoe_50 = horseshoe_300 = _horseshoe


def spike_slab(x, y):
    inclusion = sample("inclusion", dist.Beta(1.0, 4.0))
    sigma = sample("sigma", dist.HalfNormal(2.0))
    beta = sample("beta", dist.Normal(0.0, 1.5).expand([x.shape[1]]))
    slab = dist.Normal(0.0, 1.5).log_prob(beta)
    spike = dist.Normal(0.0, 0.05).log_prob(beta)
    mixture = jnp.logaddexp(slab + jnp.log(inclusion), spike + jnp.log1p(-inclusion))
    numpyro.factor("spike_or_slab", (mixture - slab).sum())
    sample("y", dist.Normal(x @ beta, sigma), obs=y)
