# SPDX-License-Identifier: Apache-2.0
"""Convert the tables of ``results/*.md`` into the csv files of the documentation.

::

    python -m benchmarks.evidence
"""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.common import RESULTS

DOCS = Path(__file__).parent.parent / "docs" / "evidence"
PAGES = (
    "posteriordb",
    "hard_geometries",
    "verdicts",
    "broken_guides",
    "refine_toy",
    "refine_models",
    "refine_posteriordb",
    "uci_refine",
    "speed_field",
    "reproduction",
)
FIRST_ALONE = ("speed_field",)  # pages of which only the first table is used
OURS, KEYS = "implicit", ("posterior", "dim", "floor")
LEAST_FILLED = 0.4  # of the cells of a column; emptier ones stay in ``results/*.md``


def tables(text: str) -> list[list[list[str]]]:
    """Return the Markdown tables of a page, each a list of rows of cells."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            found.append([])
            inside = True
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if not all(set(cell) <= set(":-") for cell in cells):
            found[-1].append(cells)
    return found


def for_a_page(rows: list[list[str]]) -> list[list[str]]:
    """Move the column of ``fit`` to the front, and leave out columns that are nearly empty."""
    head, *body = rows
    if OURS not in head:
        return rows
    filled = [
        k for k in range(len(head)) if sum(bool(r[k]) for r in body) >= LEAST_FILLED * len(body)
    ]
    order = sorted(filled, key=lambda k: (head[k] not in KEYS, head[k] != OURS))
    named = ["fit" if name == OURS else name for name in head]
    return [[row[k] for k in order] for row in (named, *body)]


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for page in PAGES:
        path = RESULTS / f"{page}.md"
        found = tables(path.read_text()) if path.exists() else []
        for number, rows in enumerate(found[: 1 if page in FIRST_ALONE else None]):
            with (DOCS / f"{page}_{number}.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(for_a_page(rows))


if __name__ == "__main__":
    main()
