# SPDX-License-Identifier: Apache-2.0
"""Draw random models and check the results of the library on them.

::

    python -m benchmarks.fuzz.run --seeds 0 500
    python -m benchmarks.fuzz.run --seeds 17 18 --checks elbos     # one of them again
    python -m benchmarks.fuzz.run --report                         # results/fuzz.md

Each seed is a model with its data (:mod:`benchmarks.fuzz.grammar`). Each check adds one line to
``--out``; checks that have a line are skipped. For ``WRONG`` and ``crash`` the script removes sites
and prints the smallest model that fails in the same way.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from typing import Any

import pyro
import torch

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    markdown_table,
    read_records,
    write_page,
)
from benchmarks.fuzz.checks import CHECKS, Wrong
from benchmarks.fuzz.grammar import Draft, draw_model
from benchmarks.fuzz.models import with_data

__all__ = ["check", "smallest"]

OUT = RESULTS / "fuzz.jsonl"
FAULTS = ("WRONG", "crash")


def check(draft: Draft, name: str) -> tuple[str, str]:
    """Classify a check: ``right`` and similar, ``refused``, ``WRONG`` or ``crash``.

    :returns: the outcome and the error's message.
    """
    pyro.clear_param_store()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return CHECKS[name](draft), ""
        except Wrong as error:
            return "WRONG", str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            names = [f"'{site.name}'" for site in draft.sites]
            named = any(one in text for one in names)
            return "refused" if named else "crash", text


def smallest(draft: Draft, name: str, outcome: str) -> Draft:
    """Remove all sites that are not needed for the failure."""
    for site in reversed(draft.sites):
        used = {parent for one in draft.sites for arg in one.args for parent in arg.names}
        if site.name in used or len(draft.latents) == 1 == len(draft.sites):
            continue
        fewer = draft.without(site.name)
        if fewer.latents and check(fewer, name)[0] == outcome:
            return smallest(fewer, name, outcome)
    return draft


def run(seed: int, name: str) -> dict[str, Any]:
    """Run one check of one model."""
    start = time.perf_counter()
    draft = with_data(draw_model(seed))
    outcome, message = check(draft, name)
    if outcome in FAULTS:
        print(f"{outcome} in {name}: {message[:2000]}\n{smallest(draft, name, outcome)}\n")
    seconds = round(time.perf_counter() - start, 2)
    return {"seed": seed, "check": name, "outcome": outcome, "message": message[:300],
            "seconds": seconds}  # fmt: skip


def report(records: list[dict[str, Any]]) -> str:
    """Return the outcomes by check."""
    counts = {name: Counter(r["outcome"] for r in records if r["check"] == name) for name in CHECKS}
    outcomes = sorted({outcome for count in counts.values() for outcome in count})
    rows = [[name, str(count.total()), *(str(count[o] or "") for o in outcomes)]
            for name, count in counts.items()]  # fmt: skip
    return markdown_table(["check", "models", *outcomes], rows)


def main() -> None:
    """Run the missing checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 500), metavar=("FROM", "TO"))
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), choices=CHECKS)
    add_output_arguments(parser, OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = {(record["seed"], record["check"]) for record in read_records(args.out)}
    for seed in range(*args.seeds) if not args.report else ():
        for name in args.checks:
            if (seed, name) not in done:
                append_record(args.out, run(seed, name))
    write_page(args.out, report(read_records(args.out)))


if __name__ == "__main__":
    main()
