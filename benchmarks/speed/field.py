# SPDX-License-Identifier: Apache-2.0
"""``fit`` compared with other libraries: seconds and accuracy on six posteriors::

    python -m benchmarks.speed.field --data-dir DIR --numpyro /path/to/venv/bin/python
    python -m benchmarks.speed.field --report

Without ``--numpyro`` the script makes a temporary environment. Each cell is a separate process with
a limit of CPU time and adds one line to ``--out``; cells that have a line are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import (
    RESULTS,
    Record,
    append_record,
    environment,
    markdown_table,
    read_records,
)
from benchmarks.posteriordb import metrics
from benchmarks.speed.field_methods import METHODS as TORCH_METHODS
from benchmarks.speed.field_problems import NAMES, NETWORK_REFERENCE, Problem, load

OUT = RESULTS / "speed_field.jsonl"
KEY = ("problem", "method", "seed")
NEAR = 1.5
IMPORTS = 20  # CPU seconds of imports that are excluded, at most
JAX_METHODS = (
    "NumPyro NUTS",
    "nutpie, low rank",
    "blackjax Pathfinder",
    "NumPyro AutoMultivariateNormal",
    "NumPyro AutoBNAFNormal",
)
METHODS = ("fit", *JAX_METHODS, *(name for name in TORCH_METHODS if name != "fit"))


@cache
def numpyro_python(given: Path | None) -> Path:
    """Return the Python of NumPyro; create an environment if none is given."""
    if given is not None:
        return given
    folder = Path(tempfile.mkdtemp()) / "numpyro"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    words = ["-m", "pip", "install", "-q", "numpyro", "nutpie", "blackjax>=1.7"]
    subprocess.run([str(python), *words], check=True)
    return python


def run_apart(
    name: str, problem: Problem, method: str, seed: int, args: argparse.Namespace
) -> tuple[Record, dict[str, torch.Tensor]]:
    """Run one cell in a separate process; return its record and the draws by site."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if method in TORCH_METHODS:
            words = [sys.executable, "-m", "benchmarks.speed.field_methods"]
            last = [str(args.data_dir)] if args.data_dir else []
        else:
            words = [
                str(numpyro_python(args.numpyro)),
                str(Path(__file__).parent / "field_numpyro.py"),
            ]
            last = []
            environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
            environ["PYTHONPATH"] = ""
            arrays = {f"argument_{i}": value.numpy() for i, value in enumerate(problem.args)}
            np.savez(Path(folder) / "data.npz", **arrays)
        limit = int(args.time_limit) + IMPORTS
        process = subprocess.run(
            [*words, name, method, str(seed), folder, *last],
            env=environ,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
            stderr=subprocess.PIPE,
            text=True,
        )
        if not (Path(folder) / "record.json").exists():
            if process.returncode < 0:
                return {"error": f"more than {args.time_limit:g} CPU s"}, {}
            return {"error": process.stderr.strip().splitlines()[-1][:300]}, {}
        with np.load(Path(folder) / "draws.npz") as file:
            draws = {site: torch.as_tensor(file[site]).double() for site in file.files}
        return json.loads((Path(folder) / "record.json").read_text()), draws


def measured(draws: dict[str, torch.Tensor], problem: Problem) -> Record:
    """Return the ratio of the sliced distance to the sampling floor."""
    assert problem.reference is not None
    reference = problem.reference.double()
    features = problem.features(draws)
    if not features.isfinite().all():
        return {"error": "draws that are not finite"}
    return {"floors": metrics.distance(features, reference) / metrics.floor(reference)}


def make_network_reference(args: argparse.Namespace) -> None:
    """Every other one of 10,000 draws of NumPyro's NUTS: four chains after 1,000 of warm-up."""
    problem = load("network", None)
    args.time_limit = 3000
    record, draws = run_apart("network", problem, "reference", 1000, args)
    print(record)
    values = problem.features(draws)[::2]
    np.savez_compressed(NETWORK_REFERENCE, values=values.numpy().astype(np.float32))


def run_all(args: argparse.Namespace) -> None:
    done = {tuple(record[key] for key in KEY) for record in read_records(args.out)}
    for method in args.methods:
        for name in args.problems:
            for seed in args.seeds:
                if (name, method, seed) in done:
                    continue
                problem = load(name, args.data_dir)
                record, draws = run_apart(name, problem, method, seed, args)
                if draws:
                    record |= measured(draws, problem)
                key = dict(zip(KEY, (name, method, seed), strict=True))
                limit = {"time_limit": args.time_limit}
                append_record(args.out, key | record | limit | environment("cpu"))
                args.report_to.write_text(report(args.out))
                print(name, method, {k: v for k, v in record.items()}, flush=True)


def summary(records: list[Record]) -> str:
    """Return CPU seconds and ratios of all methods on all posteriors."""
    cells = {(one["problem"], one["method"]): _short(one) for one in records if one["seed"] == 0}
    rows = [[method, *(cells.get((name, method), "") for name in NAMES)] for method in METHODS]
    return markdown_table(["method", *NAMES], [row for row in rows if any(row[1:])])


def report(path: Path) -> str:
    """Return one table of all posteriors, and one for each."""
    records = read_records(path)
    parts = [NOTE, summary(records)]
    for name in NAMES:
        rows = []
        for method in METHODS:
            for record in records:
                if (record["problem"], record["method"]) == (name, method):
                    rows.append([method, *_cells(record)])
        parts.append(f"## {name}\n\n" + markdown_table(HEADER, rows))
    return "\n".join(parts)


HEADER = ["method", "CPU s", "of these to compile", "wall s", "ratio", "at most 1.5"]


def _short(record: Record) -> str:
    if "floors" not in record:
        return REFUSED.get(record["method"], record["error"])
    text = f"{record['cpu_seconds']:.0f} s, {record['floors']:.2f}"
    return f"**{text}**" if record["floors"] <= NEAR else text


def _cells(record: Record) -> list[str]:
    if "cpu_seconds" not in record:
        return [REFUSED.get(record["method"], record["error"]), "", "", "", "no"]
    cells = [f"{record[key]:.1f}" for key in ("cpu_seconds", "compile_seconds", "seconds")]
    if "floors" not in record:
        return [*cells, record["error"], "no"]
    return [*cells, f"{record['floors']:.2f}", "yes" if record["floors"] <= NEAR else "no"]


NOTE = """# Comparison with other libraries

`python -m benchmarks.speed.field`. The ratio to the sampling floor is the sliced 1-Wasserstein
distance from the reference, whitened, divided by the distance between two halves of the reference.
CPU seconds of one thread without imports, with a limit for each cell, on a machine shared with
other jobs (which increases wall seconds). `fit`: default settings. SVI: 3,000 steps of one
particle, Adam from .01 to 0. Pyro NUTS: one chain of 1,000 + 1,000 transitions; NumPyro NUTS: four
such chains, vectorised. nutpie 0.16.8: four chains of 800 + 1,000 transitions with its low-rank
mass matrix; each gradient of NumPyro's density is one call of Python. blackjax 1.7.1 Pathfinder:
four paths of 10,000 draws, resampled by Pareto-smoothed importance weights. Compilation: the
recordings of `fit`, the first three steps of Pyro's jit, the time that jax reports. jax 0.7.2; for
Pathfinder jax 0.10.2. Double precision.

References: exact draws for funnel, regression (ten weights, correlation .999) and GP (100 latent
variables); posteriordb's draws for the centred eight schools; long NUTS runs for GARCH
(`benchmarks/zoo`) and the network (50 units, 151 latent variables, 20 rows; compared by its
predictions), whose floors have fewer draws. The GARCH model is a Python loop over 200 steps in Pyro
and a `scan` in NumPyro.

CPU seconds and ratio to the floor, in bold if at most 1.5:
"""
#: An assertion in ``pyro.ops.jit`` fails: the guide's flows create parameters during tracing.
REFUSED = {"Pyro AutoIAFNormal, jit": "refused by Pyro's jit"}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--problems", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--data-dir", type=Path, help="holds the folder posteriordb")
    parser.add_argument("--numpyro", type=Path, help="Python with numpyro, nutpie, blackjax 1.7")
    parser.add_argument("--time-limit", type=float, default=120.0, help="CPU seconds of a cell")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report-to", type=Path, default=RESULTS / "speed_field.md")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--network-reference", action="store_true", help="only make that")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if args.report:
        args.report_to.write_text(report(args.out))
    elif args.network_reference:
        make_network_reference(args)
    else:
        run_all(args)


if __name__ == "__main__":
    main(parser().parse_args())
