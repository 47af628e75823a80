# SPDX-License-Identifier: Apache-2.0
"""``refine`` on posteriors of posteriordb, compared with their reference draws.

From two guides: Pyro's ``AutoNormal`` at the mode, after 1,000 steps, and the guide of ``fit``.
Distances, before and after, are those of ``posteriordb/run.py``::

    python -m benchmarks.refine_posteriordb --data-dir /path/to/data
    python -m benchmarks.refine_posteriordb --report

Each run adds one line to ``--out``; runs that have a line with
the same settings are skipped.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, init_to_value

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
from benchmarks.posteriordb import data
from benchmarks.posteriordb.methods import start
from benchmarks.posteriordb.metrics import floor, measure
from benchmarks.posteriordb.run import reference_of
from pyro_implicit import fitting
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine

STARTS = ("mean field", "fit")
# One of each family of regressions, and all other models.
NAMES = (
    "arK-arK",
    "bball_drive_event_0-hmm_drive_0",
    "earnings-logearn_interaction_z",
    "eight_schools-eight_schools_centered",
    "eight_schools-eight_schools_noncentered",
    "gp_pois_regr-gp_regr",
    "kidiq-kidscore_momhsiq",
    "low_dim_gauss_mix-low_dim_gauss_mix",
    "mesquite-logmesquite",
    "nes1980-nes",
    "sblrc-blr",
)
STEPS, DRAWS = 1000, 10_000


def mean_field(posterior: Any) -> AutoNormal:
    init = init_to_value(values=start(posterior).values)
    guide = AutoNormal(posterior.model, init_loc_fn=init)
    svi = SVI(posterior.model, guide, cosine_adam(1e-2, STEPS), ImplicitELBO(8))
    fit(svi, STEPS, *posterior.args)
    return guide


def run(name: str, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one posterior from one guide, before and after."""
    posterior = data.load(name, args.data_dir)
    reference = reference_of(posterior)
    model = posterior.model
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    began = time.process_time()  # excludes other jobs on the machine
    if kind == "fit":
        guide = fitting.fit(model, "auto", *posterior.args, seed=args.seed, progress=False).guide
    else:
        guide = mean_field(posterior)
    trained = time.process_time()
    budget = {"num_chains": args.chains, "max_gradients": args.max_gradients}
    result = refine(model, guide, *posterior.args, **budget, progress=False)
    end = time.process_time()
    found = {"dim": reference.shape[1], "floor": floor(reference)}
    before, after = draw(guide, DRAWS, *posterior.args), result.get_samples()
    for when, draws in (("before", before), ("after", after)):
        found[when] = measure(posterior.unconstrain(draws).detach(), reference)
        found[when]["ratio"] = found[when]["distance"] / found["floor"]
    return found | {
        "guide_seconds": trained - began,
        "refine_seconds": end - trained,
        "num_gradients": result.num_gradients,
        "stopped": result.stopped,
        "failed": result.failed,
        "space": result.space,
    }


def run_all(args: argparse.Namespace) -> None:
    names = ["seed", "chains", "max_gradients"]
    settings = {name: getattr(args, name) for name in names}
    keys = (
        {"posterior": name, "start": kind} | settings
        for kind in args.starts
        for name in args.posteriors
    )
    run_missing(args.out, keys, lambda key: run(key["posterior"], key["start"], args))


def report(path: Path) -> str:
    """Return the Markdown table of the records."""
    records = read_records(path)
    rows = []
    for record in records:
        row = [record["posterior"], record["start"]]
        for when in ("before", "after"):
            found = record[when]
            sds = f"{found['sd_ratio_min']:.2f} to {found['sd_ratio_max']:.2f}"
            row += [f"{found['ratio']:.2f}", f"{found['mean_error']:.2f}", sds]
        row.append(f"{record['num_gradients']}, {record['stopped']}")
        row.append(f"{record['guide_seconds']:.0f} + {record['refine_seconds']:.0f}")
        rows.append(row)
    header = ["posterior", "start", "before: ratio", "mean error", "sds"]
    header += ["after: ratio", "mean error", "sds", "gradients", "CPU s: guide + refine"]
    lines = []
    for kind in STARTS:
        some = [record for record in records if record["start"] == kind]
        if some:
            good = [
                sum(record[when]["ratio"] <= 1.5 for record in some) for when in ("before", "after")
            ]
            lines.append(f"From {kind}, ratio at most 1.5: {good[0]} before and {good[1]} after")
            lines[-1] += f" of {len(some)}."
    return markdown_table(header, rows) + "\n" + "\n".join(lines) + "\n" + NOTE


NOTE = f"""
`posteriordb.md` defines the ratio to the sampling floor. The table gives the largest error of a
mean, in posterior sds, and the range of the sd ratios. Mean field is Pyro's `AutoNormal`, {STEPS}
steps from the mode.

To reproduce: `python -m benchmarks.refine_posteriordb --data-dir DIR`.
"""


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    run_and_report(args, run_all, report)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="holds the folder posteriordb")
    parser.add_argument(
        "--posteriors", nargs="+", default=NAMES, choices=[*data.NAMES, *data.EXTRA]
    )
    parser.add_argument("--starts", nargs="+", default=list(STARTS), choices=STARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--max-gradients", type=int, default=1000, help="of each chain")
    add_output_arguments(parser, RESULTS / "refine_posteriordb.jsonl")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
