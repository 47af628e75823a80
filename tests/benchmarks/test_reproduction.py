# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest

from benchmarks import reproduction
from benchmarks.reproduction import Comparison, number


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    short = {"row": "GPVI", "epochs": 6, "accuracy": 0.5, "seconds": 360.0}
    lines = [short, short | {"accuracy": 0.7}, short | {"row": "MAP"}, short | {"error": "no"}]
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, lines)))
    measures = {"accuracy, %": (number("accuracy", 100), 1)}
    return Comparison("6/4", "GPVI", "76", ("long", "short"), {"row": "GPVI"}, measures, 100)


def test_cells_of_shortened_runs(comparison):
    expected = ["60.0 ± 14.1", "2", "6 of 100 epochs", "0.2"]
    assert comparison.cells() == ["6/4", "GPVI", "accuracy, %", "76", *expected]


def test_runs_of_full_length_come_first(comparison, tmp_path):
    record = {"row": "GPVI", "epochs": 100, "accuracy": 0.8, "cpu_seconds": 7200.0}
    (tmp_path / "long.jsonl").write_text(json.dumps(record | {"row": "MAP"}))
    assert comparison.cells()[5] == "2"
    (tmp_path / "long.jsonl").write_text(json.dumps(record))
    assert comparison.cells()[4:] == ["80.0", "1", "100 epochs", "2"]


def test_shorter_runs_are_no_seeds(comparison, tmp_path):
    record = {"row": "GPVI", "epochs": 20, "accuracy": 0.9, "seconds": 720.0}
    records = [record, record | {"epochs": 100, "accuracy": 0.8}]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert comparison.cells()[4:] == ["80.0", "1", "100 epochs", "0.2"]


def test_missing_runs(comparison, tmp_path):
    (tmp_path / "short.jsonl").unlink()
    assert comparison.cells()[4:] == ["not run", "", "", ""]


def test_fit_has_no_length(comparison, tmp_path):
    record = {"row": "GPVI", "steps": 6, "accuracy": 0.8}
    (tmp_path / "long.jsonl").write_text(json.dumps(record))
    assert comparison.cells()[6] == "6 of 100 steps"
    assert replace(comparison, method="fit").cells()[6] == "automatic"
