# SPDX-License-Identifier: Apache-2.0
"""``fit`` with default settings on funnels, crossed and separated modes, for several seeds.

::

    python -m benchmarks.hard_geometries --data-dir /path/to/data --seeds 0 1 2 3 4
    python -m benchmarks.hard_geometries --report

The targets are those of ``targets.py`` and, if ``--data-dir`` has it, posteriordb's centred eight
schools. Each run adds one line to ``--out``; runs that have a line are skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    environment,
    markdown_table,
    missing_runs,
    read_records,
    write_page,
)
from benchmarks.posteriordb import data, metrics
from benchmarks.targets import (
    MissingData,
    gmm40_centers,
    make_target,
    modes_found,
    weight_total_variation,
)
from pyro_implicit.diagnostics import sliced_wasserstein, sliced_wasserstein_floor
from pyro_implicit.fitting import fit

OUT = RESULTS / "hard_geometries.jsonl"
EIGHT_SCHOOLS = "eight_schools-eight_schools_centered"
NAMES = ("funnel", "funnel_wide", EIGHT_SCHOOLS, "x_shape", "x_shape_gap", "banana", "gmm40")
ALL = (*NAMES, "multimodal", "waveform", "conditioned_diffusion")


def problem(name: str, data_dir: Path | None) -> tuple[Any, tuple, Any, Tensor]:
    """Return model, arguments, a function that flattens draws, and exact draws."""
    if name == EIGHT_SCHOOLS:
        posterior = data.load(name, data_dir)
        reference = posterior.unconstrain(posterior.reference())
        return posterior.model, posterior.args, posterior.unconstrain, reference
    target = make_target(name, data_dir=data_dir)
    reference = target.truth(10_000, 0).double()
    if len(reference) < 10_000:  # the diffusion: each seed has one half of all draws
        reference = torch.cat([reference, target.truth(10_000, 1).double()])
    return target.model, (), target.flatten, reference


def run(name: str, seed: int, data_dir: Path | None) -> dict[str, Any]:
    """Run and measure one fit."""
    model, args, flatten, reference = problem(name, data_dir)
    pyro.clear_param_store()
    wall, cpu = time.perf_counter(), time.process_time()
    result = fit(model, "auto", *args, seed=seed, progress=False)
    record: dict[str, Any] = {
        "target": name,
        "seed": seed,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "steps": len(result.losses),
        "guide": type(result.guide).__name__,
        "bounds": result.bounds,
        "num_modes": result.num_modes,
        "stages": [stage.name for stage in result.stages],
    }
    draws = flatten(result.sample(len(reference))).double()
    record |= metrics.measure(draws, reference)
    record["ratio"] = record["distance"] / metrics.floor(reference)
    record["sw2"] = float(sliced_wasserstein(draws, reference))
    record["sw2_floor"] = float(sliced_wasserstein_floor(reference))
    record["first_sd_ratio"] = float(draws[:, 0].std() / reference[:, 0].std())
    if name == "gmm40":
        centers = gmm40_centers()
        record["modes_found"] = modes_found(draws, centers)
        record["total_variation"] = weight_total_variation(draws, centers)
    return record


def report(path: Path) -> str:
    """Return the table of all records: median and range over seeds."""
    rows = []
    records = read_records(path)
    for name in ALL:
        found = [record for record in records if record["target"] == name]
        if not found:
            continue

        def spread(key: str, digits: int = 2, found: list = found) -> str:
            values = [record[key] for record in found if key in record]
            if not values:
                return ""
            low, high = min(values), max(values)
            return f"{median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

        rows.append(
            [
                name,
                str(len(found)),
                "/".join(sorted({record["guide"] for record in found})),
                spread("ratio"),
                spread("sw2", 4),
                f"{found[0]['sw2_floor']:.4f}",
                spread("first_sd_ratio", 3),
                spread("modes_found", 0),
                spread("total_variation", 3),
                spread("cpu_seconds", 0),
            ]
        )
    header = ["target", "seeds", "guide", "whitened W1 / floor", "SW2", "floor of SW2"]
    header += ["sd ratio, first latent", "modes of 40", "total variation", "CPU seconds"]
    return markdown_table(header, rows)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--targets", nargs="+", default=list(ALL), choices=ALL)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    add_output_arguments(parser, OUT)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(args.threads)
    keys = [{"target": name, "seed": seed} for seed in args.seeds for name in args.targets]
    for key in missing_runs(args.out, [] if args.report else keys):
        try:
            record = run(key["target"], key["seed"], args.data_dir)
        except (MissingData, data.MissingData) as error:
            print(f"{key['target']} left out: {error}")
            continue
        append_record(args.out, record | environment("cpu"))
    command = "python -m benchmarks.hard_geometries --data-dir DATA --seeds 0 1 2 3 4"
    title = f"# Hard geometries, default settings\n\n`{command}`\n\n"
    write_page(args.out, title + report(args.out))


if __name__ == "__main__":
    main(parser().parse_args())
