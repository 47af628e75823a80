# SPDX-License-Identifier: Apache-2.0
"""Compare a stream of ten batches, each with the last posterior as its prior, with one fit.

::

    python -m benchmarks.streams --seeds 0 1 2

The ratio is the distance of the stream's draws of the shared latent variables to exact draws from
the posterior of all data (on a grid), divided by the distance between two halves of the latter;
``logistic`` has draws of one fit in their place. ``weight`` is the probability of a positive ``x``
in ``two_modes``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Record,
    append_record,
    environment,
    markdown_table,
    read_records,
    spread,
    write_page,
)
from benchmarks.posteriordb.metrics import floor, measure
from pyro_implicit import fit

OUT = RESULTS / "streams.jsonl"
NUM_BATCHES = 10
NUM_DRAWS = 10_000


def logistic(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(torch.zeros(5), 2.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ slope), obs=y)


def logistic_data() -> tuple[Tensor, ...]:
    x = torch.randn(300, 5)
    slope = torch.tensor([1.5, -1.0, 0.5, 0.0, 2.0])
    return x, torch.bernoulli(torch.sigmoid(x @ slope))


def schools(y: Tensor) -> None:
    """Each batch has schools of its own, which share their mean and spread."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfNormal(5.0))
    with pyro.plate("schools", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, 2.0), obs=y)


def schools_data() -> tuple[Tensor, ...]:
    return (4 + 1.5 * torch.randn(60) + 2 * torch.randn(60),)


def two_modes(y: Tensor) -> None:
    """The sign of ``x`` is known from its first prior only."""
    x = pyro.sample("x", dist.Normal(0.3, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x.square(), noise), obs=y)


def two_modes_data() -> tuple[Tensor, ...]:
    return (1.2 + 0.5 * torch.randn(50),)


MODELS: dict[str, tuple[Callable[..., None], Callable[[], tuple[Tensor, ...]], tuple[str, ...]]] = {
    "logistic": (logistic, logistic_data, ("slope",)),
    "schools": (schools, schools_data, ("mean", "spread")),
    "two_modes": (two_modes, two_modes_data, ("x", "noise")),
}


def log_prob_of(name: str, points: Tensor, y: Tensor) -> Tensor:
    """The posterior of points (num, 2) of a real number and the logarithm of a scale."""
    first, scale = points[:, 0], points[:, 1].exp()
    if name == "schools":
        loc, sd, prior = first, (scale**2 + 4).sqrt(), dist.Normal(0.0, 5.0)
    else:
        loc, sd, prior = first.square(), scale, dist.Normal(0.3, 1.0)
    rows = sum(dist.Normal(loc, sd).log_prob(one) for one in y.double())
    wide = dist.HalfNormal(5.0 if name == "schools" else 1.0)
    return rows + prior.log_prob(first) + wide.log_prob(scale) + points[:, 1]


def exact_draws(name: str, y: Tensor) -> Tensor:
    """Draw the real number and the scale from a grid, with noise of the width of a cell."""
    lines = torch.linspace(-8, 12, 2001).double(), torch.linspace(-10, 4, 1401).double()
    points = torch.cartesian_prod(*lines)
    chosen = log_prob_of(name, points, y).softmax(0).multinomial(NUM_DRAWS, replacement=True)
    draws = points[chosen] + 0.01 * (torch.rand(NUM_DRAWS, 2).double() - 0.5)
    return torch.stack([draws[:, 0], draws[:, 1].exp()], -1).float()


def shared(result: Any, sites: tuple[str, ...]) -> Tensor:
    draws = result.sample(NUM_DRAWS)
    return torch.cat([draws[name].reshape(NUM_DRAWS, -1) for name in sites], -1)


def run(name: str, seed: int) -> Record:
    model, make, sites = MODELS[name]
    torch.manual_seed(1000 + seed)
    data = make()
    batches = list(zip(*(one.chunk(NUM_BATCHES) for one in data), strict=True))
    clock = time.process_time()
    stream = fit(model, "auto", *batches[0], seed=seed, progress=False)
    worst = 1.0
    for index, batch in enumerate(batches[1:], 1):
        stream = stream.update(model, *batch, seed=1000 * seed + index, progress=False)
        found = stream.stages[0].outcome.split("effective sample size ")
        worst = min([worst, *(float(one.split("%")[0]) / 100 for one in found[1:])])
    seconds = time.process_time() - clock
    clock = time.process_time()
    at_once = fit(model, "auto", *data, seed=seed, progress=False)
    seconds_at_once = time.process_time() - clock
    draws, others = shared(stream, sites), shared(at_once, sites)
    reference = others if name == "logistic" else exact_draws(name, data[0])
    record = {"model": name, "seed": seed, **measure(draws, reference)}
    record["ratio"] = record["distance"] / floor(reference)
    if name != "logistic":
        record["ratio_at_once"] = measure(others, reference)["distance"] / floor(reference)
    record |= {"stream_seconds": seconds, "seconds_at_once": seconds_at_once}
    record |= {"least_efficiency": worst, "prior": stream.stages[0].outcome}
    if name == "two_modes":
        record["weight"] = (draws[:, 0] > 0).float().mean().item()
        record["exact_weight"] = (reference[:, 0] > 0).float().mean().item()
    return record


def report(out: Path) -> None:
    """Write the page."""
    rows = []
    for name in MODELS:
        found = [one for one in read_records(out) if one["model"] == name]
        weights = [abs(one["weight"] - one["exact_weight"]) for one in found if "weight" in one]
        digits = {"ratio": 2, "ratio_at_once": 2, "mean_error": 3}
        digits |= {"stream_seconds": 0, "seconds_at_once": 0}
        values = {key: [one[key] for one in found if key in one] for key in digits}
        columns = [spread(values[key], digits[key]) if values[key] else "" for key in digits]
        rows.append([name, str(len(found)), *columns, f"{max(weights):.3f}" if weights else ""])
    head = ["model", "seeds", "ratio", "ratio of one fit", "largest error of a mean, sds"]
    head += ["CPU s, ten batches", "CPU s, one fit", "largest error of a weight"]
    text = ["# Streams of ten batches", __doc__.split("\n\n", 2)[2], markdown_table(head, rows)]
    write_page(out, "\n\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="only write the page of --out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [] if args.report else args.models:
        for seed in args.seeds:
            record = run(name, seed)
            print(record)
            append_record(args.out, record | environment("cpu"))
    report(args.out)


if __name__ == "__main__":
    main()
