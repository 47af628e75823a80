# SPDX-License-Identifier: Apache-2.0
"""Twins of the epidemic and of the differential equation."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import sample


def sir_loop(cases):
    population = 1000.0
    beta = sample("beta", dist.LogNormal(-0.5, 0.5))
    gamma = sample("gamma", dist.LogNormal(-1.5, 0.5))
    reported = sample("reported", dist.Beta(2.0, 2.0))
    start = sample("start", dist.Exponential(0.1))

    def step(state, _):
        susceptible, infected = state
        new = beta * susceptible * infected / population
        return (susceptible - new, infected + new - gamma * infected), new

    _, new = jax.lax.scan(step, (population - start, start), length=len(cases))
    sample("cases", dist.Poisson(reported * new), obs=cases)


def lotka_volterra(y):
    theta = sample("theta", dist.LogNormal(jnp.array([-0.6, -3.5, -0.2, -3.7]), 0.5).to_event(1))
    initial = sample("initial", dist.LogNormal(jnp.array([3.0, 2.0]), 1.0).to_event(1))
    sigma = sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))

    def slope(state):
        hare, lynx = state
        return jnp.stack(
            [(theta[0] - theta[1] * lynx) * hare, (-theta[2] + theta[3] * hare) * lynx]
        )

    def step(state, _):
        k1 = slope(state)
        k2 = slope(state + 0.125 * k1)
        k3 = slope(state + 0.125 * k2)
        k4 = slope(state + 0.25 * k3)
        state = state + 0.25 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state

    _, path = jax.lax.scan(step, initial, length=4 * len(y))
    sample("y", dist.LogNormal(jnp.log(path[3::4]), sigma), obs=y)
