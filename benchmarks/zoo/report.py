# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the runs of ``benchmarks.zoo.run``.

::

    python -m benchmarks.zoo.report --out benchmarks/results/zoo.jsonl
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import median

from benchmarks.common import Record, markdown_table, read_records, write_page
from benchmarks.zoo import split
from benchmarks.zoo.references.make import CHECKS
from benchmarks.zoo.run import OUT

GOOD, ACCEPTABLE = 1.5, 4.0
NOTE = f"""Ratio to the sampling floor: the sliced 1-Wasserstein distance of the draws from the
reference, divided by the distance between two halves of the reference (a perfect guide has about
0.7). Worst: the same ratio for the 1-Wasserstein distance of the worst single coordinate. Mean: the
largest error of a mean, in sds; sds: the smallest and the largest ratio of standard deviations.
Models marked * have symmetries and are compared by invariants. A ratio of at most {GOOD:g} is good.
Seconds are CPU time of the method and of `diagnose`; MB is the peak memory of the process minus its
memory after the imports. NumPyro: CPU seconds of the reference's four chains, including
compilation; in brackets the number of draws kept.
"""


def number(record: Record, key: str, digits: int = 2) -> str:
    value = record.get(key)
    return "" if value is None else f"{value:.{digits}f}"


def outcome(record: Record) -> str:
    """Describe the failure in a few words."""
    if "error" in record:
        return record["error"].split("\n")[0][:60].replace("|", "/")
    if "diagnosis_error" in record:
        return "diagnosis: " + record["diagnosis_error"].split("\n")[0][:50].replace("|", "/")
    return str(record.get("chosen", ""))


def row(record: Record, check: Record | None) -> list[str]:
    sds = ""
    if "sd_ratio_min" in record:
        sds = f"{record['sd_ratio_min']:.2f}-{record['sd_ratio_max']:.2f}"
    reference = ""
    if check:
        kept = f"{check['num_draws']}{'' if check['trusted'] else ', not trusted'}"
        reference = f"{check['cpu_seconds']:.0f} ({kept})"
    memory = record["peak_mb"] - record["start_mb"] if "peak_mb" in record else None
    return [
        record["model"] + "*" * bool(check and check["num_features"] != check["dim"]),
        str(check["dim"]) if check else "",
        "look" if record["model"] in split.LOOK else "score",
        number(record, "ratio"),
        number(record, "worst_ratio"),
        number(record, "mean_error"),
        sds,
        record.get("verdict") or "",
        number(record, "cpu_seconds", 0),
        number(record, "diagnosis_cpu_seconds", 0),
        "" if memory is None else f"{memory:.0f}",
        reference,
        outcome(record),
    ]


HEADER = ["model", "dim", "split", "ratio", "worst", "mean", "sds", "verdict"]
HEADER += ["CPU s", "diagnose s", "MB", "NumPyro s", "outcome"]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.0%})" if whole else "")


def listed(records: list[Record]) -> str:
    return f" ({', '.join(record['model'] for record in records)})" if records else ""


def summary(records: list[Record]) -> str:
    """Return the claims, one line each."""
    failed = [r for r in records if "error" in r]
    measured = [r for r in records if "ratio" in r and "error" not in r]
    lines = [
        f"failed or stopped: {share(len(failed), len(records))}{listed(failed)}",
        f"compared with a reference: {share(len(measured), len(records))}",
    ]
    for limit in (GOOD, ACCEPTABLE):
        over = [r for r in measured if not r["ratio"] <= limit]
        within = share(len(measured) - len(over), len(measured))
        lines.append(f"of these with a ratio of at most {limit:g}: {within}; above{listed(over)}")
    wrong = [r for r in measured if r["ratio"] > GOOD and r.get("verdict") == "trust"]
    lines.append(f"wrongly trusted (ratio above {GOOD:g}): {len(wrong)}{listed(wrong)}")
    times = [r.get("cpu_seconds", math.inf) for r in records]
    lines.append(f"median CPU seconds, including stopped runs: {median(times):.0f}")
    return "".join(f"* {line}\n" for line in lines)


def beside(records: list[Record], fits: dict[str, Record]) -> str:
    """Compare the times and distances of ``fit`` with those of another method."""
    pairs = [(fits[r["model"]], r) for r in records if r["model"] in fits]
    pairs = [
        (own, other) for own, other in pairs if "cpu_seconds" in own and "cpu_seconds" in other
    ]
    faster = [own for own, other in pairs if own["cpu_seconds"] < other["cpu_seconds"]]
    undecided = [
        other
        for own, other in pairs
        if "error" in other and own["cpu_seconds"] >= other["cpu_seconds"]
    ]
    slower = [
        own
        for own, other in pairs
        if "error" not in other and own["cpu_seconds"] >= other["cpu_seconds"]
    ]
    both = [(own, other) for own, other in pairs if "ratio" in own and "ratio" in other]
    ratios = [own["ratio"] / other["ratio"] for own, other in both]
    lines = [
        f"fit takes less CPU time: {share(len(faster), len(pairs))}; more{listed(slower)}; "
        f"undecided, because the other run was stopped{listed(undecided)}",
        f"distance of fit divided by that of this method, median of {len(both)}: "
        + (f"{median(ratios):.2f}" if ratios else ""),
    ]
    return "".join(f"* {line}\n" for line in lines)


def failures(records: list[Record]) -> str:
    lines = []
    for record in records:
        for key in ("", "diagnosis_"):
            if f"{key}error" in record:
                where = " > ".join(record.get(f"{key}frames", [])[-6:])
                label = f"{record['model']}{', diagnosis' if key else ''}"
                lines.append(
                    f"* {label}: {record[f'{key}error'][:300]} [{where}]".replace("\n", " ")
                )
    return "\n".join(lines or ["None."]) + "\n"


def report(records: list[Record]) -> str:
    """Return the Markdown page of all runs."""
    checks = {record["model"]: record for record in read_records(CHECKS)}
    parts = ["# The zoo\n", NOTE]
    fits = {record["model"]: record for record in records if record["method"] == "fit"}
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        rows = [row(record, checks.get(record["model"])) for record in own]
        parts += [f"## {method}\n", summary(own), markdown_table(HEADER, rows)]
        if method != "fit":
            parts.append(f"Compared with `fit`:\n\n{beside(own, fits)}")
        for half, names in (("used in development", split.LOOK), ("only scored", split.SCORE)):
            some = [record for record in own if record["model"] in names]
            if some:
                parts += [f"Models {half}:\n", summary(some)]
        parts += [f"### Failures of {method}\n", failures(own)]
    return "\n".join(parts)


def main(args: argparse.Namespace) -> None:
    write_page(args.out, report(read_records(args.out)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="JSON lines; the page is next to it")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
