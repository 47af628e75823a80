# SPDX-License-Identifier: Apache-2.0
"""Twins of the mixtures, with the discrete latents marginalised."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import sample


def _normal_mixture(y, weights, locs, scales):
    log_prob = dist.Normal(locs, scales).log_prob(y[:, None]) + jnp.log(weights)
    numpyro.factor("y", logsumexp(log_prob, axis=-1).sum())


def mixture_2_enumerated(y):
    weights = sample("weights", dist.Dirichlet(0.5 * jnp.ones(2)))
    scale = sample("scale", dist.LogNormal(0.0, 2.0))
    locs = sample("locs", dist.Normal(0.0, 10.0).expand([2]))
    _normal_mixture(y, weights, locs, scale)


def mixture_3(y):
    weights = sample("weights", dist.Dirichlet(jnp.ones(3)))
    mu = sample("mu", dist.Normal(0.0, 5.0).expand([3]))
    sigma = sample("sigma", dist.Gamma(2.0, 2.0).expand([3]))
    _normal_mixture(y, weights, mu, sigma)


def mixture_4(y):
    weights = sample("weights", dist.Dirichlet(5.0 * jnp.ones(4)))
    centres = sample("centres", dist.Normal(0.0, 4.0).expand([4, 2]))
    scale = sample("scale", dist.HalfNormal(2.0))
    log_prob = dist.Normal(centres, scale).log_prob(y[:, None]).sum(-1)
    numpyro.factor("y", logsumexp(log_prob + jnp.log(weights), axis=-1).sum())


def hmm_enumerated(y):
    with numpyro.plate("states", 2):
        transition = sample("transition", dist.Dirichlet(jnp.ones(2)))
        loc = sample("loc", dist.Normal(0.0, 3.0))
    scale = sample("scale", dist.HalfNormal(1.0))
    emission = dist.Normal(loc, scale).log_prob(y[:, None])

    def step(forward, log_prob):
        forward = logsumexp(forward[:, None] + jnp.log(transition), axis=0) + log_prob
        return forward, None

    forward, _ = jax.lax.scan(step, emission[0] - jnp.log(2.0), emission[1:])
    numpyro.factor("y", logsumexp(forward))


def change_point(counts):
    early = sample("early", dist.Exponential(0.5))
    late = sample("late", dist.Exponential(0.5))
    steps = jnp.arange(len(counts))
    rate = jnp.where(steps[None, :] < steps[:, None], early, late)
    log_prob = dist.Poisson(rate).log_prob(counts).sum(-1) - jnp.log(len(counts))
    numpyro.factor("counts", logsumexp(log_prob))
