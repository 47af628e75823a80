# SPDX-License-Identifier: Apache-2.0
"""Twins of factors, abilities and topics."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def factor_analysis(y):
    loadings = sample("loadings", dist.Normal(0.0, 1.0).expand([y.shape[1], 2]))
    noise = sample("noise", dist.HalfNormal(1.0).expand([y.shape[1]]))
    marginal = dist.LowRankMultivariateNormal(jnp.zeros(y.shape[1]), loadings, noise**2)
    sample("y", marginal, obs=y)


def irt_2pl(person, item, correct):
    theta = sample("theta", dist.Normal(0.0, 1.0).expand([80]))
    mu = sample("mu", dist.Normal(0.0, 2.0))
    sd = sample("sd", dist.HalfNormal(2.0))
    a = sample("a", dist.LogNormal(0.0, 0.5).expand([15]))
    b = sample("b", dist.Normal(mu, sd).expand([15]))
    sample("correct", dist.Bernoulli(logits=a[item] * (theta[person] - b[item])), obs=correct)


def topics(counts):
    num_documents, num_words = counts.shape
    with numpyro.plate("num_topics", 2):
        words = sample("words", dist.Dirichlet(0.5 * jnp.ones(num_words)))
    with numpyro.plate("documents", num_documents):
        topics = sample("topics", dist.Dirichlet(jnp.ones(2)))
        sample("counts", dist.Multinomial(total_count=80, probs=topics @ words), obs=counts)
