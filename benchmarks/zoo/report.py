# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the runs of ``benchmarks.zoo.run``.

::

    python -m benchmarks.zoo.report --out benchmarks/results/zoo.jsonl
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, Record, markdown_table, read_records, write_page
from benchmarks.zoo import registry
from benchmarks.zoo.references.make import MAX_RHAT, checks_file

GOOD, ACCEPTABLE = 1.5, 4.0
TITLES = {
    "zoo": "The zoo",
    "large": "Models of 64 to 2,502 latent variables",
    "classics": "Classic BUGS examples",
}
NOTE = f"""Ratio to the sampling floor: the sliced 1-Wasserstein distance of the draws from the
reference, divided by the distance between two halves of the reference (a perfect guide has about
0.7). Worst: the same ratio for the 1-Wasserstein distance of the worst single coordinate. Mean: the
largest error of a mean, in sds; sds: the smallest and the largest ratio of standard deviations.
Models marked * have symmetries and are compared by invariants. A ratio of at most {GOOD:g} is good.
Seconds are CPU time of the method and of `diagnose`; MB is the peak memory of the process minus its
memory after the imports. NumPyro: CPU seconds of the reference's four chains, including
compilation; in brackets the number of draws kept. If the collection has runs of NUTS with NumPyro's
defaults (four chains of 1,000 steps of warm-up and 1,000 draws), the seconds are those of such a
run; + marks runs that were stopped, ! runs with an R-hat above {MAX_RHAT:g}.
Share: CPU seconds of the method divided by these.
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


def nuts_seconds(check: Record | None) -> float | None:
    """CPU seconds of NUTS as users run it, or of the reference."""
    if not check:
        return None
    user = check.get("user", check)
    return user.get("stopped", user.get("cpu_seconds"))


def row(record: Record, check: Record | None) -> list[str]:
    sds = ""
    if "sd_ratio_min" in record:
        sds = f"{record['sd_ratio_min']:.2f}-{record['sd_ratio_max']:.2f}"
    reference = ""
    nuts = nuts_seconds(check)
    if check:
        kept = f"{check['num_draws']}" if check["trusted"] else "no reference"
        user = check.get("user", check)
        passed = user.get("worst_rhat", math.inf) < MAX_RHAT
        mark = "+" if "stopped" in user else "" if passed else "!"
        reference = f"({kept})" if nuts is None else f"{nuts:.0f}{mark} ({kept})"
    time_share = ""
    if nuts and "cpu_seconds" in record:
        time_share = f"{record['cpu_seconds'] / nuts:.2f}"
    memory = record["peak_mb"] - record["start_mb"] if "peak_mb" in record else None
    return [
        record["model"] + "*" * bool(check and check.get("num_features") != check.get("dim")),
        str(check.get("dim", "")) if check else "",
        registry.load(record["model"]).half,
        number(record, "ratio"),
        number(record, "worst_ratio"),
        number(record, "mean_error"),
        sds,
        record.get("verdict") or "",
        number(record, "cpu_seconds", 0),
        number(record, "diagnosis_cpu_seconds", 0),
        "" if memory is None else f"{memory:.0f}",
        reference,
        time_share,
        outcome(record),
    ]


HEADER = ["model", "dim", "split", "ratio", "worst", "mean", "sds", "verdict"]
HEADER += ["CPU s", "diagnose s", "MB", "NumPyro s", "share", "outcome"]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.0%})" if whole else "")


def listed(records: list[Record]) -> str:
    return f" ({', '.join(record['model'] for record in records)})" if records else ""


def summary(records: list[Record], checks: dict[str, Record]) -> str:
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
    trusted = [r for r in records if r.get("verdict") == "trust"]
    lines.append(f'verdict "trust": {share(len(trusted), len(records))}')
    pairs = [(r, nuts_seconds(checks.get(r["model"]))) for r in records if "cpu_seconds" in r]
    timed = [(r, nuts) for r, nuts in pairs if nuts is not None]
    slower = [r for r, nuts in timed if r["cpu_seconds"] > nuts]
    within = share(len(timed) - len(slower), len(timed))
    lines.append(f"no slower than NUTS: {within}; slower{listed(slower)}")
    times = [r.get("cpu_seconds", math.inf) for r in records]
    lines.append(f"median CPU seconds, including stopped runs: {median(times):.0f}")
    return "".join(f"* {line}\n" for line in lines)


def stage_shares(records: list[Record]) -> str:
    """Tabulate where `fit` spends its time: each stage's share of all seconds and by model.

    The rest are the checks of the model, the plan and imports. Stages are timed by the clock, so
    shares are of the sum of all stages and the rest of the run.
    """
    spent: dict[str, dict[str, float]] = {}
    for record in records:
        found = re.findall(r"^(\S.*?) {2,}([\d.]+)  ", record.get("report", ""), re.MULTILINE)
        for name, seconds in found:
            by_model = spent.setdefault(name, {})
            by_model[record["model"]] = by_model.get(record["model"], 0.0) + float(seconds)
    totals = {record["model"]: record["seconds"] for record in records if "report" in record}
    if not totals:
        return ""
    known = {model: sum(one.get(model, 0.0) for one in spent.values()) for model in totals}
    spent["rest"] = {model: max(0.0, totals[model] - known[model]) for model in totals}
    rows = []
    for name, by_model in spent.items():
        shares = {model: seconds / totals[model] for model, seconds in by_model.items()}
        worst = max(by_model, key=by_model.__getitem__)
        rows.append((
            sum(by_model.values()),
            [
                name,
                str(len(by_model)),
                f"{sum(by_model.values()) / sum(totals.values()):.0%}",
                f"{median(shares.values()):.0%}",
                f"{by_model[worst]:.1f} ({worst})",
            ],
        ))  # fmt: skip
    header = ["stage", "models", "share of all seconds", "median share", "longest, s"]
    return markdown_table(header, [row for _, row in sorted(rows, key=lambda row: -row[0])])


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
    (collection,) = {registry.load(record["model"]).collection for record in records}
    checks = {record["model"]: record for record in read_records(checks_file(collection))}
    parts = [f"# {TITLES[collection]}\n", NOTE]
    fits = {record["model"]: record for record in records if record["method"] == "fit"}
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        rows = [row(record, checks.get(record["model"])) for record in own]
        parts += [f"## {method}\n", summary(own, checks), markdown_table(HEADER, rows)]
        if method == "fit":
            parts += ["Stages, by the clock:\n", stage_shares(own)]
        if method != "fit":
            parts.append(f"Compared with `fit`:\n\n{beside(own, fits)}")
        for title, half in (("used in development", "look"), ("only scored", "score")):
            some = [record for record in own if registry.load(record["model"]).half == half]
            if some:
                parts += [f"Models {title}:\n", summary(some, checks)]
        parts += [f"### Failures of {method}\n", failures(own)]
    return "\n".join(parts)


def main(args: argparse.Namespace) -> None:
    write_page(args.out, report(read_records(args.out)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "zoo.jsonl", help="JSON lines; the page is next to it"
    )
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
