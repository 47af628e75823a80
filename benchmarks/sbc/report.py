# SPDX-License-Identifier: Apache-2.0
"""Write the table and the figure of the ranks: distribution functions with 99 % bands.

::

    python -m benchmarks.sbc.report
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.common import markdown_table, read_records, write_page
from benchmarks.sbc.bands import band, p_value
from benchmarks.sbc.models import MODELS
from benchmarks.sbc.run import METHODS, NUM_DRAWS, OUT

__all__ = ["ranks_of", "table"]

LEAST = 20  # data sets required for a useful band
FALSE_ALARM = 0.01

Records = list[dict[str, Any]]


def ranks_of(records: Records) -> dict[str, dict[tuple[str, str], np.ndarray]]:
    """Group the records of each model and statistic by method."""
    found: dict[str, Any] = {method: defaultdict(list) for method in METHODS}
    for record in records:
        for name, rank in record["ranks"].items():
            found[record["method"]][record["model"], name].append(rank)
    return {
        method: {key: np.array(ranks) for key, ranks in by_key.items()}
        for method, by_key in found.items()
    }


def table(records: Records) -> str:
    """Return one row for each model and method: statistics outside their band, and the worst."""
    rows, all_ranks = [], ranks_of(records)
    for name in MODELS:
        for method in METHODS:
            mine = [r for r in records if (r["model"], r["method"]) == (name, method)]
            if not mine:
                continue
            p_values = {
                key[1]: p_value(ranks, NUM_DRAWS)
                for key, ranks in all_ranks[method].items()
                if key[0] == name
            }
            worst = min(p_values, key=lambda key: p_values[key])
            outside = sum(p < FALSE_ALARM for p in p_values.values())
            how = ", ".join(f"{n} {what}" for what, n in Counter(r["how"] for r in mine).items())
            rows.append(
                [name, method, str(len(mine)), f"{outside} of {len(p_values)}",
                 f"{worst} {p_values[worst]:.2g}", how]
            )  # fmt: skip
    head = ["model", "by", "data sets", "outside their 99 % band", "least p-value", "draws"]
    return markdown_table(head, rows)


def picture(records: Records, path: Path) -> None:
    """Draw one panel for each model with enough data sets, both methods, all statistics."""
    all_ranks = ranks_of(records)
    counts = Counter((r["model"], r["method"]) for r in records)
    names = [name for name in MODELS if any(counts[name, m] >= LEAST for m in METHODS)]
    columns = max(1, min(5, len(names)))
    shape = (-(-len(names) // columns) or 1, columns)
    figure, axes = plt.subplots(*shape, figsize=(2.6 * shape[1], 2.2 * shape[0]), squeeze=False)
    grid = np.arange(1, NUM_DRAWS + 1) / (NUM_DRAWS + 1)
    for axis, name in zip(axes.flat, names, strict=False):
        for method, colour in zip(METHODS, ("C0", "C1"), strict=True):
            count = counts[name, method]
            if count < LEAST:
                continue
            for key, ranks in all_ranks[method].items():
                if key[0] == name:
                    share = (ranks[:, None] <= np.arange(NUM_DRAWS)).mean(0)
                    axis.step(grid, share - grid, colour, lw=0.7, alpha=0.7, where="post")
            for edge in band(count, NUM_DRAWS):
                axis.step(grid, edge, colour, lw=1.2, ls="--", where="post")
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=6)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.supxlabel("share of the draws below the truth", fontsize=8)
    figure.supylabel("distribution function, less that of uniform ranks", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Write table and figure next to the runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    records = read_records(args.out)
    write_page(args.out, table(records))
    picture(records, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
