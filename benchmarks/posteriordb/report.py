# SPDX-License-Identifier: Apache-2.0
"""Write the tables and the summary of the runs of ``benchmarks.posteriordb.run``.

::

    python -m benchmarks.posteriordb.report
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from benchmarks.common import Record, markdown_table, read_records, write_page
from benchmarks.posteriordb import data
from benchmarks.posteriordb.methods import METHODS
from benchmarks.posteriordb.run import OUT

OURS = "implicit"
GAUSSIANS = ("best Gaussian", "AutoMultivariateNormal", "AutoLaplaceApproximation")
RIVALS = ("AutoMultivariateNormal", "AutoIAFNormal", "AutoNormalizingFlow")
GOOD, ACCEPTABLE = 1.5, 4.0

Cells = dict[tuple[str, str], list[Record]]


def ratio(record: Record) -> float:
    """Ratio to the floor: for NUTS the floor of equally many exact draws; infinite if failed."""
    if "error" in record:
        return math.inf
    return record["distance"] / record["nuts_floor" if record["method"] == "NUTS" else "floor"]


def group(records: Iterable[Record]) -> Cells:
    """Group the runs by posterior and method."""
    cells: Cells = defaultdict(list)
    for record in records:
        cells[record["posterior"], record["method"]].append(record)
    return dict(cells)


def middle(cells: Cells, posterior: str, method: str) -> float | None:
    """Return the median ratio over seeds, ``None`` without runs."""
    records = cells.get((posterior, method))
    return median(map(ratio, records)) if records else None


def present(cells: Cells, index: int, order: Iterable[str]) -> list[str]:
    """Return the posteriors (index 0) or methods (index 1) of the runs, in ``order``."""
    found = {key[index] for key in cells}
    return [name for name in order if name in found]


def ratio_cell(records: list[Record]) -> str:
    ratios = [ratio(record) for record in records]
    if not any(map(math.isfinite, ratios)):
        return "failed" if records else ""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    worst = f"{max(ratios):.2f}" if math.isfinite(max(ratios)) else "failed"
    return f"{median(ratios):.2f} ({worst})"


def ratio_table(cells: Cells, posteriors: list[str], methods: list[str]) -> str:
    rows = []
    for posterior in posteriors:
        runs = [cells.get((posterior, method), []) for method in methods]
        some = next(records[0] for records in runs if records)
        row = [posterior, str(some["dim"]), f"{some['floor']:.3f}"]
        rows.append(row + [ratio_cell(records) for records in runs])
    return markdown_table(["posterior", "dim", "floor", *methods], rows)


def moments_table(cells: Cells, posteriors: list[str], method: str) -> str:
    """Return the largest errors over seeds of one method's moments."""
    columns: list[tuple[str, Callable]] = [
        ("sd_ratio_min", min),
        ("sd_ratio_max", max),
        ("mean_error", max),
    ]
    rows = []
    for posterior in posteriors:
        records = [r for r in cells.get((posterior, method), []) if "error" not in r]
        if records:
            worst = [f"{pick(r[key] for r in records):.3f}" for key, pick in columns]
            rows.append([posterior, *worst])
    header = ["posterior", "smallest sd ratio", "largest sd ratio", "worst mean error, sds"]
    return markdown_table(header, rows)


def seconds(cells: Cells, posterior: str, method: str) -> float | None:
    """Median CPU time of the runs that did not fail; stopped runs count with their time."""
    records = cells.get((posterior, method), [])
    times = [
        r["cpu_seconds"] for r in records if r.get("error", "TimeLimit").startswith("TimeLimit")
    ]
    return median(times) if times else None


def time_table(cells: Cells, posteriors: list[str], methods: list[str]) -> str:
    def cell(posterior: str, method: str) -> str:
        value = seconds(cells, posterior, method)
        return "" if value is None else f"{value:.0f}"

    rows = [[name, *(cell(name, method) for method in methods)] for name in posteriors]
    return markdown_table(["posterior", *methods], rows)


def failures(cells: Cells) -> str:
    errors = [record for records in cells.values() for record in records if "error" in record]
    if not errors:
        return "No run failed.\n"
    line = "* {posterior}, {method}, seed {seed}: {error}\n"
    return "".join(line.format(**{**r, "error": r["error"].split("\n")[0][:200]}) for r in errors)


def near_gaussian(cells: Cells, posterior: str) -> bool:
    """Check whether a full-rank Gaussian is sufficient."""
    ratios = [middle(cells, posterior, method) for method in GAUSSIANS]
    return any(value is not None and value <= GOOD for value in ratios)


def equals(ours: float, theirs: float) -> bool:
    """Check whether it is not worse, or below the floor, where differences are not visible."""
    return ours <= max(theirs, 1.0)


def names(posteriors: list[str]) -> str:
    return f" ({', '.join(posteriors)})" if posteriors else ""


def summary(cells: Cells, posteriors: list[str]) -> str:
    """Summarise ``implicit``, one line for each claim."""
    own = {name: middle(cells, name, OURS) for name in posteriors}
    fitted = {name: value for name, value in own.items() if value is not None}
    if not fitted:
        return f"No runs of `{OURS}` yet.\n"
    worst = {name: max(map(ratio, cells[name, OURS])) for name in fitted}
    count = len(fitted)
    lines = []
    for limit in (GOOD, ACCEPTABLE):
        for label, values in (("median", fitted), ("worst", worst)):
            over = [name for name in fitted if not values[name] <= limit]
            share = f"{count - len(over)} of {count} ({1 - len(over) / count:.0%})"
            lines.append(f"{label} over seeds at most {limit:g}: {share}; above{names(over)}")
    curved = [name for name in fitted if not near_gaussian(cells, name)]
    lines.append(f"not near-Gaussian: {len(curved)} of {count}{names(curved)}")
    for rival in RIVALS:
        theirs = {name: middle(cells, name, rival) for name in curved}
        compared = [(name, value) for name, value in theirs.items() if value is not None]
        lost = [name for name, value in compared if not equals(fitted[name], value)]
        met = f"{len(compared) - len(lost)} of {len(compared)}"
        lines.append(f"on these, {rival} beaten or equalled: {met}; lost{names(lost)}")
    pairs = [(seconds(cells, name, OURS), seconds(cells, name, "NUTS")) for name in fitted]
    timed = [(a, b) for a, b in pairs if a is not None and b is not None]
    if timed:
        ours, nuts = (median(column) for column in zip(*timed, strict=True))
        faster = sum(a < b for a, b in timed)
        lines.append(
            f"median CPU time {ours:.0f} s, NUTS {nuts:.0f} s; faster on {faster} of {len(timed)}"
        )
    return "".join(f"* {line}\n" for line in lines)


NOTE = f"""The ratio to the sampling floor is the sliced 1-Wasserstein distance to the reference
(whitened, 200 directions, 10,000 draws), divided by the distance between two halves of the
reference; a perfect guide has about 0.7. For NUTS the floor is the distance of 1,000 reference
draws from the others. Median over seeds, in brackets the largest. Best Gaussian: the Gaussian with
the moments of the reference, a yardstick rather than a method. Near-Gaussian: the best Gaussian,
AutoMultivariateNormal or AutoLaplaceApproximation has a ratio of at most {GOOD:g}. Equalled: not
above the other method, or not above 1. Seconds are CPU time, including the start; a run stopped by
the time limit counts with it. Posteriors that are not part of posteriordb are in the tables, but
not in the summary.
"""


def report(records: list[Record]) -> str:
    """Return the Markdown page of all runs."""
    cells = group(records)
    posteriors = present(cells, 0, [*data.NAMES, *data.EXTRA])
    methods = present(cells, 1, METHODS)
    official = [name for name in posteriors if name in data.NAMES]
    parts = {
        "Summary": summary(cells, official),
        "Ratio to the sampling floor": ratio_table(cells, posteriors, methods) + "\n" + NOTE,
        f"Moments of `{OURS}`, worst over seeds": moments_table(cells, posteriors, OURS),
        "Seconds": time_table(cells, posteriors, methods),
        "Failures": failures(cells),
    }
    title = "# posteriordb\n"
    return "\n".join([title, *(f"## {head}\n\n{text}" for head, text in parts.items())])


def main(args: argparse.Namespace) -> None:
    write_page(args.out, report(read_records(args.out)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines; the page is next to it")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
