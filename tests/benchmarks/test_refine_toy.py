# SPDX-License-Identifier: Apache-2.0
"""The script runs with tiny arguments, repeats no run, and its table says what the maps say."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import refine_toy

NUTS = {"method": "NUTS", "grid": 3, "cpu_seconds": 399.0, "floor": 0.02, "map": [0.5] * 9}
TINY = "--seeds 1 --steps 2 --particles 2 --draws 10 --chains 8 --max-gradients 8"


def call(folder: Path, *words: str) -> list[dict]:
    nuts, out = folder / "nuts.jsonl", folder / "toy.jsonl"
    nuts.write_text(json.dumps({"method": "GPVI"}) + "\n" + json.dumps(NUTS) + "\n")
    arguments = [*TINY.split(), "--out", str(out), "--reference", str(nuts), *words]
    refine_toy.main(refine_toy.parser().parse_args(arguments))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_script(no_search, tmp_path, capsys):
    names = ["mean field", "InjectiveELBO", "ensemble of 5 mean fields"]
    records = call(tmp_path, "--guides", *names)
    assert [record["guide"] for record in records] == names
    for record in records:
        assert len(record["before"]) == len(record["after"]) == 9
        assert record["before"] != record["after"]
        assert record["space"] == ("noise" if record["guide"] == "InjectiveELBO" else "latent")
    assert (tmp_path / "toy.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "toy.png").stat().st_size < 400_000


def test_runs_are_not_repeated(tmp_path):
    key = {"guide": "mean field", "seed": 0, "grid": 3, "steps": 2, "lr": 0.01, "particles": 2}
    key |= {"draws": 10, "chains": 8, "max_gradients": 8}
    out, nuts = tmp_path / "toy.jsonl", tmp_path / "nuts.jsonl"
    out.write_text(json.dumps(key) + "\n")
    nuts.write_text(json.dumps(NUTS) + "\n")
    words = [*TINY.split(), "--out", str(out), "--reference", str(nuts), "--guides", "mean field"]
    refine_toy.run_all(refine_toy.parser().parse_args(words))
    assert len(out.read_text().splitlines()) == 1
    refine_toy.run_all(refine_toy.parser().parse_args([*words, "--lr", "0.02"]))
    assert len(out.read_text().splitlines()) == 2


def test_draws_of_the_ensemble_come_from_its_members_in_turn():
    args = refine_toy.parser().parse_args([*TINY.split(), "--draws", "500", "--lr", "0"])
    torch.manual_seed(0)
    theta = refine_toy.ensemble(args)["theta"]
    assert theta.shape == (500, 184)
    members = theta.unflatten(0, (100, 5))
    within, between = members.std(0).mean(), members.mean(0).std(0).mean()
    assert between > 3 * within  # narrow fits about five networks of the prior


def test_report_by_hand(tmp_path):
    common = {"guide": "LIVI", "steps": 3, "particles": 2, "chains": 8, "max_gradients": 9}
    common |= {"gradients": 10, "guide_seconds": 1.0, "refine_seconds": 2.0}
    runs = [
        common | {"before": [0.0, 1.0], "after": [0.5, 0.75], "stopped": "converged"},
        common | {"before": [0.5, 1.0], "after": [0.5, 0.5], "stopped": "max_gradients"},
    ]
    out = tmp_path / "toy.jsonl"
    out.write_text("".join(json.dumps(record) + "\n" for record in runs))
    rows = refine_toy.report(out, NUTS | {"map": [0.5, 0.5]}).splitlines()
    assert rows[2].startswith(
        "| LIVI | 0.375 (0.250 to 0.500) | 0.062 (0.000 to 0.125) | 10 (10 to 10) |"
    )
    assert rows[2].endswith("| 1 of 2 |")
