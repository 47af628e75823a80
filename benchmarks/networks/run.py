# SPDX-License-Identifier: Apache-2.0
"""Trainings of one network with one seed, each run once and timed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoDelta, init_to_value
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.common import (
    add_machine_arguments,
    add_output_arguments,
    add_paper_arguments,
    append_record,
    environment,
    missing_runs,
    write_page,
)
from pyro_implicit import MMNN, fit
from pyro_implicit.generators import near_square_shape
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.nn import NetworkModel, classifier, start_values, to_bayesian_

__all__ = [
    "REFINED",
    "SETTINGS",
    "Run",
    "add_arguments",
    "commands",
    "run_rows",
    "start_of",
]

REFINED = ", refined"
#: The settings that identify a number, besides row and seed.
SETTINGS = ("subset", "epochs", "batch_size", "lr", "chains", "noise", "hidden", "solver")


def add_arguments(parser: argparse.ArgumentParser, out: Path, rows: list[str]) -> None:
    """Add the arguments of :class:`Run` and of all scripts of this folder."""
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rows", nargs="+", default=rows, choices=rows)
    add_paper_arguments(parser, seeds=1)
    parser.add_argument("--draws", type=int, default=100, help="of a posterior, to predict")
    parser.add_argument("--test", type=int, default=10_000, help="test images of each set")
    add_output_arguments(parser, out)
    parser.add_argument("--subset", type=int, help="so many training images, the first ones")
    parser.add_argument("--epochs", type=int, default=6, help="of a training, and of chains")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--chains", type=int, default=4, help="of SGHMC")
    parser.add_argument("--noise", type=int, default=65, help="side of the noise of an MMNN")
    parser.add_argument("--hidden", type=int, default=250, help="side of its hidden matrices")
    parser.add_argument("--particles", type=int, help="of KIVI, GPVI, LIVI; by default 2 to 4")
    parser.add_argument("--solver", type=int, default=50, help="iterations of a log-determinant")
    add_machine_arguments(parser)


def run_rows(
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace, str, int], dict[str, Any]],
    report: Callable[[argparse.Namespace], str],
) -> None:
    """Append the missing lines, then write and print the table.

    :param work: returns the numbers of one row with one seed.
    :param report: returns the table.
    """
    torch.set_num_threads(args.threads)
    keys = [
        {"row": row, "seed": seed} | _settings(args)
        for seed in range(args.first_seed, args.seeds)
        for row in args.rows
    ]
    for key in missing_runs(args.out, [] if args.report else keys):
        found = work(args, key["row"], key["seed"])
        append_record(args.out, key | found | environment(args.device))
    write_page(args.out, report(args))


def commands(script: str, records: list[dict[str, Any]]) -> str:
    """Return the commands that reproduce the records, one line for each setting."""
    lines: dict[tuple, int] = {}
    for record in records:
        key = tuple((name, record[name]) for name in SETTINGS if record[name] is not None)
        key += tuple(
            (name, record[name]) for name in ("particles", "sizes", "test") if name in record
        )
        lines[key] = max(lines.get(key, 1), record["draws"])
    return "".join(
        f"    python -m benchmarks.networks.{script} --data-dir D "
        + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in key)
        + f" --draws {draws}\n"
        for key, draws in lines.items()
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(args, name) for name in SETTINGS}
    return found if args.particles is None else found | {"particles": args.particles}


class Run:
    """Networks of one kind, trained on one set of images with one seed.

    Finished trainings are shared by all rows, and others continue from their checkpoints. Their
    times are stored next to them.

    :param network: makes a network.
    :param train: images and labels.
    :param args: of :func:`add_arguments`.
    :param seed: of all random numbers.
    """

    def __init__(
        self,
        network: Callable[[], nn.Sequential],
        train: tuple[Tensor, Tensor],
        args: argparse.Namespace,
        seed: int,
    ) -> None:
        self.network, self.args, self.seed = network, args, seed
        settings = [str(value) for value in _settings(args).values()]
        self.folder = args.runs / args.out.stem / "-".join(settings) / str(seed)
        self.train = tuple(part.to(args.device) for part in train)
        rows = TensorDataset(*self.train)  # whole batches at once: single rows are slow on a GPU
        batches = BatchSampler(RandomSampler(rows), args.batch_size, drop_last=False)
        self.loader = DataLoader(rows, batch_size=None, sampler=batches)
        #: CPU seconds of all parts of the current row.
        self.seconds = 0.0

    def model(self, seed: int) -> NetworkModel:
        """Return a network with its own initial weights."""
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        return classifier(to_bayesian_(self.network().to(self.args.device)), len(self.train[0]))

    def fit(self, model: NetworkModel, guide: Any, loss: Any, name: str, share: float = 1) -> None:
        """Train a guide for a share of the epochs."""
        with self.clock(name):
            fit(
                model, guide, batches=self.loader, epochs=max(1, round(share * self.args.epochs)),
                loss=loss, lr=self.args.lr, seed=self.seed, checkpoint=self.folder / name,
                checkpoint_every=max(100, len(self.loader)), progress=False,
            )  # fmt: skip

    def refine(self, model: NetworkModel, guide: Any, name: str) -> Any:
        """Return draws of SGHMC from there, for as many epochs."""
        with self.clock(f"{name}{REFINED}"):
            return refine_by_minibatches(
                model, guide, batches=self.loader, num_chains=self.args.chains,
                max_epochs=self.args.epochs, max_draws=100 // self.args.chains, seed=self.seed,
                checkpoint=self.folder / f"{name}.chains", progress=False,
            )  # fmt: skip

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time of a training, in this process or an earlier one.

        For a training that was killed and continued, only the last part counts.
        """
        file = self.folder / "seconds.json"
        began = time.process_time()
        yield
        known = json.loads(file.read_text()) if file.exists() else {}
        self.seconds += known.setdefault(name, time.process_time() - began)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(known))
        partial.replace(file)

    def member(self, index: int = 0) -> tuple[NetworkModel, dict[str, Tensor]]:
        """Model and weights of a mode, by site."""
        model = self.model(1000 * index + self.seed)
        guide = AutoDelta(model, init_loc_fn=start_of(model))
        self.fit(model, guide, ImplicitELBO(1), f"member-{index}")
        return model, {name: value.detach() for name, value in guide.median().items()}

    def matrices(self, dim: int) -> MMNN:
        """A matrix generator with at most as many noise dimensions as values."""
        sides = near_square_shape(dim)
        noise = (min(self.args.noise, sides[0]), min(self.args.noise, max(1, sides[1] - 1)))
        hidden = (self.args.hidden,) * 2
        return MMNN(noise, [hidden], sides, output_dim=dim, output_scale=1.0)


def start_of(model: NetworkModel) -> Any:
    """The weights that torch drew."""
    return init_to_value(values=start_values(model))
