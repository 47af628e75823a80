# SPDX-License-Identifier: Apache-2.0
"""How well fit, train and refine obey ``max_seconds``, and diagnose ``max_core_seconds``.

``python -m benchmarks.time_limits --limits 2 5 20`` runs five models and prints JSON lines: CPU
seconds of each call as a share of its limit, and its wall seconds. The library reads CPU time as
its clock here, because other programs of a shared machine lengthen wall time: the share of CPU
seconds counts.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import diagnose, fit, refine
from pyro_implicit.fitting import Schedule, train
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import classifier, to_bayesian_


def logistic(x, y):
    """Regression with 60 coefficients, which the search can afford."""
    weights = pyro.sample("weights", dist.Normal(torch.zeros(60), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def groups(x, y):
    """A hierarchy of 300 groups."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", 300):
        level = pyro.sample("level", dist.Normal(0.0, scale))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=level[torch.arange(len(x)) % 300]), obs=y)


def walk(x, y):
    """A slow model: 200 sequential steps of a Python loop."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    level, levels = torch.zeros(()), []
    for row in x[:200, :5]:
        level = 0.9 * level + scale * torch.tanh((row * slope).sum(-1))
        levels.append(level)
    with pyro.plate("rows", 200):
        pyro.sample("y", dist.Bernoulli(logits=torch.stack(levels, -1)), obs=y[:200])


def branches(x, y):
    """A model that cannot be vectorised: Python reads a latent variable."""
    slope = pyro.sample("slope", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    logits = x[:, :5] @ slope
    if slope[0].item() > 0:
        logits = logits + slope[1]
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def make_network():
    """A network with 3,400 weights."""
    body = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    return classifier(to_bayesian_(body), num_data=2000)


def call(name, function, model, x, y, limit):
    """Run one function with a limit."""
    pyro.clear_param_store()
    options = {"max_seconds": limit, "progress": False}
    if function == "fit":
        return fit(model, "auto", x, y, seed=0, **options)
    guide = AutoNormal(model, init_scale=0.1)
    if function == "train":
        loss = ImplicitELBO(8, nonfinite="skip")
        return train(model, guide, loss, x, y, schedule=Schedule(num_steps=10**6), **options)
    guide(x, y)
    if function == "refine":
        return refine(model, guide, x, y, max_gradients=10**7, seed=0, **options)
    return diagnose(model, guide, x, y, max_core_seconds=limit, progress=False)


def summary(result):
    """Return how a call ended, in a few words."""
    if isinstance(result, list):
        return f"{len(result)} steps"
    stages = getattr(result, "stages", None)
    if stages is not None:
        return "; ".join(f"{one.name}: {one.outcome}" for one in stages)[:300]
    if hasattr(result, "stopped"):
        drawn = f"{result.num_chains} chains x {result.num_draws}"
        return f"{result.stopped}, {drawn}, warm-up {result.warmup_gradients}"
    return str(getattr(result, "verdict", ""))


def main():
    """Measure all calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=float, nargs="+", default=[2.0, 5.0, 20.0])
    parser.add_argument("--functions", nargs="+", default=["fit", "train", "refine", "diagnose"])
    parser.add_argument(
        "--models", nargs="+", default=["logistic", "groups", "walk", "branches", "network"]
    )
    arguments = parser.parse_args()
    wall, time.perf_counter = time.perf_counter, time.process_time
    torch.manual_seed(0)
    x = torch.randn(2000, 60)
    y = (x[:, 0] + torch.randn(2000) > 0).float()
    warnings.simplefilter("ignore")
    for name in arguments.models:
        for function in arguments.functions:
            for limit in arguments.limits:
                model = make_network() if name == "network" else globals()[name]
                data = y.long() if name == "network" else y
                began, wall_began = time.process_time(), wall()
                try:
                    note = summary(call(name, function, model, x, data, limit))
                except Exception as error:  # is reported
                    note = f"{type(error).__name__}: {error}"[:100]
                found = {
                    "model": name,
                    "function": function,
                    "limit": limit,
                    "share": round((time.process_time() - began) / limit, 2),
                    "wall_share": round((wall() - wall_began) / limit, 2),
                    "note": note,
                }
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
