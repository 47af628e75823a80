# SPDX-License-Identifier: Apache-2.0
"""How accurate are guides on posteriors with known exact draws?

Fit each method to each target with several seeds and measure the sliced 2-Wasserstein distance
between 10,000 draws of the guide and 10,000 exact draws (5,000 if they come from a file), and its
*floor*: the same distance between two independent sets of exact draws. About half
a minute per run on one CPU thread::

    python -m benchmarks.sampling_targets --data-dir /path/to/data
    python -m benchmarks.sampling_targets --targets banana --methods implicit --seeds 1
    python -m benchmarks.sampling_targets --report

Without ``--methods`` the explicit guides and LIVI run. The comparison of all methods::

    python -m benchmarks.sampling_targets --methods all --steps 2000 --particles 64 --seeds 2 \\
        --targets banana x_shape multimodal waveform conditioned_diffusion \\
        --out benchmarks/results/all_methods.jsonl --data-dir /path/to/data

Each run adds one line to ``--out``; runs that have a line with
the same settings are skipped. After a change of the library, use another file.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoLaplaceApproximation
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_machine_arguments,
    add_output_arguments,
    append_record,
    attempt,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    missing_runs,
    read_records,
    seconds,
    write_page,
)
from benchmarks.sampling_methods import EXPLICIT_AND_LIVI, METHODS
from benchmarks.targets import TARGETS, KnownPosterior, MissingData, make_target
from pyro_implicit.diagnostics import draw, sliced_wasserstein

NUM_DRAWS = 10_000
NUM_FLOOR_PAIRS = 10
TRUTH_SEED = 1_000_000  # distinct from the seeds of the guides


def truth(target: KnownPosterior, seed: int) -> Tensor:
    return target.truth(NUM_DRAWS, TRUTH_SEED + seed)


def floor(target: KnownPosterior) -> float:
    """Distance between two sets of exact draws: a median over pairs, because of heavy tails."""
    pairs = [2 * pair for pair in range(NUM_FLOOR_PAIRS)]
    return median(
        sliced_wasserstein(truth(target, 1000 + pair), truth(target, 1001 + pair)).item()
        for pair in pairs
    )


def run(target: KnownPosterior, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Fit one method to one target with one seed and measure the result."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = METHODS[method].make_guide(target.model)
    elbo = METHODS[method].make_elbo(args.particles)
    svi = SVI(target.model, guide, cosine_adam(args.lr, args.steps), elbo)
    cpu_start = time.process_time()
    wall = seconds(lambda: fit(svi, args.steps), args.device)
    cpu = time.process_time() - cpu_start
    if isinstance(guide, AutoLaplaceApproximation):
        guide = guide.laplace_approximation()
    exact = truth(target, seed)
    draws = target.flatten(draw(guide, len(exact)))
    return {
        "sw2": sliced_wasserstein(draws, exact).item(),
        "seconds": wall,
        "cpu_seconds": cpu,
        "sd_ratio_first": (draws[:, 0].std() / exact[:, 0].std()).item(),
    }


def run_all(args: argparse.Namespace) -> None:
    settings = {key: getattr(args, key) for key in ("steps", "particles", "lr")}
    machine = environment(args.device)
    settings["device"] = machine["device"]
    floors = {record["target"]: record["floor"] for record in read_records(args.out)}
    for name in args.targets:
        try:
            target = make_target(name, args.device, args.data_dir)
        except MissingData as missing:
            print(f"{name} is left out: {missing}")
            continue
        known_floor = floors[name] if name in floors else floor(target)
        reference = {"floor": known_floor, "threshold": target.threshold}
        methods = METHODS if "all" in args.methods else args.methods
        keys = (
            {"target": name, "method": method, "seed": seed} | settings
            for method in methods
            for seed in range(args.seeds)
        )
        for key in missing_runs(args.out, keys):
            result = attempt(run, target, key["method"], key["seed"], args)
            if "sw2" in result:
                result["ratio"] = result["sw2"] / known_floor
            append_record(args.out, key | reference | result | machine)


def report(args: argparse.Namespace) -> str:
    """Return the Markdown table of ``--out``: one row for each target, method and setting."""
    groups = defaultdict(list)
    for record in read_records(args.out):
        keys = ("target", "method", "steps", "particles", "lr", "device")
        groups[tuple(record[key] for key in keys)].append(record)
    order = {name: position for position, name in enumerate([*TARGETS, *METHODS])}
    rows = []
    for key in sorted(groups, key=lambda k: (order[k[0]], order[k[1]], *k[2:])):
        target, method, steps, particles, lr, device = key
        records = groups[key]
        fitted = [record for record in records if "error" not in record]
        good = sum(map(succeeded, fitted))
        row = [target, method, f"{steps} x {particles}, {lr:g}, {device}"]
        row.append(f"{records[0]['floor']:.3f}")
        for field, digits in [("sw2", 3), ("ratio", 2), ("seconds", 0)]:
            row.append(spread([record[field] for record in fitted], digits))
        sd_ratios = [record["sd_ratio_first"] for record in fitted]
        row.append(spread(sd_ratios, 2) if target.startswith("funnel") else "")
        rows.append([*row, f"{good} of {len(records)}"])
    header = ["target", "method", "steps x particles, rate, device", "floor", "SW2", "ratio"]
    header += ["seconds", "sd ratio of v", "succeeded"]
    note = (
        "\nMedian (range) over seeds. A run succeeds if its distance is at most 1.5 times the "
        "sampling floor,\n2 times on banana; on the funnels, if the sd ratio of v is at least 0.95."
        " Errors count as failures.\n"
    )
    return markdown_table(header, rows) + note


def comparison(args: argparse.Namespace) -> str:
    """Return one row for each method, one column for each target: ratio to the floor, and time."""
    cells, floors = defaultdict(list), {}
    for record in read_records(args.out):
        cells[record["method"], record["target"]].append(record)
        floors[record["target"]] = record["floor"]
    targets = [name for name in TARGETS if name in floors]
    common_steps = max(record["steps"] for records in cells.values() for record in records)
    rows = [["floor", "", *(f"{floors[name]:.4f}" for name in targets)]]
    for method in METHODS:
        if any((method, name) in cells for name in targets):
            row = [cell(cells.get((method, name), []), common_steps) for name in targets]
            rows.append([method, METHODS[method].settings, *row])
    note = (
        "\nRatio of SW2 to the sampling floor, and CPU seconds of one fit; medians over seeds. "
        f"Bold: all seeds\nsucceeded. Fits with other than {common_steps} steps are marked. Each "
        "method has its default settings, except those\nin its row, on all targets; Adam with "
        "clipped gradients and a cosine schedule.\n"
    )
    return markdown_table(["method", "guide and settings", *targets], rows) + note


def cell(records: list[dict[str, Any]], common_steps: int) -> str:
    fitted = [record for record in records if "error" not in record]
    if not fitted:
        return "failed" if records else ""
    ratio = f"{median(record['ratio'] for record in fitted):.2f}"
    if all(map(succeeded, records)):
        ratio = f"**{ratio}**"
    cpu = median(record.get("cpu_seconds", record["seconds"]) for record in fitted)
    steps = {record["steps"] for record in fitted} - {common_steps}
    failed = f", {len(records) - len(fitted)} failed" if len(fitted) < len(records) else ""
    return f"{ratio} ({cpu:.0f} s{failed}{''.join(f', {n} steps' for n in sorted(steps))})"


def succeeded(record: dict[str, Any]) -> bool:
    if "error" in record:
        return False
    if record["target"].startswith("funnel"):
        return record["sd_ratio_first"] >= 0.95
    return record["ratio"] <= record["threshold"]


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "failed"
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, median, max))
    return f"{middle} ({low} to {high})"


def main(args: argparse.Namespace) -> None:
    if args.report:
        write_page(args.out, comparison(args) + "\n" + report(args))
        return
    torch.set_num_threads(args.threads)
    run_all(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument(
        "--methods", nargs="+", default=EXPLICIT_AND_LIVI, choices=["all", *METHODS]
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--particles", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--data-dir", type=Path, help="holds sivi_blr/ and the like")
    add_output_arguments(parser, RESULTS / "sampling_targets.jsonl")
    add_machine_arguments(parser)
    main(parser.parse_args())
