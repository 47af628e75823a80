# SPDX-License-Identifier: Apache-2.0
"""Networks on MNIST: accuracy, calibration and out-of-distribution detection.

Each row and seed adds one line to ``--out``; rows that have a line are skipped, and a killed row
continues from its checkpoints in ``--runs``, which rows share (the first member of the ensemble is
the MAP). ``--data-dir`` has ``mnist``, ``fashion_mnist`` and ``notmnist``::

    python -m benchmarks.networks.lenet --data-dir /path/to/data --seeds 3 --device cuda
    python -m benchmarks.networks.lenet --data-dir D --subset 6000 --epochs 4 --rows MAP ensemble
    python -m benchmarks.networks.lenet --data-dir D --paper --network mlp-400 --rows KIVI
    python -m benchmarks.networks.lenet --report

Out-of-distribution images are the first ``--test`` images of the test files of Fashion-MNIST,
notMNIST and, if ``--foreign`` names it, CIFAR-10 (in grey, the middle 28x28 pixels). ``--network
mlp-400`` is the perceptron of KIVI's classification experiment, in a table of its own, and
``--network pooled`` a small one for a CPU. ``--paper`` sets the epochs, batches, rate and
generators of LIVI's paper, or of KIVI's for the perceptrons; KIVI's take days on a CPU.
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
from benchmarks.networks.data import cifar, digits
from benchmarks.networks.methods import METHODS, posterior_of
from benchmarks.networks.run import REFINED, Run, add_arguments, commands, run_rows
from pyro_implicit.nn import LabelReport, evaluate

FOREIGN = {"fashion": "fashion_mnist", "notmnist": "notmnist", "cifar10": "cifar10"}
TITLES = {"fashion": "Fashion-MNIST", "notmnist": "notMNIST", "cifar10": "CIFAR-10"}
ROWS = [*METHODS, *(f"{name}{REFINED}" for name in METHODS)]
#: Accuracy, mean confidence and AUROC, in %, means over three out-of-distribution sets.
PAPER = {"MAP": (99.1, 72.1, 96.3), "ensemble": (99.1, 63.1, 97.5), "LIVI": (99.1, 55.0, 97.9)}


ONE_GUIDE = """\
One saved guide at the cost of five MAP trainings, by scratch scripts: one seed, 50,000 images,
scores of the other 10,000 (NLL; AUROC of 2,000 images of notMNIST in %; CPU seconds).

| guide | NLL | notMNIST | seconds |
| :-- | --: | --: | --: |
| five members, six epochs each | .0301 | 97.1 | 143 |
| ten members, three epochs | .0421 | 96.7 | 176 |
| five, four epochs, then one of an injective guide at each | .0376 | 96.8 | 148 |
| five, four epochs, then two of Adam at .001: the means of its iterates | .0335 | 97.1 | 151 |
| the same, Gaussians with half of their spread | .0336 | 97.1 | 151 |
| five, five epochs | .0324 | 97.1 | 119 |
| the same, with the Laplace approximation of each last layer | .0330 | 97.4 | 131 |

"""


#: Test errors in %, by units of the two hidden layers.
KIVI_PAPER = {"mlp-400": 1.29, "mlp-800": 1.22, "mlp-1200": 1.27}


def paper_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Defaults of ``--paper``."""
    out = RESULTS / f"paper_{args.network}.jsonl"
    if args.network in KIVI_PAPER:
        # KIVI, section 6.2.2 and appendix G.2.2. Its rate is halved every 100 epochs.
        settings = {"epochs": 300, "batch_size": 100, "lr": 1e-3, "particles": 10, "noise": 30}
        return settings | {"hidden": 500 if args.network == "mlp-400" else 800, "out": out}
    # LIVI, appendix E.5 and E.6: batches of 256, 1 to 2 particles, an MMNN of 65x65 noise and one
    # hidden matrix of 250x250. It does not state the number of epochs.
    settings = {"epochs": 20, "batch_size": 256, "particles": 2, "noise": 65, "hidden": 250}
    return settings | {"foreign": list(FOREIGN), "out": out}


def foreign_images(folder: Path, name: str, number: int) -> Tensor:
    """Test images that are not digits."""
    if name != "cifar10":
        return digits(folder / FOREIGN[name], "t10k")[0][:number]
    colours = cifar(folder / name, "test", number)[0].mul(0.251).add(0.473)  # as in the file
    weights = colours.new_tensor([0.299, 0.587, 0.114])  # of luma, ITU-R BT.601
    grey = (weights[:, None, None] * colours).sum(1, keepdim=True)[..., 2:30, 2:30]
    return grey.sub(0.1307).div(0.3081)


def lenet(num_classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU, 44,426 weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, num_classes),
    )


def perceptron(units: int) -> nn.Sequential:
    """Two hidden layers with ReLU."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()),
        nn.Linear(units, 10),
    )


def pooled() -> nn.Sequential:
    """32 units on means of 4x4 pixels, 1,930 weights; fast rows."""
    first = (nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 32), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(32, 10))


NETWORKS = {"lenet": lenet, "pooled": pooled} | {
    name: partial(perceptron, int(name.removeprefix("mlp-"))) for name in KIVI_PAPER
}


def work(args: argparse.Namespace, row: str, seed: int) -> dict[str, Any]:
    """Return the numbers of one row with one seed."""
    train = digits(args.data_dir / "mnist", "train")
    train = train[0][: args.subset], train[1][: args.subset]
    run = Run(NETWORKS[args.network], train, args, seed)
    model, posterior = posterior_of(run, row)
    test = TensorDataset(*(part[: args.test] for part in digits(args.data_dir / "mnist", "t10k")))
    report = evaluate(
        posterior,
        DataLoader(test, 500),
        ood={
            name: DataLoader(foreign_images(args.data_dir, name, args.test), 500)
            for name in args.foreign
        },
        num_samples=args.draws,
        model=model,
    )
    assert isinstance(report, LabelReport)
    numbers: dict[str, Any] = {"seconds": run.seconds, "test": report.num_rows}
    numbers["draws"] = report.num_samples
    numbers |= {name: getattr(report, name) for name in ("accuracy", "nll", "brier", "ece")}
    numbers |= {"confidence": report.confidence, "temperature": report.temperature}
    numbers["auroc"] = {
        name: {score: found.auroc for score, found in foreign.detection.items()}
        for name, foreign in report.ood.items()
    }
    return numbers


def table(records: list[dict[str, Any]]) -> str:
    """Return medians over seeds."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    foreign = [name for name in FOREIGN if any(name in record["auroc"] for record in records)]
    for record in records:
        key = (record["subset"], record["epochs"], ROWS.index(record["row"]))
        groups.setdefault(key, []).append(record)
    rows = []
    for (subset, epochs, row), runs in sorted(groups.items(), key=lambda group: str(group[0][:2])):
        cells = [f"{median(run[name] for run in runs):.4f}" for name in ("accuracy", "nll", "ece")]
        for name in foreign:
            known = [run for run in runs if name in run["auroc"]]
            if not known:
                cells.append("")
                continue
            auroc = [100 * run["auroc"][name]["max-probability"] for run in known]
            spread = f" ({min(auroc):.1f} to {max(auroc):.1f})" if len(known) > 1 else ""
            confidence = median(100 * run["confidence"][name] for run in known)
            cells.append(f"{median(auroc):.1f}{spread}, {confidence:.0f}")
        cells.append(f"{median(run['seconds'] for run in runs):.0f}")
        size = str(subset or 60_000)
        rows.append([ROWS[row], size, str(epochs), *cells, runs[0]["device"], str(len(runs))])
    header = ["row", "images", "epochs", "accuracy", "NLL", "ECE"]
    header += [TITLES[name] for name in foreign]
    return markdown_table([*header, "seconds", "device", "seeds"], rows)


def report(args: argparse.Namespace) -> str:
    """Return the table of ``--out`` and its description."""
    paper = (
        "LIVI's paper, on 60,000 images (accuracy, confidence and AUROC on three "
        "out-of-distribution sets): "
    )
    paper += "; ".join(f"{name} {numbers}" for name, numbers in PAPER.items())
    if args.network == "pooled":
        paper = "32 units on means of 4x4 pixels, 1,930 weights"
    elif args.network != "lenet":
        paper = f"KIVI's paper, on 60,000 images: accuracy {100 - KIVI_PAPER[args.network]:.2f} %"
    return table(read_records(args.out)) + (
        "\nThe columns of other image sets give the AUROC of the largest probability, and the mean"
        "\nconfidence on these images, in %. Medians over seeds (and ranges); CPU seconds of all"
        "\ntrainings of the row. No tempering. A refined row is SGHMC from the row of that name."
        f"\nRuns on fewer than 60,000 images are reduced.\n\n{paper}.\n\n"
        + (ONE_GUIDE if args.network == "lenet" else "")
        + commands(f"lenet --network {args.network}", read_records(args.out))
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, RESULTS / "networks_lenet.jsonl", ROWS)
    parser.add_argument("--network", choices=list(NETWORKS), default="lenet")
    parser.add_argument(
        "--foreign", nargs="+", choices=list(FOREIGN), default=["fashion", "notmnist"]
    )
    return parser


def main(args: argparse.Namespace) -> None:
    if args.network != "lenet" and args.out == RESULTS / "networks_lenet.jsonl":
        args.out = RESULTS / f"networks_{args.network}.jsonl"
    run_rows(args, work, report)


if __name__ == "__main__":
    main(parse_arguments(parser(), paper_settings))
