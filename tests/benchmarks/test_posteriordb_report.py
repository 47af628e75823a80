# SPDX-License-Identifier: Apache-2.0
"""The report's tables and summary on made records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.posteriordb import report
from benchmarks.posteriordb.data import EXTRA, NAMES

A, B, C = NAMES[:3]


def record(posterior: str, method: str, ratio: float, seed: int = 0, **more: Any) -> dict:
    """A run whose distance is ``ratio`` floors of 0.02 (NUTS: of 0.05)."""
    floor = 0.05 if method == "NUTS" else 0.02
    made = {"posterior": posterior, "method": method, "seed": seed, "dim": 3, "floor": 0.02}
    made |= {"nuts_floor": 0.05, "distance": ratio * floor, "cpu_seconds": 10.0, "mean_error": 0.01}
    return made | {"sd_ratio_min": 0.9, "sd_ratio_max": 1.1} | more


def failed(posterior: str, method: str, error: str, seed: int = 0) -> dict:
    made = {"posterior": posterior, "method": method, "seed": seed, "dim": 3, "floor": 0.02}
    return made | {"nuts_floor": 0.05, "cpu_seconds": 7.0, "error": error}


RECORDS = [
    *(record(A, "implicit", value, seed) for seed, value in enumerate([0.7, 0.8, 1.6])),
    *(record(B, "implicit", value, seed) for seed, value in enumerate([2.0, 1.0, 5.0])),
    *(record(C, "implicit", value, seed) for seed, value in enumerate([0.9, 0.95])),
    failed(C, "implicit", "RuntimeError: lost\nfar away", 2),
    record(A, "AutoMultivariateNormal", 1.4),
    record(B, "AutoMultivariateNormal", 9.0),
    record(C, "AutoMultivariateNormal", 1.6),
    record(A, "AutoIAFNormal", 0.1),
    record(B, "AutoIAFNormal", 1.5),
    record(C, "AutoIAFNormal", 0.8),
    record(B, "AutoNormalizingFlow", 2.0),
    failed(C, "AutoNormalizingFlow", "ValueError: nan"),
    record(A, "NUTS", 1.1, cpu_seconds=50.0),
    record(B, "NUTS", 1.2, cpu_seconds=5.0),
    failed(C, "NUTS", "TimeLimit: more than 7 s") | {"cpu_seconds": 600.0},
]


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_ratio() -> None:
    assert report.ratio(record(A, "implicit", 1.3)) == pytest.approx(1.3)
    assert report.ratio(record(A, "NUTS", 1.3)) == pytest.approx(1.3)
    assert report.ratio(failed(A, "NUTS", "X: y")) == math.inf


def test_ratio_cell() -> None:
    cells = report.group(RECORDS)
    assert report.ratio_cell(cells[A, "implicit"]) == "0.80 (1.60)"
    assert report.ratio_cell(cells[C, "implicit"]) == "0.95 (failed)"
    assert report.ratio_cell(cells[C, "AutoNormalizingFlow"]) == "failed"
    assert report.ratio_cell(cells[A, "NUTS"]) == "1.10"
    assert report.ratio_cell([]) == ""


def test_ratio_table() -> None:
    methods = ["AutoNormalizingFlow", "NUTS", "implicit"]
    table = lines(report.ratio_table(report.group(RECORDS), [A, C], methods))
    assert table[2] == f"| {A} | 3 | 0.020 |  | 1.10 | 0.80 (1.60) |"
    assert table[3] == f"| {C} | 3 | 0.020 | failed | failed | 0.95 (failed) |"
    assert len(table) == 4


def test_near_gaussian() -> None:
    cells = report.group(RECORDS)
    assert [report.near_gaussian(cells, name) for name in (A, B, C)] == [True, False, False]
    cells[C, "AutoLaplaceApproximation"] = [record(C, "AutoLaplaceApproximation", 1.5)]
    assert report.near_gaussian(cells, C)


def test_equals() -> None:
    assert report.equals(1.2, 1.2) and report.equals(1.0, 0.7) and report.equals(0.5, math.inf)
    assert not report.equals(1.1, 0.9) and not report.equals(2.0, 1.9)


def test_summary() -> None:
    text = lines(report.summary(report.group(RECORDS), [A, B, C]))
    assert text == [
        f"* median over seeds at most 1.5: 2 of 3 (67%); above ({B})",
        f"* worst over seeds at most 1.5: 0 of 3 (0%); above ({A}, {B}, {C})",
        "* median over seeds at most 4: 3 of 3 (100%); above",
        f"* worst over seeds at most 4: 1 of 3 (33%); above ({B}, {C})",
        f"* not near-Gaussian: 2 of 3 ({B}, {C})",
        "* on these, AutoMultivariateNormal beaten or equalled: 2 of 2; lost",
        f"* on these, AutoIAFNormal beaten or equalled: 1 of 2; lost ({B})",
        "* on these, AutoNormalizingFlow beaten or equalled: 2 of 2; lost",
        "* median CPU time 10 s, NUTS 50 s; faster on 2 of 3",
    ]


def test_summary_without_our_runs() -> None:
    cells = report.group([record(A, "NUTS", 1.0)])
    assert report.summary(cells, [A]) == "No runs of `implicit` yet.\n"


def test_moments_are_the_worst_over_seeds() -> None:
    runs = [
        record(A, "implicit", 1, 0, sd_ratio_min=0.7, sd_ratio_max=1.0, mean_error=0.1),
        record(A, "implicit", 1, 1, sd_ratio_min=0.9, sd_ratio_max=1.4, mean_error=0.3),
        failed(A, "implicit", "X: y", 2),
        failed(B, "implicit", "X: y", 0),
    ]
    table = lines(report.moments_table(report.group(runs), [A, B], "implicit"))
    assert table[2:] == [f"| {A} | 0.700 | 1.400 | 0.300 |"]


def test_seconds() -> None:
    cells = report.group(RECORDS)
    assert report.seconds(cells, A, "NUTS") == 50
    assert report.seconds(cells, C, "NUTS") == 600  # stopped by the limit
    assert report.seconds(cells, C, "AutoNormalizingFlow") is None
    table = lines(report.time_table(cells, [A, C], ["AutoNormalizingFlow", "NUTS"]))
    assert table[2:] == [f"| {A} |  | 50 |", f"| {C} |  | 600 |"]


def test_failures_are_listed() -> None:
    text = report.failures(report.group(RECORDS))
    assert f"* {C}, implicit, seed 2: RuntimeError: lost\n" in text
    assert len(lines(text)) == 3
    assert report.failures(report.group(RECORDS[:1])) == "No run failed.\n"


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Extra posteriors are in the tables and not in the summary; the order is the benchmark's."""
    out = tmp_path / "out.jsonl"
    records = [record(EXTRA[0], "implicit", 77.0), *reversed(RECORDS)]
    out.write_text("".join(json.dumps(made) + "\n" for made in records))
    report.main(report.parser().parse_args(["--out", str(out)]))
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    summary, table = text.split("## Ratio to the sampling floor")
    assert "2 of 3 (67%)" in summary and EXTRA[0] not in summary
    assert f"| {EXTRA[0]} | 3 | 0.020 |" in table
    names = [line.split(" |")[0][2:] for line in lines(table) if line.startswith("| ")]
    assert names[2:6] == [A, B, C, EXTRA[0]]
