# SPDX-License-Identifier: Apache-2.0
"""Twins of the networks."""

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import sample


def _layer(value, name, inputs, outputs):
    weight = sample(f"{name}.weight", dist.Normal(0.0, 1.0).expand([outputs, inputs]))
    return value @ weight.T + sample(f"{name}.bias", dist.Normal(0.0, 1.0).expand([outputs]))


def network_50(x, y):
    hidden = jnp.tanh(_layer(x, "hidden", 1, 16))
    mean = _layer(hidden, "out", 16, 1)[:, 0]
    sigma = sample("sigma", dist.Gamma(2.0, 4.0))
    sample("obs", dist.Normal(mean, sigma), obs=y)


def network_500(x, y):
    first = jnp.tanh(_layer(x, "first", 2, 20))
    second = jnp.tanh(_layer(first, "second", 20, 20))
    sample("obs", dist.Bernoulli(logits=_layer(second, "third", 20, 1)[:, 0]), obs=y)
