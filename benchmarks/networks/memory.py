# SPDX-License-Identifier: Apache-2.0
"""Peak memory of an ensemble of large networks and its chains, by minibatches, draws on disk.

Ten members of a network with 1,007,270 weights (784-1,010-210-10) on random images in minibatches
of 128 rows; SGHMC from each member; predictions from the files of draws::

    python -m benchmarks.networks.memory --steps 20
"""

from __future__ import annotations

import argparse
import resource
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    markdown_table,
    read_records,
    run_missing,
    write_page,
)
from pyro_implicit import fit
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.nn import classifier, predict, to_bayesian_

SIZES = (784, 1010, 210, 10)


def peak() -> float:
    """Return the largest resident memory of the process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run(steps: int) -> dict[str, float]:
    """Return peak memory after each stage."""
    torch.manual_seed(0)
    rows = 128 * steps
    x, y = torch.randn(rows, SIZES[0]), torch.arange(rows) % SIZES[-1]
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
    first, second, third, last = SIZES
    layers = nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third), nn.ReLU()
    model = classifier(to_bayesian_(nn.Sequential(*layers, nn.Linear(third, last))), rows)
    found, clock = {"start": peak()}, time.process_time()
    result = fit(model, "auto", batches=loader, epochs=2, seed=0, progress=False)
    found["ensemble"] = peak()
    with TemporaryDirectory() as folder:
        options = {"batches": loader, "max_epochs": 4, "store": Path(folder) / "draws", "seed": 0}
        members = result.guide.num_members
        chains = refine_by_minibatches(
            model, result.guide, num_chains=members, progress=False, **options
        )
        found["chains"] = peak()
        list(islice(predict(chains, loader, model=model), 4))
        found["predictions"] = peak()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.pt"))
    weights = sum(value[0].numel() for value in result.guide.get_samples().values())
    found |= {"disk": size / 1e9, "weights": weights, "members": members}
    return found | {"cpu_seconds": time.process_time() - clock}


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run_missing(args.out, [] if args.report else [{"steps": args.steps}], lambda key: run(**key))
    columns = ["weights", "members", "start", "ensemble", "chains", "predictions", "disk"]
    rows = [
        [f"{one[name]:,.0f}" if name in columns[:2] else f"{one[name]:.2f}" for name in columns]
        for one in read_records(args.out)
    ]
    note = "\nGB: peak resident memory of the process after each stage, and draws on disk.\n"
    write_page(args.out, markdown_table(columns, rows) + note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="minibatches of a pass")
    add_output_arguments(parser, RESULTS / "networks_memory.jsonl")
    main(parser.parse_args())
