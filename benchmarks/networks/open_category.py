# SPDX-License-Identifier: Apache-2.0
"""Open category: a network learns six classes; images of four other classes are detected.

The classes 0 to 5 are trained on, 6 to 9 are out of distribution; as in table 3 (MNIST, LeNet-5)
and table 4 (CIFAR-10, three convolutions and two linear layers) of the GPVI paper. Runs are saved
and resumed as in ``lenet.py``::

    python -m benchmarks.networks.open_category --data-dir /path/to/data --epochs 100 --device cuda
    python -m benchmarks.networks.open_category --data-dir D --subset 4000 --rows MAP GPVI
    python -m benchmarks.networks.open_category --data-dir D --data cifar10 --subset 2000 --epochs 1
    python -m benchmarks.networks.open_category --data-dir D --paper --rows GPVI
    python -m benchmarks.networks.open_category --report

``--paper`` sets the paper's epochs, batches, particles and, for CIFAR-10, its network.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import RESULTS, markdown_table, parse_arguments, read_records
from benchmarks.networks.data import cifar, digits, of_classes
from benchmarks.networks.lenet import ROWS, lenet
from benchmarks.networks.methods import posterior_of
from benchmarks.networks.run import Run, add_arguments, commands, run_rows
from pyro_implicit.nn import LabelReport, evaluate

INSIDE, OUTSIDE = (0, 5), (6, 9)
#: Accuracy in %, AUC and ECE of the GPVI paper's tables 3 and 4.
PAPER = {
    "mnist": {
        "ensemble": (99.3, 0.972, 0.008),
        "mean field": (98.6, 0.951, 0.014),
        "GPVI": (99.3, 0.988, 0.001),
        "SVGD": (99.3, 0.989, 0.001),
        "amortised SVGD": (99.1, 0.958, 0.002),
    },
    "cifar10": {
        "ensemble": (73.5, 0.652, 0.033),
        "mean field": (70.0, 0.649, 0.016),
        "GPVI": (76.2, 0.677, 0.018),
        "SVGD": (80.3, 0.683, 0.055),
        "amortised SVGD": (71.1, 0.636, 0.073),
    },
}


#: Channels of the convolutions and units of the linear layer: 64,166 weights, and 188,294 as in
#: GPVI's table 10. The paper names no kernel sizes.
SIZES = {"small": (16, 32, 32, 96), "paper": (32, 64, 64, 128)}


def convolutional(sizes: str) -> nn.Sequential:
    """Three convolutions and two linear layers."""
    first, second, third, linear = SIZES[sizes]
    return nn.Sequential(
        *(nn.Conv2d(3, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(second, third, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * third, linear), nn.ReLU(), nn.Linear(linear, 6)),
    )


def paper_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Defaults of ``--paper``, from GPVI's section 4.4 and tables 9 and 10.

    The rate is not the paper's 1e-5, which belongs to generators with 45 million parameters.
    """
    settings = {"epochs": 100, "batch_size": 50, "particles": 10, "lr": 1e-3, "sizes": "paper"}
    return settings | {"out": RESULTS / f"paper_open_{args.data}.jsonl"}


def sets(data: str, folder: Path, number: int | None) -> tuple[Any, Any, Tensor]:
    """Training and test images of the six classes with labels, and test images of the others."""
    if data == "mnist":
        train, test = (digits(folder / "mnist", part) for part in ("train", "t10k"))
    else:
        enough = None if number is None else 2 * number
        train, test = cifar(folder / data, "train", enough), cifar(folder / data, "test", enough)
    x, y = of_classes(*train, *INSIDE)
    return (x[:number], y[:number]), of_classes(*test, *INSIDE), of_classes(*test, *OUTSIDE)[0]


def work(args: argparse.Namespace, row: str, seed: int) -> dict[str, Any]:
    """Return the numbers of one row with one seed."""
    train, test, others = sets(args.data, args.data_dir, args.subset)
    network = partial(convolutional, args.sizes) if args.data == "cifar10" else partial(lenet, 6)
    run = Run(network, train, args, seed)
    model, posterior = posterior_of(run, row)
    report = evaluate(
        posterior,
        DataLoader(TensorDataset(*(part[: args.test] for part in test)), 500),
        ood={"others": DataLoader(others[: args.test], 500)},
        num_samples=args.draws,
        model=model,
    )
    assert isinstance(report, LabelReport)
    numbers = {name: getattr(report, name) for name in ("accuracy", "nll", "ece")}
    found = report.ood["others"].detection
    numbers |= {"auc": {score: one.auroc for score, one in found.items()}}
    if args.data == "cifar10":
        numbers["sizes"] = args.sizes
    return numbers | {"seconds": run.seconds, "draws": report.num_samples, "test": report.num_rows}


def report(args: argparse.Namespace) -> str:
    """Return the table of the records, medians over seeds, with the paper's numbers."""
    paper, groups = PAPER[args.data], {}
    for record in read_records(args.out):
        key = (str(record["subset"]), record["epochs"], ROWS.index(record["row"]))
        groups.setdefault(key, []).append(record)
    rows = []
    for (subset, epochs, index), runs in sorted(groups.items()):
        cells = [f"{median(run['accuracy'] for run in runs):.4f}"]
        for score in ("max-probability", "entropy", "mutual information", "epistemic variance"):
            found = [run["auc"][score] for run in runs if score in run["auc"]]
            cells.append(f"{median(found):.3f}" if found else "")
        cells += [f"{median(run[name] for run in runs):.3f}" for name in ("ece", "nll")]
        cells += [f"{median(run['seconds'] for run in runs):.0f}", str(len(runs))]
        published = paper.get(ROWS[index])
        shown = "" if published is None else "{:.1f}, {:.3f}, {:.3f}".format(*published)
        rows.append(
            [ROWS[index], "all" if subset == "None" else subset, str(epochs), *cells, shown]
        )
    header = ["row", "images", "epochs", "accuracy", "AUC by largest probability", "by entropy"]
    header += [
        "by mutual information",
        "by variance",
        "ECE",
        "NLL",
        "seconds",
        "seeds",
        "paper: accuracy, AUC, ECE",
    ]
    others = "; ".join(
        "{} {:.1f}, {:.3f}, {:.3f}".format(name, *paper[name]) for name in paper if name not in ROWS
    )
    return markdown_table(header, rows) + (
        "\nThe networks learn the classes 0 to 5; the AUROC measures how well they separate 6 to 9 "
        "from them. Medians\nover seeds; CPU seconds. The paper's AUC uses the variance of the "
        "predictions over draws, which older\nruns lack. The paper also reports, "
        f"after 100 epochs on all images of six classes,\n{others}. Runs on fewer images are "
        "reduced.\n\n" + commands(f"open_category --data {args.data}", read_records(args.out))
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, RESULTS / "networks_open_mnist.jsonl", ROWS)
    parser.add_argument("--data", choices=list(PAPER), default="mnist", help="with its own --out")
    parser.add_argument("--sizes", choices=list(SIZES), default="small", help="for CIFAR-10")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.data != "mnist" and args.out == RESULTS / "networks_open_mnist.jsonl":
        args.out = RESULTS / f"networks_open_{args.data}.jsonl"
    run_rows(args, work, report)


if __name__ == "__main__":
    main(parse_arguments(parser(), paper_settings))
