# SPDX-License-Identifier: Apache-2.0
"""Rank true values among draws of ``fit`` and of ``refine``, on data simulated from the models.

::

    python -m benchmarks.sbc.run --data-sets 200     # resumable: run it again to go on
    python -m benchmarks.sbc.report               # results/sbc.md and sbc.png

For each data set, the latent variables are drawn from the prior, and the data given these. ``fit``
has default settings; ``refine`` starts at draws of a barely trained mean field. The statistics are
the latent variables, one by one, and the log-likelihood. Each run adds one line to ``--out``; runs
that have a line are skipped.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.common import RESULTS, append_record, environment, read_records
from benchmarks.sbc.models import MODELS
from pyro_implicit import fit, refine
from pyro_implicit.density import Target
from pyro_implicit.density.model import compute_log_prob

__all__ = ["METHODS", "NUM_DRAWS", "OUT", "run"]

OUT = RESULTS / "sbc.jsonl"
METHODS = ("fit", "refine")
NUM_DRAWS = 99
NUM_CHAINS = 128
KEY = ("model", "method", "seed")

Draws = dict[str, Tensor]


def streams(seed: int) -> tuple[int, int]:
    """Independent seeds of the truth and of the fit: draws of one seed would repeat the truth."""
    first, second = np.random.SeedSequence(seed).generate_state(2)
    return int(first), int(second)


def simulate(model: Callable[..., Any], seed: int) -> tuple[Draws, Tensor]:
    """Draw latent variables from the prior and data given these."""
    pyro.set_rng_seed(seed)
    nodes = poutine.trace(model).get_trace().nodes
    y = nodes["y"]["value"]
    names = Target(model, y).shapes
    return {name: nodes[name]["value"] for name in names}, y


def by_fit(model: Callable[..., Any], y: Tensor, seed: int) -> tuple[Draws, str]:
    """Return draws of ``fit``, and their description."""
    pyro.set_rng_seed(seed)
    result = fit(model, "auto", y, progress=False)
    if result.refined is not None:
        return result.sample(NUM_DRAWS), result.refined.stopped
    kind = "guide" if result.correction is None else "corrected"
    return result.sample(NUM_DRAWS), kind


def by_refine(model: Callable[..., Any], y: Tensor, seed: int) -> tuple[Draws, str]:
    """Return draws of ``refine``, the last draw of each chain."""
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    continuous = poutine.block(model, hide=["choice"])  # the discrete latent keeps its prior draw
    guide = AutoNormal(continuous, init_scale=0.3)
    svi = SVI(continuous, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    for _ in range(100):
        svi.step(y)
    result = refine(model, guide, y, num_chains=NUM_CHAINS, progress=False)
    chains = torch.randperm(NUM_CHAINS)[:NUM_DRAWS]
    return {name: value[chains, -1] for name, value in result.samples.items()}, result.stopped


def statistics(density: Target, draws: Draws) -> dict[str, Tensor]:
    """Each latent, ``(num_draws,)``, and the log-likelihood."""
    found = {}
    for name in density.shapes:
        columns = draws[name].reshape(len(draws[name]), -1).unbind(-1)
        for index, column in enumerate(columns):
            found[f"{name}[{index}]" if len(columns) > 1 else name] = column

    def log_likelihood(trace: Any) -> Tensor:
        compute_log_prob(trace)
        sites = [site for name, site in trace.nodes.items() if site["type"] == "sample"]
        # The sum over discrete latents is an observed site, too.
        return torch.as_tensor(sum(s["log_prob_sum"] for s in sites if s["is_observed"]))

    found["log_likelihood"] = density.read_at(draws, log_likelihood)
    return found


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    """Return the ranks of one data set."""
    model = MODELS[name]
    of_truth, of_fit = streams(seed)
    truth, y = simulate(model, of_truth)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws, how = (by_fit if method == "fit" else by_refine)(model, y, of_fit)
    seconds = time.perf_counter() - start
    density = Target(model, y)
    true = {key: value.unsqueeze(0) for key, value in truth.items()}
    true_values, of_draws = statistics(density, true), statistics(density, draws)
    ranks = {key: int((of_draws[key] < true_values[key]).sum()) for key in of_draws}
    assert all(value.isfinite().all() for value in of_draws.values())
    return {"model": name, "method": method, "seed": seed, "how": how, "ranks": ranks,
            "seconds": round(seconds, 2)}  # fmt: skip


def main() -> None:
    """Run each model, method and data set that has no line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--data-sets", type=int, default=200)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = {tuple(record[key] for key in KEY) for record in read_records(args.out)}
    began, machine = time.perf_counter(), environment("cpu")
    for seed in range(args.data_sets):
        for name in args.models:
            for method in args.methods:
                if (name, method, seed) in done:
                    continue
                if time.perf_counter() - began > args.max_seconds:
                    return
                append_record(args.out, {**run(name, method, seed), "commit": machine["commit"]})


if __name__ == "__main__":
    main()
