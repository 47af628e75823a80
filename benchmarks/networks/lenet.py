# SPDX-License-Identifier: Apache-2.0
"""LeNet-5 on MNIST: accuracy, calibration, and uncertainty on images that are no digits.

Each row and seed is a process of its own, whose line is appended to ``--out``; one whose line is
there already is not repeated, and a row that was killed goes on from its checkpoint (members of the
ensemble, training, chains). ``--data-dir`` has ``mnist``, ``fashion_mnist`` and ``notmnist``::

    python -m benchmarks.networks.lenet --data-dir /path/to/data --seeds 3 --device cuda
    python -m benchmarks.networks.lenet --data-dir D --subset 6000 --epochs 4 --rows MAP ensemble
    python -m benchmarks.networks.lenet --report

Out of distribution are the first ``--ood`` images of Fashion-MNIST's and notMNIST's test files. A
subset and few epochs are a smoke run, and the table says so.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal, init_to_value
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import (
    RESULTS,
    add_machine_arguments,
    append_record,
    environment,
    markdown_table,
    read_records,
)
from pyro_implicit import LIVI_ELBO, MMNN, AutoSemiImplicit, fit, refine
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import (
    LabelReport,
    NetworkModel,
    classifier,
    evaluate,
    start_values,
    to_bayesian_,
)

MEMBERS, BATCH = 5, 256
KEY = ("row", "seed", "subset", "epochs")


def lenet() -> nn.Sequential:
    """LeNet-5 with ReLU, 44,426 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images of mean 0 and standard deviation 1 over MNIST, and labels."""

    def read(name: str) -> np.ndarray:
        content = gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
        shape = np.frombuffer(content, ">i4", content[3], 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)

    pixels = torch.tensor(read("images-idx3").astype(np.float32) / 255).unsqueeze(1)
    return pixels.sub(0.1307).div(0.3081), torch.tensor(read("labels-idx1").astype(np.int64))


class Run:
    """One row from one seed: its data, its model, and what they are trained by.

    :param args: of the script.
    :param row: its name.
    :param seed: of all that is random.
    """

    def __init__(self, args: argparse.Namespace, row: str, seed: int) -> None:
        x, y = (
            part[: args.subset].to(args.device) for part in images(args.data_dir / "mnist", "train")
        )
        self.args, self.seed, self.num_data = args, seed, len(x)
        self.loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
        self.folder = args.out.parent / "runs" / f"{row} {seed} {args.subset} {args.epochs}"

    def model(self, seed: int) -> NetworkModel:
        """A network of its own start."""
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        return classifier(to_bayesian_(lenet().to(self.args.device)), self.num_data)

    def fit(self, model: NetworkModel, guide: Any, loss: Any, lr: float, name: str) -> Any:
        """Trained for all epochs."""
        return fit(
            model, guide, batches=self.loader, epochs=self.args.epochs, loss=loss, lr=lr,
            seed=self.seed, checkpoint=self.folder / name, checkpoint_every=100, progress=False,
        )  # fmt: skip

    def mode(self, member: int = 0) -> tuple[NetworkModel, dict[str, Tensor]]:
        """Model and weights of a MAP, ``(1, ...)`` by site."""
        model = self.model(1000 * member + self.seed)
        guide = AutoDelta(model, init_loc_fn=start_of(model))
        self.fit(model, guide, ImplicitELBO(1), 2e-3, f"member-{member}")
        return model, {name: value.detach()[None] for name, value in guide.median().items()}

    def refined(self, model: NetworkModel, guide: Any) -> Any:
        """Draws of SGHMC from there, for as many epochs."""
        return refine(
            model, guide, kernel="sghmc", batches=self.loader, num_chains=self.args.chains,
            max_epochs=self.args.epochs, max_draws=100 // self.args.chains, seed=self.seed,
            checkpoint=self.folder / "chains.pt", progress=False,
        )  # fmt: skip


def start_of(model: NetworkModel) -> Any:
    return init_to_value(values=start_values(model))


def map_row(run: Run) -> tuple[NetworkModel, Any]:
    return run.mode()


def ensemble_row(run: Run) -> tuple[NetworkModel, Any]:
    members = [run.mode(member) for member in range(MEMBERS)]
    names = members[0][1]
    return members[0][0], {name: torch.cat([each[name] for _, each in members]) for name in names}


def mean_field_row(run: Run) -> tuple[NetworkModel, Any]:
    model = run.model(run.seed)
    guide = AutoNormal(model, init_loc_fn=start_of(model), init_scale=0.01)
    return model, run.fit(model, guide, ImplicitELBO(2), 2e-3, "mean-field")


def low_rank_row(run: Run) -> tuple[NetworkModel, Any]:
    model = run.model(run.seed)
    guide = AutoLowRankMultivariateNormal(
        model, init_loc_fn=start_of(model), init_scale=0.01, rank=10
    )
    return model, run.fit(model, guide, ImplicitELBO(2), 2e-3, "low-rank")


def livi_row(run: Run) -> tuple[NetworkModel, Any]:
    model = run.model(run.seed)
    guide = AutoSemiImplicit(
        model,
        lambda dim: MMNN((65, 65), [(128, 128)], output_dim=dim),
        noise_dim=65 * 65,
        init_loc_fn=start_of(model),
        frame=None,
        init_scale=0.01,
    )
    return model, run.fit(model, guide, LIVI_ELBO(2, log_det="smallest"), 2e-3, "livi")


def sghmc_row(run: Run) -> tuple[NetworkModel, Any]:
    model, mode = run.mode()
    return model, run.refined(model, mode)


def sghmc_ensemble_row(run: Run) -> tuple[NetworkModel, Any]:
    model, members = ensemble_row(run)
    return model, run.refined(model, members)


ROWS: dict[str, Callable[[Run], tuple[NetworkModel, Any]]] = {
    "MAP": map_row,
    "ensemble": ensemble_row,
    "mean field": mean_field_row,
    "low rank": low_rank_row,
    "LIVI": livi_row,
    "SGHMC from MAP": sghmc_row,
    "SGHMC from ensemble": sghmc_ensemble_row,
}


def work(args: argparse.Namespace, row: str, seed: int) -> None:
    """One line."""
    torch.set_num_threads(args.threads)
    run = Run(args, row, seed)
    clock, wall = time.process_time(), time.perf_counter()
    model, posterior = ROWS[row](run)
    seconds = {"cpu": time.process_time() - clock, "wall": time.perf_counter() - wall}
    report = evaluate(
        posterior,
        DataLoader(TensorDataset(*(part[: args.ood] for part in images_of(args, "mnist"))), 500),
        ood={
            name: DataLoader(images_of(args, folder)[0][: args.ood], 500)
            for name, folder in {"fashion": "fashion_mnist", "notmnist": "notmnist"}.items()
        },
        model=model,
    )
    assert isinstance(report, LabelReport)
    record = {"row": row, "seed": seed, "subset": args.subset, "epochs": args.epochs}
    record |= {"seconds": seconds, "test_images": report.num_rows, "draws": report.num_samples}
    record |= {name: getattr(report, name) for name in ("accuracy", "nll", "brier", "ece")}
    record |= {"confidence": report.confidence, "temperature": report.temperature}
    record["auroc"] = {
        name: {score: found.auroc for score, found in foreign.detection.items()}
        for name, foreign in report.ood.items()
    }
    append_record(args.out, record | environment(args.device))


def images_of(args: argparse.Namespace, folder: str) -> tuple[Tensor, Tensor]:
    return images(args.data_dir / folder, "t10k")


def report(path: Path) -> str:
    """The table of the records, medians over seeds."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in read_records(path):
        key = tuple(record[name] for name in ("subset", "epochs", "row"))
        groups.setdefault(key, []).append(record)
    rows = []
    for (subset, epochs, row), runs in groups.items():
        cells = [f"{median(run[name] for run in runs):.4f}" for name in ("accuracy", "nll", "ece")]
        for name in ("fashion", "notmnist"):
            auroc = median(run["auroc"][name]["max-probability"] for run in runs)
            confidence = median(run["confidence"][name] for run in runs)
            cells.append(f"{100 * auroc:.1f}, {100 * confidence:.0f}")
        cells.append(f"{median(run['seconds']['cpu'] for run in runs):.0f}")
        kind = runs[0]["device"]
        rows.append([row, str(subset or 60_000), str(epochs), *cells, kind, str(len(runs))])
    header = ["row", "images", "epochs", "accuracy", "NLL", "ECE", "Fashion-MNIST", "notMNIST"]
    header += ["CPU s", "device", "seeds"]
    return markdown_table(header, rows) + (
        "\nOut of distribution: AUROC by greatest probability, and mean confidence there, in %. No "
        "tempering; medians over seeds. Runs on fewer than 60,000\nimages are smoke runs.\n\n"
        "`python -m benchmarks.networks.lenet --data-dir D` makes it anew.\n"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--subset", type=int, help="so many training images, the first ones")
    parser.add_argument("--ood", type=int, default=10_000, help="test images of each set")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--chains", type=int, default=4, help="of SGHMC")
    parser.add_argument("--out", type=Path, default=RESULTS / "networks_lenet.jsonl")
    parser.add_argument("--report", action="store_true", help="the table of --out alone")
    parser.add_argument("--worker", nargs=2, metavar=("ROW", "SEED"), help=argparse.SUPPRESS)
    add_machine_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    if args.worker:
        work(args, args.worker[0], int(args.worker[1]))
        return
    for seed in range(args.seeds):
        for row in [] if args.report else args.rows:
            wanted = (row, seed, args.subset, args.epochs)
            if any(tuple(r[k] for k in KEY) == wanted for r in read_records(args.out)):
                continue
            command = [sys.executable, "-m", "benchmarks.networks.lenet", *sys.argv[1:]]
            subprocess.run([*command, "--worker", row, str(seed)], check=True)
    text = report(args.out)
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(parser().parse_args())
