# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/howto/expected_times from ``results``.

::

    python -m benchmarks.expected_times
"""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from statistics import median

from benchmarks.common import RESULTS, read_records
from benchmarks.evidence import DOCS

EDGES = (1, 6, 11, 31, 101, 301, 1101)
ROW = re.compile(r"^\| (\w+)\W* \| ([\d,]+) \|", re.MULTILINE)


def fits() -> list[tuple[int, float, float | None]]:
    """Return latents, CPU seconds and those of ``diagnose`` by model: medians over seeds."""
    text = (RESULTS / "zoo.md").read_text().split("\n## ")[1]
    latents = {name: int(number.replace(",", "")) for name, number in ROW.findall(text)}
    found = [
        (latents[run["model"]], run["cpu_seconds"], run.get("diagnosis_cpu_seconds"))
        for run in read_records(RESULTS / "zoo.jsonl")
        if run["method"] == "fit" and run["model"] in latents  # others have no reference
    ]
    runs: dict[str, list[dict]] = {}
    for run in read_records(RESULTS / "posteriordb.jsonl"):
        if run["method"] == "implicit":
            runs.setdefault(run["posterior"], []).append(run)
    for same in runs.values():
        found.append((same[0]["dim"], median(run["cpu_seconds"] for run in same), None))
    return found


def fit_rows() -> list[list[str]]:
    rows = [["latents", "models", "fastest", "median", "slowest", "diagnose, median"]]
    for low, beyond in pairwise(EDGES):
        here = [one for one in fits() if low <= one[0] < beyond]
        times = [one[1] for one in here]
        checks = [one[2] for one in here if one[2] is not None]
        seconds = (min(times), median(times), max(times), median(checks))
        rows.append([f"{low} to {beyond - 1:,}", str(len(here)), *(f"{s:.0f}" for s in seconds)])
    return rows


def step_rows() -> list[list[str]]:
    curves: dict[str, dict[int, float]] = {}
    for point in read_records(RESULTS / "speed_scaling.jsonl"):
        if point["panel"] == "latents":
            curves.setdefault(point["curve"], {})[point["size"]] = 1e3 * point["seconds"]
    sizes = sorted(next(iter(curves.values())))
    rows = [["milliseconds", *(f"{size:,} latents" for size in sizes)]]
    return rows + [[name, *(f"{at[size]:.0f}" for size in sizes)] for name, at in curves.items()]


def main() -> None:
    for name, rows in (("fits", fit_rows()), ("steps", step_rows())):
        with (DOCS / f"expected_{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
