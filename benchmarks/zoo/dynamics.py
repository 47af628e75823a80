# SPDX-License-Identifier: Apache-2.0
"""An epidemic and an ordinary differential equation, step by step."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats


def _epidemic_data() -> tuple:
    rng = np.random.default_rng(51)
    susceptible, infected, cases = 995.0, 5.0, []
    for _ in range(50):
        new = susceptible * (1 - np.exp(-0.5 * infected / 1000))
        susceptible, infected = susceptible - new, infected + new - 0.2 * infected
        cases.append(rng.poisson(0.4 * new))
    return floats(cases)


@add(_epidemic_data)
def sir_loop(cases):
    population = 1000.0
    beta = pyro.sample("beta", dist.LogNormal(-0.5, 0.5))
    gamma = pyro.sample("gamma", dist.LogNormal(-1.5, 0.5))
    reported = pyro.sample("reported", dist.Beta(2.0, 2.0))
    start = pyro.sample("start", dist.Exponential(0.1))
    susceptible, infected = population - start, start
    for t in range(len(cases)):
        new = beta * susceptible * infected / population
        susceptible = susceptible - new
        infected = infected + new - gamma * infected
        pyro.sample(f"cases_{t}", dist.Poisson(reported * new), obs=cases[t])


def _predators_data() -> tuple:
    rng = np.random.default_rng(52)
    state, rows = np.array([30.0, 5.0]), []
    theta = np.array([0.55, 0.03, 0.8, 0.025])
    for _ in range(20):
        for _ in range(20):
            hare, lynx = state
            change = [(theta[0] - theta[1] * lynx) * hare, (-theta[2] + theta[3] * hare) * lynx]
            state = state + 0.05 * np.array(change)
        rows.append(state * np.exp(0.2 * rng.normal(size=2)))
    return floats(rows)


@add(_predators_data)
def lotka_volterra(y):
    """Runge-Kutta method with fixed steps."""
    theta = pyro.sample(
        "theta",
        dist.LogNormal(torch.tensor([-0.6, -3.5, -0.2, -3.7]), torch.tensor(0.5)).to_event(1),
    )
    initial = pyro.sample("initial", dist.LogNormal(torch.tensor([3.0, 2.0]), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]).to_event(1))

    def slope(state):
        hare, lynx = state[0], state[1]
        return torch.stack(
            [(theta[0] - theta[1] * lynx) * hare, (-theta[2] + theta[3] * hare) * lynx]
        )

    state, path, dt = initial, [], 0.25
    for _ in range(len(y)):
        for _ in range(4):
            k1 = slope(state)
            k2 = slope(state + dt / 2 * k1)
            k3 = slope(state + dt / 2 * k2)
            k4 = slope(state + dt * k3)
            state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        path.append(state)
    z = torch.stack(path)
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.LogNormal(z.log(), sigma).to_event(1), obs=y)
