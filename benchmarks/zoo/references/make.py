# SPDX-License-Identifier: Apache-2.0
"""Make the reference draws: run the twins, check them against the Pyro models, thin and write.

::

    python3 -m venv /tmp/numpyro && /tmp/numpyro/bin/pip install numpyro 'jax<0.8' 'jaxlib<0.8'
    python -m benchmarks.zoo.references.make --python /tmp/numpyro/bin/python

Models that have a line in ``checks.jsonl`` are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from benchmarks.common import Record, append_record, read_records
from benchmarks.zoo import registry, split
from benchmarks.zoo.metrics import DRAWS
from benchmarks.zoo.references.gibbs import horseshoe
from benchmarks.zoo.references.settings import GIBBS, SETTINGS
from benchmarks.zoo.registry import ZooModel

CHECKS = Path(__file__).parent / "checks.jsonl"
MAX_DRAWS, MIN_DRAWS, MAX_COLUMNS, MAX_VALUES = 10_000, 1000, 75, 150_000
# Sites with at most this number of values are kept completely, of others a random part.
SMALL_SITE = 12
MAX_RHAT, MAX_DIVERGENCES, MAX_SPREAD = 1.01, 0.01, 1e-6

Draws = dict[str, Tensor]


def sample(zoo: ZooModel, args: tuple, folder: Path, python: Path) -> tuple[Draws, Record]:
    """The twin's draws by site, ``(num_chains, num_draws, *site_shape)``."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {f"argument_{i}": argument.numpy() for i, argument in enumerate(args)}
    np.savez(folder / "data.npz", **data)
    if zoo.name in GIBBS:
        horseshoe(folder, *GIBBS[zoo.name])
        return *read(folder), {"settings": ["num_draws", "thin", *map(str, GIBBS[zoo.name])]}
    words = ["-m", "benchmarks.zoo.references.sample", zoo.kind, zoo.name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    settings = SETTINGS.get(zoo.name, "").split()
    subprocess.run([python, *words, *settings], check=True, env=environment)
    return *read(folder), {"settings": settings}


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


def kept_columns(sizes: list[int]) -> Tensor:
    """Select small parts completely, and random columns of the large parts up to the limit."""
    total, parts, first = sum(sizes), [], 0
    small = sum(size for size in sizes if size <= SMALL_SITE)
    if total <= MAX_COLUMNS or small > MAX_COLUMNS:  # many small sites: all columns are alike
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:MAX_COLUMNS]
        return rows.sort().values
    share = (MAX_COLUMNS - small) / (total - small)
    for size in sizes:
        count = size if size <= SMALL_SITE else math.floor(size * share)
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:count]
        parts.append(first + chosen.sort().values)
        first += size
    return torch.cat(parts)


def make(name: str, args: argparse.Namespace) -> Record:
    """Make, check and write one reference."""
    zoo = registry.load(name)
    data = zoo.data()
    draws, run, settings = sample(zoo, data, args.work / name, args.python)
    run |= settings
    shapes = shape_of(zoo, data)
    num_chains, length = next(iter(draws.values())).shape[:2]
    log_probs = run.pop("log_probs")
    spread = log_prob_spread(zoo, data, draws, log_probs)
    flat = {
        site: draws[site].reshape(num_chains * length, *shape) for site, shape in shapes.items()
    }
    features, sizes = zoo.features(flat, data)
    chains = features.reshape(num_chains, length, -1)
    rhat = split_gelman_rubin(chains, chain_dim=0, sample_dim=1)
    ess = effective_sample_size(chains, chain_dim=0, sample_dim=1)
    columns = kept_columns(sizes)
    room = min(MAX_DRAWS, MAX_VALUES // len(columns), int(ess.min()))
    step = max(1, round(len(features) / max(room, MIN_DRAWS)))
    mean, sd = features.mean(0), features.std(0)
    standardised = ((features - mean) / sd)[::step][:, columns]
    checks = {
        "model": name,
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
        and checks["worst_ess"] >= MIN_DRAWS
        and run["divergences"] <= MAX_DIVERGENCES
        and spread < MAX_SPREAD
    )
    if good:
        DRAWS.mkdir(exist_ok=True)
        np.savez_compressed(
            DRAWS / f"{name}.npz",
            standardised=standardised.numpy().astype(np.float16),
            columns=columns.numpy().astype(np.int16),
            mean=mean.numpy(),
            sd=sd.numpy(),
        )
    return checks | {"trusted": bool(good)} | run


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    done = {record["model"] for record in read_records(CHECKS)}
    for name in args.models or [*split.LOOK, *split.SCORE]:
        if name in done:
            continue
        try:
            record = make(name, args)
        except Exception as error:
            print(name, "failed:", type(error).__name__, str(error)[:1000], flush=True)
            continue
        append_record(CHECKS, record)
        print(json.dumps(record), flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of NumPyro's environment")
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--work", type=Path, default=Path("/tmp/zoo_references"))
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
