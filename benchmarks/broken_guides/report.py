# SPDX-License-Identifier: Apache-2.0
"""Write the tables of verdicts on broken guides, and the figure of the power by size of the fault.

::

    python -m benchmarks.broken_guides.report
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.broken_guides.faults import SIZES
from benchmarks.broken_guides.run import OUT
from benchmarks.broken_guides.split import LOOK, SCORE
from benchmarks.common import markdown_table, read_records, write_page
from benchmarks.posteriordb.verdicts import confusion, failures, true_class

Records = list[dict[str, Any]]

VERDICTS = ("trust", "check", "do not trust")
FORMS = {
    "density": "guides with their exact density",
    "implicit": "guides without a density",
    "chains": "draws declared as converged chains",
}
TITLES = {
    "shift": "shifted, in sds",
    "width": "all sds times",
    "direction": "sd of a direction times",
    "tail": "one tail cut, mass",
    "tails": "all tails cut, mass",
    "correlation": "correlation removed, share",
    "mode": "a mode's weight times",
}
COLOURS = ("C3", "0.85", "C0")
NOTE = """Bad: a standard deviation off by more than a factor of 1.25, or a mean by more than 0.25
sd, of a coordinate or along the direction of the fault, measured with 10,000 draws of the guide and
of the reference; the limits for standard deviations are widened by the difference between two
halves of the reference. Good: ratio to the sampling floor at most 1.5, factor at most 1.1, means
within 0.1 sd. Between: the rest. A guide without a density is never trusted.
"""


def is_false_trust(record: dict[str, Any]) -> bool:
    """Check whether a bad guide was trusted."""
    return record["verdict"] == "trust" and true_class(record) == "bad"


def split_table(records: Records) -> str:
    """Return the table by development and scored posteriors."""
    rows = []
    for part, names in {"developed on": LOOK, "only scored": SCORE}.items():
        for form, words in FORMS.items():
            mine = [r for r in records if r["posterior"] in names and r["form"] == form]
            bad = [r for r in mine if true_class(r) == "bad"]
            trusted = sum(map(is_false_trust, mine))
            numbers = len({r["posterior"] for r in mine}), len(mine), len(bad), trusted
            rows.append([f"{part}: {words}", *map(str, numbers)])
    return markdown_table(["", "posteriors", "guides", "bad", "bad, trusted"], rows)


def shares(records: Records, kind: str, size: float, form: str = "density") -> Records:
    """Return the records of one fault."""
    return [r for r in records if (r["kind"], r["size"], r["form"]) == (kind, size, form)]


def power_table(records: Records, form: str) -> str:
    """Return the table by kind and size: numbers of guides, of bad guides, and of verdicts."""
    rows = []
    for kind, sizes in SIZES.items():
        for size in sizes:
            mine = shares(records, kind, size, form)
            if not mine:
                continue
            counts = Counter(r["verdict"] for r in mine)
            bad = sum(true_class(r) == "bad" for r in mine)
            missed = sum(map(is_false_trust, mine))
            numbers = len(mine), bad, *(counts[verdict] for verdict in VERDICTS), missed
            title = f"{TITLES[kind]} {size:g}" if kind in TITLES else "unchanged"
            rows.append([title, *map(str, numbers)])
    return markdown_table(["fault", "guides", "bad", *VERDICTS, "bad and trusted"], rows)


def picture(records: Records, path: Path) -> None:
    """Draw one panel for each kind: shares of the verdicts by size."""
    figure, axes = plt.subplots(2, 4, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axis, (kind, title) in zip(axes.flat, TITLES.items(), strict=False):
        sizes = sorted(size for size in SIZES[kind] if shares(records, kind, size))
        base = [0.0] * len(sizes)
        for verdict, colour in zip(reversed(VERDICTS), COLOURS, strict=True):
            heights = []
            for size in sizes:
                mine = shares(records, kind, size)
                heights.append(sum(r["verdict"] == verdict for r in mine) / len(mine))
            axis.bar(range(len(sizes)), heights, bottom=base, color=colour, label=verdict)
            base = [a + b for a, b in zip(base, heights, strict=True)]
        mine = [shares(records, kind, size) for size in sizes]
        bad = [sum(true_class(r) == "bad" for r in some) / len(some) for some in mine]
        axis.plot(range(len(sizes)), bad, "k_", markersize=16, markeredgewidth=2, label="bad")
        axis.set_xticks(range(len(sizes)), [f"{size:g}" for size in sizes])
        axis.set_title(title, fontsize=10)
    axes[0, 0].set_ylabel("share of guides")
    axes[1, 0].set_ylabel("share of guides")
    last = axes.flat[-1]
    last.axis("off")
    last.legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def page(records: Records) -> str:
    """Return the Markdown page of all records."""
    judged = [record for record in records if "error" not in record]
    broken = [record for record in judged if record["kind"] != "none"]
    names = {record["posterior"] for record in judged}
    minutes = sum(record["cpu_seconds"] for record in records) / 60
    parts = [
        "# Verdicts on broken guides\n",
        f"{len(broken)} guides broken in known ways and {len(judged) - len(broken)} unchanged "
        f"guides, of {len(names)} posteriors; {minutes:.0f} CPU minutes.\n",
        "## Bad guides that were trusted\n",
        split_table(judged),
        NOTE,
        *(f"## Power: {words}\n\n{power_table(judged, form)}" for form, words in FORMS.items()),
        "![shares of the verdicts by the size of each fault](broken_guides.png)\n",
        f"## Truth and verdict\n\n{confusion(judged)}",
        "## Failures\n",
        failures(records),
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    path = parser.parse_args().out
    records = read_records(path)
    write_page(path, page(records))
    picture([r for r in records if "error" not in r], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
