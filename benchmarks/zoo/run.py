# SPDX-License-Identifier: Apache-2.0
"""Run methods on the models of a collection, each in a separate process, and measure the results.

::

    python -m benchmarks.zoo.run --methods fit --models coin ordinal --out results/zoo.jsonl
    python -m benchmarks.zoo.run --split look --time-limit 120 --out results/zoo_look.jsonl
    python -m benchmarks.zoo.run --collection large --time-limit 120
    python -m benchmarks.zoo.run --threads 1 2 --models car_lattice --out cores.jsonl
    python -m benchmarks.zoo.run --device cuda --models network_500 --out gpu_fits.jsonl
    python -m benchmarks.zoo.report --out results/zoo.jsonl

Each run adds one line to ``--out``; runs that have a line are skipped, failed ones included: delete
a line to repeat it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RESULTS,
    Record,
    TimeLimit,
    append_record,
    cpu_seconds,
    environment,
    markdown_table,
    missing_runs,
    read_records,
    time_limit,
)

RUN = ("model", "method", "seed")
KEY = (*RUN, "threads")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _failure(error: BaseException) -> Record:
    """Return kind, message and origin of an error."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return {"error": f"{type(error).__name__}: {error}"[:800], "frames": frames[-12:]}


def run(
    name: str,
    method: str,
    seed: int,
    threads: int,
    limits: tuple[float, float],
    dtype: str,
    device: str,
    draws: Path,
) -> Record:
    """Run one method in this process.

    :param threads: of torch, and the processes of ``fit``.
    :param limits: CPU seconds of the method, and of the diagnosis.
    :param dtype: of model and data.
    :param device: torch's default in this process.
    :param draws: file of the draws, ``(num_draws, num_features)``.
    """
    import numpy as np
    import pyro
    import torch

    from benchmarks.zoo import registry
    from benchmarks.zoo.methods import METHODS

    # For code that no signal interrupts: the kernel ends such a process.
    hard = int(2 * sum(limits) + 120)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    torch.set_default_dtype(getattr(torch, dtype))
    if device != "cpu":  # a default device, also the CPU, costs time in every call of torch
        torch.set_default_device(device)
    torch.set_num_threads(threads)
    zoo = registry.load(name)
    args, model = zoo.data(), zoo.model()
    record: Record = {"kind": zoo.kind, "start_mb": _peak_mb()}
    pyro.set_rng_seed(seed)
    wall, cpu = time.perf_counter(), cpu_seconds()
    fitted = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with time_limit(limits[0], cpu=True):
                fitted = METHODS[method](zoo, model, args, seed)
        except (Exception, TimeLimit) as error:
            record |= _failure(error)
    record["seconds"] = time.perf_counter() - wall
    record["cpu_seconds"] = cpu_seconds() - cpu
    record["peak_mb"] = _peak_mb()
    record["warnings"] = list(dict.fromkeys(str(warning.message)[:300] for warning in caught))[:8]
    if fitted is None:
        return record
    record |= fitted.notes
    try:
        features, _ = zoo.features(fitted.sample(), args)
        np.save(draws, features.detach().cpu().numpy().astype(np.float32))
    except Exception as error:
        record |= _failure(error)
    if fitted.diagnose is not None:
        record |= _diagnosis(fitted.diagnose, limits[1])
    return record


def _diagnosis(diagnose: Callable[[], Any], limit: float) -> Record:
    """Return the verdict and its cost."""
    from benchmarks.posteriordb.verdicts import summary

    cpu = time.process_time()
    try:
        with time_limit(limit, cpu=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = summary(diagnose())
        record = {key: found[key] for key in ("verdict", "findings", "khat", "efficiency")}
    except (Exception, TimeLimit) as error:
        record = {f"diagnosis_{key}": value for key, value in _failure(error).items()}
    return record | {"diagnosis_cpu_seconds": time.process_time() - cpu}


def run_apart(name: str, method: str, seed: int, threads: int, args: argparse.Namespace) -> Record:
    """Run and measure one method in a separate process."""
    limits = (args.time_limit, args.diagnosis_limit)
    args.draws.mkdir(parents=True, exist_ok=True)
    draws = args.draws / f"{name}-{method}-{seed}.npy"
    draws.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        limit_words = [str(limit) for limit in limits]
        words = [name, method, str(seed), str(threads), *limit_words]
        words += [args.dtype, args.device, str(draws), str(answer)]
        own = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/kernels"}
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.zoo.run", "--child", *words],
            env={**os.environ, **own},  # an empty compiler cache
            stderr=subprocess.PIPE,
            text=True,
        )
        if not answer.exists():
            return {"error": f"died, status {process.returncode}: {process.stderr[-800:]}"}
        record = json.loads(answer.read_text())
    return record | measured(name, draws)


def measured(name: str, draws: Path) -> Record:
    """Measure saved draws against the reference; empty if either is missing."""
    import numpy as np
    import torch

    from benchmarks.zoo.metrics import measure, read_reference

    reference = read_reference(name)
    if reference is None or not draws.exists():
        return {}
    try:
        return measure(torch.as_tensor(np.load(draws)), reference)
    except ValueError as error:
        return {"error": f"ValueError: {error}"}


def run_all(args: argparse.Namespace) -> None:
    machine = environment(args.device)
    keys = (
        dict(zip(KEY, (name, method, seed, threads), strict=True))
        for method in args.methods
        for name in args.models
        for seed in args.seeds
        for threads in args.threads
    )
    for key in missing_runs(args.out, keys):
        record = run_apart(*key.values(), args)
        append_record(args.out, key | record | {"time_limit": args.time_limit} | machine | key)
        outcome = record.get("error", f"{record.get('ratio', float('nan')):.2f} floors")
        seconds = f"{record.get('cpu_seconds', float('nan')):.0f} CPU s"
        print(*key.values(), seconds, record.get("verdict"), outcome, flush=True)
    if len(args.threads) > 1:
        print(wall_seconds(read_records(args.out), args.threads))


def wall_seconds(records: list[Record], threads: list[int]) -> str:
    """Return the wall seconds of each run by threads, and the last as a share of the first."""
    runs: dict[tuple, dict[int, float]] = {}
    for record in records:
        run = tuple(str(record[key]) for key in RUN)
        runs.setdefault(run, {})[record["threads"]] = record.get("seconds", math.nan)
    rows = []
    for run, seconds in runs.items():
        walls = [seconds.get(number, math.nan) for number in threads]
        share = walls[-1] / walls[0]
        rows.append([*run, *(f"{wall:.1f}" for wall in walls), f"{share:.2f}"])
    return markdown_table([*RUN, *(f"wall s, {number}" for number in threads), "share"], rows)


def measure_again(args: argparse.Namespace) -> None:
    """Measure the saved draws of all lines against the current references."""
    records = read_records(args.out)
    for record in records:
        name = "-".join(str(record[key]) for key in RUN)
        record |= measured(record["model"], args.draws / f"{name}.npy")
    args.out.write_text("".join(json.dumps(record) + "\n" for record in records))


def parser() -> argparse.ArgumentParser:
    from benchmarks.zoo.methods import METHODS
    from benchmarks.zoo.registry import COLLECTIONS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["fit"], choices=list(METHODS))
    parser.add_argument("--collection", choices=list(COLLECTIONS), default="zoo")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of any collection")
    parser.add_argument("--split", choices=("look", "score", "all"), default="all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="also processes")
    parser.add_argument("--time-limit", type=float, default=300.0, help="CPU seconds of a method")
    parser.add_argument("--diagnosis-limit", type=float, default=120.0, help="of diagnose")
    parser.add_argument("--out", type=Path, help="default: the collection's file of results")
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float64", help="of model and data"
    )
    parser.add_argument("--device", default="cpu", help="torch's default device")
    parser.add_argument("--draws", type=Path, default=Path(tempfile.gettempdir()) / "zoo_draws")
    parser.add_argument("--measure", action="store_true", help="only measure kept draws again")
    return parser


def main(args: argparse.Namespace) -> None:
    from benchmarks.zoo.registry import load, split_of

    split = split_of(args.collection)
    chosen = {"look": split.LOOK, "score": split.SCORE, "all": split.LOOK + split.SCORE}
    args.models = args.models or list(chosen[args.split])
    for name in args.models:
        load(name)  # fails before the first run if there is none
    args.out = args.out or RESULTS / f"{args.collection}.jsonl"
    if args.measure:
        measure_again(args)
    else:
        run_all(args)


def child(words: list[str]) -> None:
    name, method, seed, threads, limit, diagnosis_limit, dtype, device, draws, answer = words
    limits = (float(limit), float(diagnosis_limit))
    record = run(name, method, int(seed), int(threads), limits, dtype, device, Path(draws))
    Path(answer).write_text(json.dumps(record))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main(parser().parse_args())
