# SPDX-License-Identifier: Apache-2.0
"""Run :func:`~pyro_implicit.diagnostics.diagnose` on guides that were broken on purpose.

::

    python -m benchmarks.broken_guides.run --data-dir /path/to/data
    python -m benchmarks.broken_guides.report

For each posterior a good guide (``cases.py``) is broken in all ways and sizes (``faults.py``).
``diagnose`` gets it in three forms: ``density``, a guide with its exact density; and, for some
sizes, ``implicit``, the same guide without a density, and ``chains``, draws declared as those of
converged chains, which need no density. Each run adds one line to ``--out``; runs that have a line
are skipped.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch

from benchmarks.broken_guides.cases import good_one, load, modes_of
from benchmarks.broken_guides.faults import SIZES, BrokenGuide, Fault, break_it
from benchmarks.broken_guides.split import LOOK, SCORE
from benchmarks.common import RESULTS, append_record, environment, read_records
from benchmarks.posteriordb.metrics import floor
from benchmarks.posteriordb.verdicts import NUM_DRAWS, Case, judge, sd_noise
from pyro_implicit.diagnostics import draw
from pyro_implicit.guides.sampler import StoredDraws

OUT = RESULTS / "broken_guides.jsonl"
KEY = ("posterior", "kind", "size", "form")
#: The faults with other forms.
OTHER_FORMS = {
    ("none", 0.0): ("implicit", "chains"),
    ("shift", 0.3): ("implicit", "chains"),
    ("direction", 0.6): ("chains",),
    ("tail", 0.1): ("implicit", "chains"),
    ("correlation", 0.5): ("chains",),
    ("mode", 0.3): ("implicit", "chains"),
    ("mode", 0.0): ("chains",),
}


class Plan(NamedTuple):
    """One broken guide."""

    posterior: str
    kind: str
    size: float
    form: str

    @property
    def seed(self) -> int:
        """Return the fields that all forms share."""
        return zlib.crc32(f"{self.posterior} {self.kind} {self.size}".encode()) % 2**31


def plans(posterior: str) -> Iterator[Plan]:
    """All cases of a posterior."""
    for kind, sizes in SIZES.items():
        for size in sizes:
            for form in ("density", *OTHER_FORMS.get((kind, size), ())):
                yield Plan(posterior, kind, size, form)


def as_guide(case: Case, fault: Fault, form: str) -> Any:
    """Return the broken distribution in one of the forms."""
    guide = BrokenGuide(case.model, fault.broken, form == "density")
    guide(*case.args)
    if form == "chains":
        return StoredDraws(draw(guide, NUM_DRAWS, *case.args), settled=True)
    return guide


def run_all(args: argparse.Namespace) -> None:
    machine = environment("cpu")
    done = {tuple(record[key] for key in KEY) for record in read_records(args.out)}
    for name in args.posteriors:
        todo = [plan for plan in plans(name) if tuple(plan) not in done]
        if not todo:
            continue
        case, modes = load(name, args.data_dir), modes_of(name)
        size = {"dim": case.reference.shape[1], "floor": floor(case.reference)}
        pyro.set_rng_seed(0)
        good = good_one(name, case, 0)
        for plan in todo:
            clock = time.process_time()
            pyro.set_rng_seed(plan.seed)
            fault = break_it(good, plan.kind, plan.size, modes)
            if fault is None:
                continue
            make = lambda: as_guide(case, fault, plan.form)  # noqa: B023, E731
            record = judge(case, make, plan.seed, fault.directions) or {}
            if "distance" in record:
                record["ratio"] = record["distance"] / size["floor"]
            noise = {"sd_noise": sd_noise(case.reference, fault.directions)}
            spent = {"cpu_seconds": time.process_time() - clock}
            words = {"guide": f"{plan.kind} {plan.size:g} {plan.form}", "seed": plan.seed}
            append_record(
                args.out, plan._asdict() | words | size | noise | record | spent | machine
            )
            print(*plan, record.get("verdict", record.get("error")), flush=True)


def parser() -> argparse.ArgumentParser:
    names = [*LOOK, *SCORE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="holds the folder posteriordb")
    parser.add_argument("--posteriors", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    return parser


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(args.threads)
    run_all(args)


if __name__ == "__main__":
    main(parser().parse_args())
