# SPDX-License-Identifier: Apache-2.0
"""Run methods on posteriors of posteriordb with several seeds, and measure each result.

::

    python -m benchmarks.posteriordb.run --data-dir /path/to/data
    python -m benchmarks.posteriordb.run --data-dir D --methods implicit NUTS --seeds 0 1 2 \\
        --posteriors eight_schools-eight_schools_centered
    python -m benchmarks.posteriordb.report

Each run adds one line to ``--out``; a run of the same posterior, method and seed whose line is
there already is not repeated, failed ones included: delete a line to repeat it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import (
    RESULTS,
    TimeLimit,
    append_record,
    environment,
    read_records,
    time_limit,
)
from benchmarks.posteriordb import data
from benchmarks.posteriordb.methods import METHODS, Budget, seeded
from benchmarks.posteriordb.metrics import floor, measure

OUT = RESULTS / "posteriordb.jsonl"
KEY = ("posterior", "method", "seed")


def run(
    posterior: Any,
    reference: torch.Tensor,
    method: str,
    seed: int,
    budget: Budget,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run one method with one seed; a run that raises an error is a result, too."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with time_limit(seconds):
            draws, result = seeded(method, posterior, seed, budget)
    except (Exception, TimeLimit) as error:
        draws, result = None, {"error": f"{type(error).__name__}: {error}"[:500]}
    result["seconds"] = time.perf_counter() - wall
    result["cpu_seconds"] = time.process_time() - cpu
    if draws is not None:
        try:
            result |= measure(posterior.unconstrain(draws).detach(), reference)
        except ValueError as error:
            result["error"] = f"{type(error).__name__}: {error}"[:500]
    return result


def reference_of(posterior: Any) -> torch.Tensor:
    """The reference draws in unconstrained space, ``(10000, dim)``."""
    return posterior.unconstrain(posterior.reference()).detach()


def run_all(args: argparse.Namespace) -> None:
    budget = Budget(steps=args.steps)
    machine = environment("cpu")
    done = {tuple(record[key] for key in KEY) for record in read_records(args.out)}
    for name in args.posteriors:
        todo = [(m, s) for m in args.methods for s in args.seeds if (name, m, s) not in done]
        if not todo:
            continue
        posterior = data.load(name, args.data_dir)
        reference = reference_of(posterior)
        size = {"dim": reference.shape[1]}
        size |= {"floor": floor(reference), "nuts_floor": floor(reference, budget.nuts_draws)}
        for method, seed in (bar := tqdm(todo, unit="run")):
            bar.set_description(f"{name} {method} {seed}")
            result = run(posterior, reference, method, seed, budget, args.time_limit)
            if "distance" in result:
                result["ratio"] = result["distance"] / size["floor"]
            key = dict(zip(KEY, (name, method, seed), strict=True))
            append_record(args.out, key | size | result | {"budget": asdict(budget)} | machine)


def parser() -> argparse.ArgumentParser:
    names = [*data.NAMES, *data.EXTRA]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="holds the folder posteriordb")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--posteriors", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--time-limit", type=float, help="seconds of wall time for one run")
    parser.add_argument("--steps", type=int, default=Budget.steps, help="of the SVI baselines")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(args.threads)
    run_all(args)


if __name__ == "__main__":
    main(parser().parse_args())
