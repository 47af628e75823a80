# SPDX-License-Identifier: Apache-2.0
"""Mixtures of 2 to 4 components, a hidden Markov model and a change point.

Some marginalise their discrete latents by hand, others by Pyro's enumeration. Labels may be
permuted; draws are compared after sorting the components by their first location.
"""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate

from benchmarks.zoo.registry import add, floats


def log_ratios(simplex):
    """Unconstrained coordinates of simplex points, by the order of their parts."""
    return simplex[..., :-1].log() - simplex[..., -1:].log()


def _sorted(weights, locs, *others):
    """Weights and further arrays ``(num_draws, components, ...)``, sorted by the first location."""
    first = locs.reshape(*locs.shape[:2], -1)[..., 0]
    order = first.argsort(-1)

    def take(array):
        index = order.reshape(*order.shape, *(1,) * (array.dim() - 2)).expand_as(array)
        return array.gather(1, index)

    return log_ratios(take(weights)), *map(take, (locs, *others))


def _two_data() -> tuple:
    rng = np.random.default_rng(61)
    return floats(np.where(rng.random(80) < 0.35, -1.5, 1.5) + rng.normal(size=80))


def _two_invariant(draws, y):
    weights, locs = _sorted(draws["weights"], draws["locs"])
    return {"weights": weights, "locs": locs, "scale": draws["scale"].log()}


@add(_two_data, _two_invariant, max_plate_nesting=1)
@config_enumerate
def mixture_2_enumerated(y):
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(y)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[assignment], scale), obs=y)


def _three_data() -> tuple:
    rng = np.random.default_rng(62)
    group = rng.choice(3, size=150, p=[0.5, 0.3, 0.2])
    return floats(rng.normal(np.array([-3.0, 0.5, 4.0])[group], np.array([0.7, 1.0, 0.6])[group]))


def _three_invariant(draws, y):
    weights, mu, sigma = _sorted(draws["weights"], draws["mu"], draws["sigma"])
    return {"weights": weights, "mu": mu, "sigma": sigma.log()}


@add(_three_data, _three_invariant)
def mixture_3(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 2.0))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, sigma))
    with pyro.plate("data", len(y)):
        pyro.sample("y", mixture, obs=y)


def _four_data() -> tuple:
    rng = np.random.default_rng(63)
    centre = np.array([[-3.0, -3.0], [-1.0, 3.0], [1.5, -2.0], [4.0, 2.0]])
    return floats(centre[rng.integers(0, 4, 120)] + 0.8 * rng.normal(size=(120, 2)))


def _four_invariant(draws, y):
    weights, centres = _sorted(draws["weights"], draws["centres"])
    return {"weights": weights, "centres": centres, "scale": draws["scale"].log()}


@add(_four_data, _four_invariant)
def mixture_4(y):
    """A mixture in the plane, with an explicit sum over components."""
    weights = pyro.sample("weights", dist.Dirichlet(5.0 * torch.ones(4)))
    centres = pyro.sample("centres", dist.Normal(0.0, 4.0).expand([4, 2]).to_event(2))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    log_prob = dist.Normal(centres, scale).log_prob(y.unsqueeze(1)).sum(-1)
    pyro.factor("y", torch.logsumexp(log_prob + weights.log(), dim=-1).sum())


def _markov_data() -> tuple:
    rng = np.random.default_rng(64)
    state, y = 0, []
    for _ in range(60):
        state = rng.choice(2, p=[[0.9, 0.1], [0.2, 0.8]][state])
        y.append(rng.normal([-1.0, 1.5][state], 0.8))
    return floats(y)


def _markov_invariant(draws, y):
    transition = draws["transition"]
    order = draws["loc"].argsort(-1)
    stay = torch.diagonal(transition, dim1=-2, dim2=-1)
    return {
        "stay": stay.gather(1, order).logit(),
        "loc": draws["loc"].gather(1, order),
        "scale": draws["scale"].log(),
    }


@add(_markov_data, _markov_invariant, max_plate_nesting=1)
@config_enumerate
def hmm_enumerated(y):
    with pyro.plate("states", 2):
        transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2)))
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    state = 0
    for t in pyro.markov(range(len(y))):
        probs = transition[state] if t > 0 else torch.tensor([0.5, 0.5])
        state = pyro.sample(f"state_{t}", dist.Categorical(probs))
        pyro.sample(f"y_{t}", dist.Normal(loc[state], scale), obs=y[t])


def _change_data() -> tuple:
    rng = np.random.default_rng(65)
    return floats(rng.poisson(np.where(np.arange(60) < 35, 3.0, 1.2)))


@add(_change_data, max_plate_nesting=1)
@config_enumerate
def change_point(counts):
    early = pyro.sample("early", dist.Exponential(0.5))
    late = pyro.sample("late", dist.Exponential(0.5))
    change = pyro.sample("change", dist.Categorical(torch.ones(len(counts))))
    with pyro.plate("years", len(counts)):
        rate = torch.where(torch.arange(len(counts)) < change, early, late)
        pyro.sample("counts", dist.Poisson(rate), obs=counts)
