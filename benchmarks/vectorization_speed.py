# SPDX-License-Identifier: Apache-2.0
"""How much faster is one step when a network runs once for all particles?

A network of 50 hidden units, written with ``PyroModule[nn.Linear]``, does not broadcast: Pyro's
``vectorize_particles=True`` fails on it, so ``Trace_ELBO`` runs it once per particle.
``ImplicitELBO`` runs it once, inside ``torch.func.vmap``. The script times both with two explicit
guides, and LIVI's implicit guides. All cases alternate in one process::

    python -m benchmarks.vectorization_speed
    python -m benchmarks.vectorization_speed --device cuda

The learning rate is zero, so every step of a case sees the same guide: the losses of the timed
steps estimate one number, and both ways to run the particles must agree on it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGuide,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_mean,
)
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import Tensor, nn
from tqdm import trange

from benchmarks.common import RESULTS, add_machine_arguments, environment, markdown_table, seconds
from pyro_implicit import LIVI_ELBO, AutoSemiImplicit
from pyro_implicit.infer import ImplicitELBO

NUM_FEATURES, NUM_HIDDEN, NUM_ROWS = 13, 50, 100
# Each case and its baseline.
PAIRS = [
    ("AutoNormal, loop", "AutoNormal, vmap"),
    ("AutoMultivariateNormal, loop", "AutoMultivariateNormal, vmap"),
    ("LIVI, 100 noise dimensions", "AutoNormal, vmap"),
    ("LIVI, default", "AutoNormal, vmap"),
]


class BNN(PyroModule):
    """A network with one hidden layer and a standard normal prior on each weight."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.hidden = PyroModule[nn.Linear](NUM_FEATURES, NUM_HIDDEN)
        self.output = PyroModule[nn.Linear](NUM_HIDDEN, 1)
        prior = dist.Normal(torch.tensor(0.0, device=device), 1.0)
        for layer in (self.hidden, self.output):
            for name, value in list(layer.named_parameters()):
                setattr(layer, name, PyroSample(prior.expand(value.shape).to_event(value.dim())))

    def forward(self, x: Tensor, y: Tensor) -> None:
        mean = self.output(torch.relu(self.hidden(x))).squeeze(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


class Case:
    """One guide and one ELBO, with a separate parameter store, and their times."""

    def __init__(self, guide: AutoGuide, elbo: Trace_ELBO) -> None:
        self.svi = SVI(guide.model, guide, Adam({"lr": 0.0}), elbo)
        with pyro.get_param_store().scope() as self.params:
            pass
        self.milliseconds: list[float] = []
        self.losses: list[float] = []

    def take_turn(self, data: tuple[Tensor, Tensor], budget: float) -> None:
        """Time single steps for ``budget`` seconds, at least one step."""
        with pyro.get_param_store().scope(self.params) as self.params:
            spent = 0.0
            while spent < budget:
                step = seconds(lambda: self.losses.append(self.svi.step(*data)), data[0].device)
                self.milliseconds.append(1e3 * step)
                spent += step

    def forget(self) -> None:
        """Drop the first round, which sets up guides and optimisers."""
        self.milliseconds.clear()
        self.losses.clear()

    def summary(self) -> dict[str, float]:
        return {
            "steps": len(self.milliseconds),
            "median_ms": median(self.milliseconds),
            "min_ms": min(self.milliseconds),
            "max_ms": max(self.milliseconds),
            "loss": mean(self.losses),
            "loss_standard_error": stdev(self.losses) / math.sqrt(len(self.losses)),
        }


def make_cases(device: str, num_particles: int) -> dict[str, Case]:
    loop = partial(Trace_ELBO, num_particles, vectorize_particles=False)
    vmap = partial(ImplicitELBO, num_particles=num_particles, vectorize_particles="vmap")
    livi = partial(LIVI_ELBO, num_particles=num_particles)
    # Both ways to run a guide must have the same initial value.
    model, at_zero = BNN(device), {"init_loc_fn": init_to_mean}
    return {
        "AutoNormal, loop": Case(AutoNormal(model, **at_zero), loop()),
        "AutoNormal, vmap": Case(AutoNormal(model, **at_zero), vmap()),
        "AutoMultivariateNormal, loop": Case(AutoMultivariateNormal(model, **at_zero), loop()),
        "AutoMultivariateNormal, vmap": Case(AutoMultivariateNormal(model, **at_zero), vmap()),
        "LIVI, 100 noise dimensions": Case(
            AutoSemiImplicit(model, noise_dim=100, frame="mode", **at_zero), livi()
        ),
        "LIVI, default": Case(AutoSemiImplicit(model, frame="mode", **at_zero), livi()),
    }


def measure(
    args: argparse.Namespace,
    make_cases: Callable[[], dict[str, Case]],
    pairs: Iterable[tuple[str, str]],
    settings: dict[str, Any],
) -> None:
    """Alternate between all cases, and write and print the times of their steps.

    :param pairs: cases whose medians are compared.
    :param settings: written together with rounds and seed.
    """
    torch.set_num_threads(args.threads)
    pyro.set_rng_seed(args.seed)
    x = torch.randn(NUM_ROWS, NUM_FEATURES, device=args.device)
    data = x, torch.sin(x.sum(-1))
    cases = make_cases()
    for turn in trange(args.turns + 1, unit="turn"):
        for case in cases.values():
            case.take_turn(data, args.seconds)
            if turn == 0:
                case.forget()
    summaries = {name: case.summary() for name, case in cases.items()}
    ratios = {}
    for name, other in pairs:
        ratios[f"{name} / {other}"] = summaries[name]["median_ms"] / summaries[other]["median_ms"]
    settings = settings | {"turns": args.turns, "seed": args.seed}
    result = environment(args.device) | settings | {"cases": summaries, "ratios": ratios}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{case['median_ms']:.1f}",
            f"{case['min_ms']:.1f} to {case['max_ms']:.1f}",
            str(case["steps"]),
            f"{case['loss']:.1f} +- {case['loss_standard_error']:.1f}",
        ]
        for name, case in result["cases"].items()
    ]
    header = ["guide", "ms per step", "min to max", "steps", "loss +- standard error"]
    ratios = [[pair, f"{ratio:.1f}"] for pair, ratio in result["ratios"].items()]
    return markdown_table(header, rows) + "\n" + markdown_table(["ratio of medians", ""], ratios)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--particles", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10, help="turns of each case")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "vectorization_speed.json")
    add_machine_arguments(parser)
    args = parser.parse_args()
    make = partial(make_cases, args.device, args.particles)
    measure(args, make, PAIRS, {"particles": args.particles})
