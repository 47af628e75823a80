# SPDX-License-Identifier: Apache-2.0
"""Make the reference draws: run the twins, check them against the Pyro models, thin and write.

::

    python3 -m venv /tmp/numpyro && /tmp/numpyro/bin/pip install numpyro 'jax<0.8' 'jaxlib<0.8'
    python -m benchmarks.zoo.references.make --python /tmp/numpyro/bin/python

Models that have a line in ``checks.jsonl`` are skipped. Collections whose settings have ``USER``
begin with a run with NumPyro's defaults, the entry ``user`` of the line. Its draws are the
reference if they pass the checks.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from benchmarks.common import Record, append_record, read_records
from benchmarks.zoo import registry
from benchmarks.zoo.registry import ZooModel

MAX_DRAWS, MIN_DRAWS = 10_000, 1000
QUALITY_COLUMNS = 20  # whose effective sample sizes are computed at a time
# Sites with at most this number of values are kept completely, of others a random part.
SMALL_SITE = 12
MAX_RHAT, MAX_DIVERGENCES, MAX_SPREAD = 1.01, 0.01, 1e-6

Draws = dict[str, Tensor]


def checks_file(collection: str) -> Path:
    """The file of the references' checks."""
    return Path(__file__).parents[2] / collection / "references" / "checks.jsonl"


def settings_of(zoo: ZooModel) -> Any:
    """The module ``settings`` of the collection."""
    return importlib.import_module(f"benchmarks.{zoo.collection}.references.settings")


def sample(
    zoo: ZooModel, args: tuple, folder: Path, python: Path, settings: list[str]
) -> tuple[Draws, Record]:
    """The twin's draws by site, ``(num_chains, num_draws, *site_shape)``."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {f"argument_{i}": argument.numpy() for i, argument in enumerate(args)}
    np.savez(folder / "data.npz", **data)
    samplers = settings_of(zoo).SAMPLERS
    if not settings and zoo.name in samplers:
        sampler, *lengths = samplers[zoo.name]
        sampler(folder, *lengths)
        settings = ["num_draws", "thin", *map(str, lengths)]
    else:
        twin = f"benchmarks.{zoo.collection}.references.twins.{zoo.kind}"
        words = ["-m", "benchmarks.zoo.references.sample", twin, zoo.name, str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([python, *words, *settings], check=True, env=environment)
    draws, run = read(folder)
    return draws, run | {"settings": settings}


def read(folder: Path) -> tuple[Draws, Record]:
    with np.load(folder / "draws.npz") as file:
        draws = {name: torch.as_tensor(file[name]) for name in file.files}
    return draws, json.loads((folder / "run.json").read_text())


def log_prob_spread(zoo: ZooModel, args: tuple, draws: Draws, log_probs: list[float]) -> float:
    """Return the largest relative change of the difference of both log-densities between points.

    Compares joint densities of the constrained latents at the first draws of the first chain.
    """
    potential, start, transforms = zoo.potential(args)
    shapes = {name: transforms[name].inv(value).shape for name, value in start.items()}
    differences = []
    for i, theirs in enumerate(log_probs):
        values = {name: draws[name][0, i].reshape(shape) for name, shape in shapes.items()}
        unconstrained = {name: transforms[name](value) for name, value in values.items()}
        jacobian = sum(
            transforms[name].log_abs_det_jacobian(values[name], unconstrained[name]).sum().item()
            for name in start
        )
        differences.append(-potential(unconstrained).item() + jacobian - theirs)
    size = 1 + max(map(abs, log_probs))
    return (max(differences) - min(differences)) / size


def shape_of(zoo: ZooModel, args: tuple) -> dict[str, torch.Size]:
    """Constrained shapes of the latents."""
    _, start, transforms = zoo.potential(args)
    return {name: transforms[name].inv(value).shape for name, value in start.items()}


def merged(sizes: list[int], sites: list[str]) -> list[int]:
    """Add the sizes of consecutive sites whose names differ in a last number: loops."""
    groups = itertools.groupby(
        zip(sites, sizes, strict=True), lambda pair: re.sub(r"\d+$", "", pair[0])
    )
    return [sum(size for _, size in group) for _, group in groups]


def kept_columns(sizes: list[int], limit: int) -> Tensor:
    """Select small parts completely, and random columns of the large parts up to the limit."""
    total, parts, first = sum(sizes), [], 0
    small = sum(size for size in sizes if size <= SMALL_SITE)
    if total <= limit or small > limit:  # many small sites: all columns are alike
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:limit]
        return rows.sort().values
    share = (limit - small) / (total - small)
    for size in sizes:
        count = size if size <= SMALL_SITE else math.floor(size * share)
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count]
        parts.append(first + chosen.sort().values)
        first += size
    return torch.cat(parts)


def make(name: str, args: argparse.Namespace) -> Record:
    """Make, check and write one reference, from the user's run if it is good."""
    zoo = registry.load(name)
    data, folder, settings = zoo.data(), args.work / name, settings_of(zoo)
    own = settings.SETTINGS.get(name, "").split()
    if not settings.USER:
        record = check(zoo, data, *sample(zoo, data, folder, args.python, own))
        return {key: value for key, value in record.items() if key != "first"}
    kept = folder / "user.json"  # a repeated call with other settings does not repeat this run
    if kept.exists():
        record = json.loads(kept.read_text())
    else:
        try:
            words = [*settings.USER.split(), "--cpu-limit", str(args.user_limit)]
            words += ["--extend", str(0.9 * args.user_limit)]
            record = check(zoo, data, *sample(zoo, data, folder, args.python, words))
        except subprocess.CalledProcessError:
            record = {"trusted": False}
        kept.write_text(json.dumps(record))
    user = record.pop("first", {"stopped": args.user_limit})
    if not record["trusted"] and (own or name in settings.SAMPLERS):
        record = check(zoo, data, *sample(zoo, data, folder, args.python, own))
        del record["first"]
    return {"model": name} | record | {"user": user}


def quality(chains: Tensor) -> tuple[Tensor, Tensor]:
    """R-hat and effective sample sizes of ``(num_chains, num_draws, num_features)``."""
    rhat = split_gelman_rubin(chains, chain_dim=0, sample_dim=1)
    # Pyro's function needs the square of the number of draws for each column.
    parts = chains.split(QUALITY_COLUMNS, -1)
    ess = [effective_sample_size(part, chain_dim=0, sample_dim=1) for part in parts]
    return rhat, torch.cat(ess)


def check(zoo: ZooModel, data: tuple, draws: Draws, run: Record) -> Record:
    """Check the draws of a run; write them if they are good."""
    settings = settings_of(zoo)
    shapes = shape_of(zoo, data)
    num_chains, length = next(iter(draws.values())).shape[:2]
    log_probs = run.pop("log_probs")
    spread = log_prob_spread(zoo, data, draws, log_probs)
    flat = {
        site: draws[site].reshape(num_chains * length, *shape) for site, shape in shapes.items()
    }
    features, sizes = zoo.features(flat, data)
    chains = features.reshape(num_chains, length, -1)
    rhat, ess = quality(chains)
    first = run.setdefault(
        "first", {"samples": length}
    )  # the part of the run whose time is compared
    worst = quality(chains[:, : first["samples"]])
    first |= {"worst_rhat": worst[0].max().item(), "worst_ess": worst[1].min().item()}
    if zoo.invariant is None:
        sizes = merged(sizes, list(shapes))
    columns = kept_columns(sizes, settings.MAX_COLUMNS)
    room = min(MAX_DRAWS, settings.MAX_VALUES // len(columns), int(ess.min()))
    step = max(1, round(len(features) / max(room, MIN_DRAWS)))
    mean, sd = features.mean(0), features.std(0)
    standardised = ((features - mean) / sd)[::step][:, columns]
    checks = {
        "model": zoo.name,
        "dim": sum(value.numel() for value in zoo.potential(data)[1].values()),
        "num_features": features.shape[1],
        "num_draws": len(standardised),
        "chains": [num_chains, length],
        "worst_rhat": rhat.max().item(),
        "worst_ess": ess.min().item(),
        "log_prob_spread": spread,
    }
    good = (
        checks["worst_rhat"] < MAX_RHAT
        and checks["worst_ess"] >= settings.MIN_ESS
        and run["divergences"] <= MAX_DIVERGENCES
        and spread < MAX_SPREAD
    )
    if good:
        folder = zoo.references / "draws"
        folder.mkdir(exist_ok=True)
        np.savez_compressed(
            folder / f"{zoo.name}.npz",
            standardised=standardised.numpy().astype(np.float16),
            columns=columns.numpy().astype(np.int16),
            mean=mean.numpy(),
            sd=sd.numpy(),
        )
    return checks | {"trusted": bool(good)} | run


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    split, checks = registry.split_of(args.collection), checks_file(args.collection)
    done = {record["model"] for record in read_records(checks)}
    for name in args.models or [*split.LOOK, *split.SCORE]:
        if name in done:
            continue
        try:
            record = make(name, args)
        except Exception as error:
            print(name, "failed:", type(error).__name__, str(error)[:1000], flush=True)
            continue
        append_record(checks, record)
        print(json.dumps(record), flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of NumPyro's environment")
    parser.add_argument("--collection", choices=list(registry.COLLECTIONS), default="zoo")
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--user-limit", type=int, default=1500, help="CPU s of a user's run")
    parser.add_argument("--work", type=Path, default=Path("/tmp/zoo_references"))
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
