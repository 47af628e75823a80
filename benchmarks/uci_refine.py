# SPDX-License-Identifier: Apache-2.0
"""The UCI networks of ``uci.py``, before and after ``refine``.

Guides are trained from small weights, on minibatches where ``uci.py`` uses them. ``refine`` moves
their draws on all rows and monitors the predictions of some test rows; both are scored. The
*reference* of a split is a longer run of ``refine`` from small prior draws, one for each chain: it
has the same kernel, but other initial values and another adaptation. On the large sets such chains
do not converge, so Adam first moves each draw to a separate mode::

    python -m benchmarks.uci_refine --data-dir /path/to/data --sets boston energy --splits 0 1 2 3 4
    python -m benchmarks.uci_refine --data-dir /path/to/data --methods reference --splits 1
    python -m benchmarks.uci_refine --report

Each run adds one line to ``--out``; runs that have a line with the same settings are skipped. Large
sets are twice as fast if freed memory is kept, see ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    environment,
    markdown_table,
    read_records,
    run_and_report,
)
from benchmarks.uci import NUM_DRAWS, PAPERS, PRECISION_PRIOR, mean_and_error
from benchmarks.uci_data import SETS, Data, load
from benchmarks.uci_methods import METHODS, SETTINGS, make_model, scores
from pyro_implicit.density import Target
from pyro_implicit.mcmc import refine

# Chains, and gradients of each. The cost of a gradient grows with the number of rows; the budget is
# that of the machine.
BUDGETS = {
    "boston": (16, 4000),
    "concrete": (16, 4000),
    "energy": (16, 12000),
    "kin8nm": (16, 2000),
    "naval": (16, 600),
    "protein": (8, 300),
}
# Factors of STEPS. Naval's noise is a thousandth of its spread, and Adam on minibatches reaches it
# far sooner than chains on all rows.
LONGER = {"kin8nm": 3, "naval": 15, "protein": 15}
# Priors of weights are N(0, gain² / fan-in). With protein's 41,157 rows a gain of 1 is too narrow:
# on split 2 an ensemble has -2.886 with it, and -2.85 with 3, the default of `to_bayesian_`.
GAINS = {"protein": 3.0}
STEPS = {"mean_field": 600, "kivi": 1000, "livi": 1000}
# Adam steps on minibatches of 1,024 rows, for the references of large sets.
ADAM_STEPS = {"kin8nm": 5000, "naval": 20_000, "protein": 32_000}
WEIGHT_SCALE, FRAME = 0.3, "diagonal"
NUM_WATCHED = 50
LARGE = 1000  # rows, above which guides use minibatches


def guide_settings(method: str, name: str, data: Data) -> dict[str, Any]:
    """Settings of ``uci.py`` with other initial weights and steps."""
    is_large = len(data.x_train) > LARGE
    settings = SETTINGS[method] | {"weight_scale": WEIGHT_SCALE}
    settings |= {"steps": STEPS[method] * LONGER.get(name, 1)}
    settings |= {"batch_size": 256 if is_large else None}
    if "generators" in settings:
        settings["generators"] = [list(sizes) for sizes in SETS[name].kivi_generators]
    return settings


def small_draws(density: Target, num_draws: int) -> dict[str, Tensor]:
    """Prior draws with small weights and a moderate noise."""
    draws = density.constrain(density.sample_prior(num_draws))
    weights = {site: WEIGHT_SCALE * value for site, value in draws.items()}
    return weights | {"precision": torch.full_like(draws["precision"], 10.0)}


def modes(
    batched: Callable, data: Data, starts: dict[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """Move each draw to a separate mode by Adam on minibatches, in parallel."""
    density = Target.of_minibatches(batched, data.x_train, data.y_train, batch=())
    latent = density.unconstrain(starts).requires_grad_()
    optimizer = torch.optim.Adam([latent], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        density = density.on(())
        latent.grad = -density.score(latent.detach())[1] / len(data.x_train)
        optimizer.step()
        schedule.step()
    return density.constrain(latent.detach())


def predictions(draws: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of the networks ``(num_draws, len(x))``."""
    hidden = (x @ draws["0.weight"].mT + draws["0.bias"].unsqueeze(-2)).relu()
    return (hidden @ draws["2.weight"].mT).squeeze(-1) + draws["2.bias"]


def run(name: str, split: int, method: str, args: argparse.Namespace, done: list[dict]) -> None:
    """Run one split of one set from one guide, unless it is among those ``done``."""
    data = load(name, split, args.data_dir)
    chains, gradients = BUDGETS[name]
    budget = {"chains": chains, "gradients": gradients, "frame": FRAME, "watched": NUM_WATCHED}
    if method == "reference":
        budget["gradients"] *= args.reference_factor
        settings: dict[str, Any] = {"weight_scale": WEIGHT_SCALE}
        settings |= {"steps": ADAM_STEPS[name]} if name in ADAM_STEPS else {}
    else:
        settings = guide_settings(method, name, data)
    settings |= {"gain": GAINS[name]} if name in GAINS else {}
    key = {"set": name, "split": split, "method": method, "settings": settings, "budget": budget}
    if any(all(record.get(k) == v for k, v in key.items()) for record in done):
        return
    prior = PRECISION_PRIOR, GAINS.get(name, 1.0)
    pyro.clear_param_store()
    pyro.set_rng_seed(split if method != "reference" else 1000 + split)
    began = time.process_time()  # excludes other jobs on the machine
    result: dict[str, Any] = {}
    model = make_model(data, SETS[name].hidden, None, *prior)
    if method == "reference":
        start = small_draws(Target(model, data.x_train, data.y_train), chains)
        if name in ADAM_STEPS:
            batched = make_model(data, SETS[name].hidden, 1024, *prior)
            start = modes(batched, data, start, ADAM_STEPS[name])
            result["guide_seconds"] = time.process_time() - began
            result["before"] = scores(model, start, data)
    else:
        batched = make_model(data, SETS[name].hidden, settings["batch_size"], *prior)
        start = METHODS[method](batched, data, settings, NUM_DRAWS)
        result["guide_seconds"] = time.process_time() - began
        result["before"] = scores(model, start, data)
    began = time.process_time()
    refined = refine(
        model,
        start,
        data.x_train,
        data.y_train,
        num_chains=chains,
        max_gradients=budget["gradients"],
        frame=FRAME,
        quantities=lambda draws: predictions(draws, data.x_test[:NUM_WATCHED]),
        progress=False,
    )
    result["refine_seconds"] = time.process_time() - began
    result["after"] = scores(model, refined.get_samples(), data)
    result |= {
        "stopped": refined.stopped,
        "num_gradients": refined.num_gradients,
        "warmup_gradients": refined.warmup_gradients,
        "acceptance": refined.acceptance,
        "failed": refined.failed,
        "step_size": refined.step_size,
        "drift": None if refined.drift is None else refined.drift._asdict(),
    }
    append_record(args.out, key | result | environment("cpu"))


def run_all(args: argparse.Namespace) -> None:
    runs = [
        (name, split, method)
        for split in args.splits
        for method in args.methods
        for name in args.sets
    ]
    for name, split, method in (bar := tqdm(runs, unit="run")):
        bar.set_description(f"{name} {split} {method}")
        run(name, split, method, args, read_records(args.out))


def report(path: Path) -> str:
    """Return the Markdown table of the records: one row for each set, method and budget."""
    groups = defaultdict(list)
    references: dict[tuple[str, float, int], dict[str, Any]] = {}
    for record in read_records(path):
        name, gain = record["set"], record["settings"].get("gain", 1.0)
        if record["method"] == "reference":
            references[name, gain, record["split"]] = record
        groups[name, gain, record["method"], record["budget"]["gradients"]].append(record)
    order = list(SETS), [*STEPS, "reference"]
    places = {
        key: (order[0].index(key[0]), key[1], order[1].index(key[2]), key[3]) for key in groups
    }
    rows = [_row(*key[:3], groups[key], references) for key in sorted(groups, key=places.get)]
    header = ["set", "start", "splits", "RMSE before", "after", "log-likelihood before", "after"]
    header += ["after - reference", "gradients", "CPU s: guide + refine", "KIVI's paper"]
    header += ["LIVI's paper", "its HMC"]
    return markdown_table(header, rows) + NOTE


def _row(name: str, gain: float, method: str, records: list[dict], references: dict) -> list[str]:
    start = method if gain == 1 else f"{method}, prior x {gain:g}"
    row = [name, start, " ".join(str(split) for split in sorted(r["split"] for r in records))]
    for field in ("rmse", "log_likelihood"):
        for when in ("before", "after"):
            values = [record[when][field] for record in records if when in record]
            row.append(mean_and_error(values, 3) if values else "")
    gaps = [
        record["after"]["log_likelihood"]
        - references[name, gain, record["split"]]["after"]["log_likelihood"]
        for record in records
        if method != "reference" and (name, gain, record["split"]) in references
    ]
    row.append(", ".join(f"{gap:+.3f}" for gap in gaps))
    chains = records[0]["budget"]["chains"]
    row.append(f"{chains} x {mean(record['num_gradients'] for record in records):.0f}")
    seconds = [record["refine_seconds"] for record in records]
    guides = [record.get("guide_seconds", 0.0) for record in records]
    row.append(f"{mean(guides):.0f} + {mean(seconds):.0f}")
    return [*row, *(PAPERS[name].get(paper, "") for paper in ("kivi", "livi", "nuts"))]


NOTE = f"""
Mean +- standard error over splits, test RMSE and log-likelihood in the units of the data. Guides:
{STEPS["mean_field"]} steps of mean field and {STEPS["kivi"]} of the others; three times as many for
kin8nm and protein, fifteen times for naval and for protein with the wider prior, on minibatches of
256 rows; small initial weights, otherwise the settings of `uci.py`. `refine(frame="{FRAME}",
quantities=...)` moves their draws. The reference of a split, where a difference is given, is a
longer run of `refine` from small prior draws, one for each chain. On the large sets Adam first
moves each draw to a separate mode, on 1,024 rows at a time, in
{", ".join(f"{steps:,} steps ({name})" for name, steps in ADAM_STEPS.items())}: the values "before"
are those of an ensemble with one network per chain. Weights have the prior N(0, 1 / fan-in), or
N(0, 9 / fan-in) with "prior x 3", the default of `to_bayesian_`. The frame was chosen on split 0 of
Boston, the steps for naval on split 0 of naval, Adam's steps and the wider prior on split 2 of
protein, and the budget by the available time. The papers' numbers are RMSE / log-likelihood over
their own splits and with their own priors: KIVI's over 20 splits, LIVI's and its HMC's over three
seeds.

To reproduce: `python -m benchmarks.uci_refine --data-dir DIR`.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = [*STEPS, "reference"]
    parser.add_argument("--data-dir", type=Path, help="the folder that holds uci/")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="+", default=choices, choices=choices)
    parser.add_argument("--reference-factor", type=int, default=2, help="times the gradients")
    add_output_arguments(parser, RESULTS / "uci_refine.jsonl")
    return parser


if __name__ == "__main__":
    run_and_report(parser().parse_args(), run_all, report)
