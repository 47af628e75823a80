# SPDX-License-Identifier: Apache-2.0
"""A guide before and after ``teach`` on draws of ``refine``, and the cost of the next ``refine``.

Each guide is trained by an ELBO for few steps, refined and taught, and refined once more. The table
compares the gradients of both refinements, and the distance of the guide before and after::

    python -m benchmarks.refine_teach --data-dir /path/to/data
    python -m benchmarks.refine_teach --report

Eight schools (centred), a funnel and a conditioned diffusion of 100 dimensions are those of
``hard_geometries.py``, whose distance is the sliced Wasserstein-2 in units of the truth's sds; the
four-class toy is that of ``refine_toy.py``, whose distance is the difference of the uncertainty map
from that of NUTS. Each run adds one line to ``--out``; runs that have a line are skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_sample

from benchmarks import refine_toy, toy_classification
from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    cosine_adam,
    fit,
    markdown_table,
    read_records,
    run_and_report,
    run_missing,
)
from benchmarks.hard_geometries import EIGHT_SCHOOLS, problem
from pyro_implicit import AutoImplicit, AutoregressiveGenerator, InjectiveELBO
from pyro_implicit.diagnostics import draw, sliced_wasserstein
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine, teach

OUT = RESULTS / "refine_teach.jsonl"
Problem = tuple[Any, tuple, Callable[[Any], float], dict[str, Any]]

GUIDES: dict[str, Callable[[Any], Any]] = {
    "AutoNormal": lambda model: AutoNormal(model, init_loc_fn=init_to_sample),
    "AutoMultivariateNormal": lambda model: AutoMultivariateNormal(
        model, init_loc_fn=init_to_sample
    ),
    "AutoregressiveGenerator": lambda model: AutoImplicit(model, AutoregressiveGenerator),
}
PAIRS = (
    (EIGHT_SCHOOLS, "AutoNormal"),
    (EIGHT_SCHOOLS, "AutoregressiveGenerator"),
    ("funnel", "AutoNormal"),
    ("funnel", "AutoregressiveGenerator"),
    ("conditioned_diffusion", "AutoNormal"),
    ("conditioned_diffusion", "AutoMultivariateNormal"),
    ("toy", "AutoNormal"),
)


def toy() -> Problem:
    nuts = refine_toy.reference(RESULTS / "toy_classification.jsonl")
    data = toy_classification.make_data(toy_classification.NUM_TRAIN, seed=0)
    grid = toy_classification.make_grid(nuts["grid"]).float()

    def distance(guide: Any) -> float:
        networks = draw(guide, 1000, *data)["theta"]
        found = toy_classification.uncertainty(networks, grid).tolist()
        return toy_classification.difference({"map": found}, nuts)

    return toy_classification.model, data, distance, {"quantities": refine_toy.probabilities}


def known(name: str, data_dir: Path | None) -> Problem:
    model, args, flatten, reference = problem(name, data_dir)
    loc, scale = reference.mean(0), reference.std(0)

    def distance(guide: Any) -> float:
        draws = flatten(draw(guide, len(reference), *args)).double()
        return sliced_wasserstein((draws - loc) / scale, (reference - loc) / scale).item()

    return model, args, distance, {}


def run(name: str, kind: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_default_dtype(torch.float32 if name == "toy" else torch.float64)
    model, data, distance, options = toy() if name == "toy" else known(name, args.data_dir)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[kind](model)
    elbo = InjectiveELBO(16) if isinstance(guide, AutoImplicit) else ImplicitELBO(16)
    fit(SVI(model, guide, cosine_adam(0.02, args.steps), elbo), args.steps, *data)
    record: dict[str, Any] = {"distance_before": distance(guide)}
    for when in ("first", "second"):
        clock = time.process_time()
        result = refine(
            model,
            guide,
            *data,
            num_chains=args.chains,
            max_gradients=args.max_gradients,
            seed=seed,
            progress=False,
            **options,
        )
        record[when] = {
            "gradients": result.num_gradients,
            "warmup": result.warmup_gradients,
            "stopped": result.stopped,
            "space": result.space,
            "space_note": result.space_note,
            "step": result.step_size,
            "cpu_seconds": time.process_time() - clock,
        }
        if when == "first":
            taught = teach(guide, result.get_samples(), *data, progress=False)
            record["log_q"] = [taught.before, taught.after]
            record["teach_steps"] = taught.num_steps
            record["teach_seconds"] = taught.seconds
            record["distance_after"] = distance(guide)
    return record


def report(path: Path) -> str:
    rows = []
    for record in read_records(path):
        cells = [
            f"{record[when]['gradients']} ({record[when]['warmup']}), {record[when]['stopped']}, "
            f"{record[when]['space']}"
            for when in ("first", "second")
        ]
        before, after = record["log_q"]
        rows.append(
            [
                f"{record['target']}, {record['guide']}",
                f"{record['distance_before']:.3f}",
                f"{record['distance_after']:.3f}",
                f"{before:.2f} to {after:.2f}",
                *cells,
                f"{record['teach_seconds']:.1f}",
            ]
        )
    header = ["target, guide", "distance before", "after", "log q, held out"]
    header += ["first refine: gradients (warm-up)", "second", "s to teach"]
    return markdown_table(header, rows) + "\n" + NOTE


NOTE = """Distance of the guide from the reference (sliced 2-Wasserstein distance in sds of the
reference; for the toy, difference of its uncertainty map from that of NUTS) before and after
`teach` on the draws of `refine`, and the gradients of this refinement and of a second one from the
taught guide: at most about 1,000 in each of 128 chains. Guides are trained for 300 steps with 16
particles. Seconds are wall time. After teaching, the toy's mean field covers the region between the
modes of the network, and its predictions become worse.

To reproduce: `python -m benchmarks.refine_teach --data-dir DATA`.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--targets", nargs="+", default=sorted({name for name, _ in PAIRS}))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--chains", type=int, default=128)
    parser.add_argument("--max-gradients", type=int, default=1000)
    add_output_arguments(parser, OUT)
    return parser


def run_all(args: argparse.Namespace) -> None:
    settings = {name: getattr(args, name) for name in ("steps", "chains", "max_gradients")}
    keys = (
        {"target": name, "guide": kind, "seed": seed} | settings
        for seed in range(args.seeds)
        for name, kind in PAIRS
        if name in args.targets
    )
    run_missing(args.out, keys, lambda key: run(key["target"], key["guide"], key["seed"], args))


if __name__ == "__main__":
    run_and_report(parser().parse_args(), run_all, report)
