# SPDX-License-Identifier: Apache-2.0
"""The script runs on a tiny set with tiny budgets, repeats no run, and its table is right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import uci_refine
from benchmarks.common import run_and_report


@pytest.fixture(autouse=True)
def tiny_budgets(monkeypatch):
    monkeypatch.setitem(uci_refine.BUDGETS, "boston", (8, 8))
    for method in uci_refine.STEPS:
        monkeypatch.setitem(uci_refine.STEPS, method, 2)


def call(folder: Path, *words: str) -> list[dict]:
    out = folder / "out.jsonl"
    args = uci_refine.parser().parse_args(["--out", str(out), *words])
    run_and_report(args, uci_refine.run_all, uci_refine.report)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_script(tmp_path, capsys):
    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(30, 3)), np.stack([rng.permutation(30) for _ in range(2)])
    (tmp_path / "uci").mkdir()
    file = tmp_path / "uci" / "bostonHousing.npz"
    np.savez(file, X=x, y=x[:, 0], train_idx=rows[:, :20], test_idx=rows[:, 20:])
    words = ["--data-dir", str(tmp_path), "--sets", "boston", "--splits", "1"]
    words += ["--methods", "mean_field", "reference"]
    records = call(tmp_path, *words)
    assert [record["method"] for record in records] == ["mean_field", "reference"]
    for record in records:
        assert ("before" in record) == (record["method"] == "mean_field")
        assert all(math.isfinite(value) for value in record["after"].values())
        assert {"num_gradients", "refine_seconds", "commit"} <= record.keys()
    assert records[0]["before"] != records[0]["after"]
    assert call(tmp_path, *words) == records
    assert (tmp_path / "out.md").read_text() in capsys.readouterr().out


def test_predictions_are_those_of_the_model():
    x = torch.randn(5, 3)
    data = uci_refine.Data(
        x, torch.zeros(5), x, torch.zeros(5), torch.tensor(0.0), torch.tensor(1.0)
    )
    model = uci_refine.make_model(data, 4, None, [1.0, 0.01])
    density = uci_refine.Target(model, data.x_train, data.y_train)
    draws = uci_refine.small_draws(density, 2)
    assert (draws["precision"] == 10.0).all()
    latent = density.unconstrain(draws)
    expected = [density.trace_at(row).nodes["mean"]["value"] for row in latent]
    assert torch.allclose(uci_refine.predictions(draws, x), torch.stack(expected), atol=1e-5)


def test_report_by_hand(tmp_path):
    common = {
        "set": "boston",
        "settings": {},
        "budget": {"chains": 4, "gradients": 10},
        "num_gradients": 10,
        "refine_seconds": 3.0,
    }
    mean_field = common | {"method": "mean_field", "guide_seconds": 2.0}
    records = [
        common | {"method": "reference", "split": 1, "after": {"rmse": 2.0, "log_likelihood": -2.0}}
    ]
    for split in (0, 1):
        found = {
            "before": {"rmse": 4.0, "log_likelihood": -4.0 - split},
            "after": {"rmse": 3.0, "log_likelihood": -2.0 - split},
        }
        records.append(mean_field | {"split": split} | found)
        records.append(records[-1] | {"settings": {"gain": 3.0}})
    out = tmp_path / "out.jsonl"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = uci_refine.report(out).splitlines()
    assert rows[2].startswith(
        "| boston | mean_field | 0 1 | 4.000 +- 0.000 | 3.000 +- 0.000 | -4.500 +- 0.500 "
        "| -2.500 +- 0.500 | -1.000 | 4 x 10 | 2 + 3 |"
    )
    assert rows[3].startswith(
        "| boston | reference | 1 |  | 2.000 |  | -2.000 |  | 4 x 10 | 0 + 3 |"
    )
    # Another prior is another posterior, of which there is no reference.
    assert rows[4].startswith("| boston | mean_field, prior x 3 | 0 1 |")
    assert "| -2.500 +- 0.500 |  | 4 x 10 |" in rows[4]
