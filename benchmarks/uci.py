# SPDX-License-Identifier: Apache-2.0
"""How accurate are Bayesian neural networks in the standard UCI regression protocol?

One hidden layer of 50 ReLU units (protein: 100), the standard random 90/10 splits, test RMSE and
log-likelihood in the units of the data, compared with the papers::

    python -m benchmarks.uci --data-dir /path/to/data --sets boston energy --splits 0 1 2 3 4
    python -m benchmarks.uci --data-dir /path/to/data --methods livi --set-option livi.lr=0.01
    python -m benchmarks.uci --report

Each run adds one line to ``--out``; runs that have a line with
the same settings are skipped. After a change of the library, use another file.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pyro
import torch
from tqdm import tqdm

from benchmarks.common import (
    RESULTS,
    Record,
    add_machine_arguments,
    add_output_arguments,
    append_record,
    attempt,
    environment,
    markdown_table,
    read_records,
    seconds,
    write_page,
)
from benchmarks.uci_data import SETS, MissingData, load
from benchmarks.uci_methods import METHODS, SETTINGS, make_model, scores

# RMSE / log-likelihood. "kivi": Shi, Sun and Zhu (2018), over 20 splits. "livi", with its bound L',
# and "nuts", their HMC: Uppal et al. (2023), over "three different seeds" (an HMC without any
# spread suggests one split). The others: earlier numbers that such papers quote.
PAPERS = {
    "boston": {
        "livi": "2.32 / -2.16",
        "kivi": "2.80 / -2.53",
        "mean_field": "3.42 / -2.66",
        "ensemble": "3.28 / -2.41",
        "nuts": "2.26 / -2.20",
    },
    "concrete": {
        "livi": "4.24 / -2.79",
        "kivi": "4.70 / -3.05",
        "mean_field": "6.00 / -3.22",
        "ensemble": "6.03 / -3.06",
        "nuts": "4.27 / -2.67",
    },
    "energy": {
        "livi": "0.41 / -1.17",
        "kivi": "0.47 / -1.30",
        "mean_field": "2.42 / -2.34",
        "ensemble": "2.09 / -1.31",
        "nuts": "0.38 / -1.14",
    },
    "kin8nm": {
        "livi": "0.03 / 1.24",
        "kivi": "0.08 / 1.16",
        "mean_field": "0.09 / 0.96",
        "ensemble": "0.09 / 1.28",
        "nuts": "0.04 / 1.27",
    },
    "naval": {
        "livi": "0.00 / 6.74",
        "kivi": "0.00 / 5.50",
        "mean_field": "0.01 / 4.00",
        "ensemble": "0.00 / 5.93",
        "nuts": "0.00 / 7.79",
    },
    "protein": {"kivi": "4.26 / -2.87"},
}
NUM_DRAWS, PRECISION_PRIOR = 500, [1.0, 0.01]
KEYS = ("set", "method", "seed", "settings", "device")


def complete_settings(method: str, num_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Settings that identify a run, besides its set, split and seed."""
    settings = SETTINGS[method] | {"batch_size": args.batch_size, "num_draws": args.num_draws}
    if method == "nuts":
        settings["batch_size"] = None  # all rows, as chains need them
    elif args.batch_size is None and num_rows > 1000:
        settings["batch_size"] = 256
    settings["precision_prior"] = args.precision_prior
    return settings | args.set_option.get(method, {})


def run(name: str, split: int, method: str, args: argparse.Namespace, done: list[dict]) -> None:
    """Run one split of one set by one method, unless it is among those ``done``."""
    data = load(name, split, args.data_dir, args.device)
    settings = complete_settings(method, len(data.x_train), args)
    if settings.get("generators", ()) is None:
        settings["generators"] = [list(sizes) for sizes in SETS[name].kivi_generators]
    machine = environment(args.device)
    key = {"set": name, "split": split, "method": method, "seed": args.seed}
    key |= {"settings": settings, "device": machine["device"]}
    if any(all(record.get(k) == v for k, v in key.items()) for record in done):
        return
    pyro.clear_param_store()
    pyro.set_rng_seed(1000 * args.seed + split)
    model = make_model(data, SETS[name].hidden, settings["batch_size"], settings["precision_prior"])

    def work() -> Record:
        draws: dict[str, torch.Tensor] = {}
        wall = seconds(
            lambda: draws.update(METHODS[method](model, data, settings, settings["num_draws"])),
            args.device,
        )
        return {"seconds": wall, **scores(model, draws, data)}

    append_record(args.out, key | attempt(work) | machine)


def run_all(args: argparse.Namespace) -> None:
    done = read_records(args.out)
    for name in args.sets:
        splits = range(SETS[name].num_splits) if args.splits is None else args.splits
        runs = [(split, method) for split in splits for method in args.methods]
        for split, method in (bar := tqdm(runs, unit="run")):
            bar.set_description(f"{name} {split} {method}")
            try:
                run(name, split, method, args, done)
            except MissingData as missing:
                print(f"{name} is left out: {missing}")
                break


def report(args: argparse.Namespace) -> str:
    """Return the Markdown table of ``--out``: one row for each set, method and settings."""
    groups = defaultdict(list)
    for record in read_records(args.out):
        groups[json.dumps([record[key] for key in KEYS])].append(record)
    order = {name: position for position, name in enumerate([*SETS, *METHODS])}
    rows = []
    for group in sorted(groups, key=lambda g: [order[name] for name in json.loads(g)[:2]]):
        records = groups[group]
        name, method, seed, settings, device = json.loads(group)
        fitted = [record for record in records if "error" not in record]
        row = [name, method, describe(name, method, settings)]
        row.append(f"{len(fitted)} of {len(records)}")
        for field, digits in [("rmse", 3), ("log_likelihood", 3)]:
            row.append(mean_and_error([record[field] for record in fitted], digits))
        row.append(f"{median(record['seconds'] for record in fitted):.0f}" if fitted else "")
        rows.append([*row, PAPERS[name].get(method, "")])
    header = ["set", "method", "settings", "splits", "RMSE", "log-likelihood", "seconds"]
    header += ["papers: RMSE / log-likelihood"]
    note = (
        "\nMean +- standard error over splits, without splits that raised an error. Time: median "
        "of one fit\nand its draws, on a busy machine. The papers' numbers are for the same "
        "method; KIVI's for 20 splits.\n"
    )
    return markdown_table(header, rows) + note


def describe(name: str, method: str, settings: dict[str, Any]) -> str:
    """Describe the ``settings`` that differ from the defaults, and always steps and rate."""
    defaults = SETTINGS[method] | {"num_draws": NUM_DRAWS, "precision_prior": PRECISION_PRIOR}
    if "generators" in defaults:
        defaults["generators"] = [list(sizes) for sizes in SETS[name].kivi_generators]
    changed = {k: v for k, v in settings.items() if defaults.get(k) != v or k in ("steps", "lr")}
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in changed.items())


def mean_and_error(values: list[float], digits: int) -> str:
    if not values:
        return "failed"
    error = f" +- {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


class SetOption(argparse.Action):
    """Parse ``livi.lr=1 kivi.steps=2`` to ``{"livi": {"lr": 1}, "kivi": {"steps": 2}}``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        options: dict[str, dict[str, Any]] = defaultdict(dict)
        for text in values:
            name, _, value = text.partition("=")
            method, _, key = name.partition(".")
            if key not in SETTINGS.get(method, {}):
                choices = [f"{m}.{k}" for m, settings in SETTINGS.items() for k in settings]
                parser.error(f"{text!r} is no option; choose METHOD.KEY=VALUE of {choices}")
            options[method][key] = json.loads(value)
        setattr(namespace, self.dest, options)


def main(args: argparse.Namespace) -> None:
    if args.report:
        write_page(args.out, report(args))
        return
    torch.set_num_threads(args.threads)
    run_all(args)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="the folder that holds uci/")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", nargs="+", type=int, help="by default all")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, help="by default up to 1000 rows, else 256")
    parser.add_argument(
        "--num-draws", type=int, default=NUM_DRAWS, help="networks drawn to predict"
    )
    parser.add_argument(
        "--precision-prior",
        nargs=2,
        type=float,
        default=PRECISION_PRIOR,
        metavar=("A", "B"),
        help="Gamma(A, B), of the noise of the standardised y",
    )
    parser.add_argument(
        "--set-option",
        nargs="+",
        action=SetOption,
        default={},
        metavar="METHOD.KEY=VALUE",
        help="changes SETTINGS of uci_methods.py, the value as JSON",
    )
    add_output_arguments(parser, RESULTS / "uci.jsonl")
    add_machine_arguments(parser)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
