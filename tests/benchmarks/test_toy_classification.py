# SPDX-License-Identifier: Apache-2.0
"""The toy's network, density and map are what they say, and the script runs with tiny arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pyro import poutine
from torch import nn

from benchmarks import toy_classification


def test_data():
    x, y = toy_classification.make_data(4000, seed=3)
    for label, center in enumerate([(-2, -2), (-2, 2), (2, -2), (2, 2)]):
        blob = x[y == label]
        assert len(blob) == 1000
        torch.testing.assert_close(blob.mean(0), torch.tensor(center).float(), atol=0.05, rtol=0)
        torch.testing.assert_close(blob.std(0), torch.tensor([0.3, 0.3]), atol=0.03, rtol=0)


def test_logits_are_those_of_a_network():
    torch.manual_seed(0)
    nets = [
        nn.Sequential(
            nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 4)
        ).double()
        for _ in range(2)
    ]
    theta = torch.stack([nn.utils.parameters_to_vector(net.parameters()) for net in nets])
    x = torch.randn(7, 2, dtype=torch.float64)
    expected = torch.stack([net(x) for net in nets])
    torch.testing.assert_close(toy_classification.logits(theta, x), expected)
    assert theta.shape[-1] == toy_classification.NUM_WEIGHTS


def test_potential_is_that_of_the_model():
    torch.manual_seed(0)
    data = toy_classification.make_data(20, seed=0)
    theta = torch.randn(2, toy_classification.NUM_WEIGHTS)
    energy = toy_classification.potential(theta, data)
    joint = []
    for weights in theta:
        model = poutine.condition(toy_classification.model, {"theta": weights})
        joint.append(poutine.trace(model).get_trace(*data).log_prob_sum())
    # The same up to a constant.
    torch.testing.assert_close(energy[0] - energy[1], joint[1] - joint[0], rtol=1e-4, atol=1e-3)


def test_the_map_of_two_opposite_networks():
    theta = torch.zeros(4, toy_classification.NUM_WEIGHTS)
    theta[:2, -4] = theta[2:, -3] = 30.0  # biases: half of them say class 0, the others class 1
    values = toy_classification.uncertainty(theta, toy_classification.make_grid(3))
    torch.testing.assert_close(values, torch.ones(9))  # an sd of 1/2 for each of two classes


def test_scores_by_hand():
    theta = torch.zeros(2, toy_classification.NUM_WEIGHTS)
    theta[0, -4] = 30.0  # class 0, the other one: all classes alike
    x, y = torch.zeros(2, 2), torch.tensor([0, 1])
    scores = toy_classification.scores(theta, (x, y))
    assert scores["accuracy"] == 0.5
    expected = (torch.tensor(0.625).log() + torch.tensor(0.125).log()) / 2
    assert scores["log_likelihood"] == pytest.approx(expected.item(), rel=1e-5)


# With fewer steps of warmup NUTS stays where it starts, and its chains do not differ.
TINY = "--steps 2 --particles 4 --draws 5 --nuts-draws 3 --nuts-warmup 10 --nuts-tree-depth 2"


def call(out: Path, *words: str) -> list[dict]:
    arguments = [*TINY.split(), "--grid", "5", "--out", str(out), *words]
    toy_classification.main(toy_classification.parser().parse_args(arguments))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_script(no_search, tmp_path, capsys):
    out = tmp_path / "toy.jsonl"
    records = call(out)
    assert [record["method"] for record in records] == list(toy_classification.METHODS)
    for record in records:
        assert "error" not in record
        assert len(record["map"]) == 25
        assert 0 <= record["accuracy"] <= 1
    assert records[0]["floor"] > 0
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size < 400_000


def test_runs_are_not_repeated_and_seeds_share_the_reference(tmp_path):
    out = tmp_path / "toy.jsonl"
    words = ["--methods", "NUTS", "deep ensemble"]
    assert len(call(out, *words)) == 2
    assert len(call(out, *words)) == 2
    records = call(out, *words, "--seeds", "2")
    assert [(record["method"], record["seed"]) for record in records] == [
        ("NUTS", 0),
        ("deep ensemble", 0),
        ("deep ensemble", 1),
    ]
    assert len(call(out, *words, "--lr", "0.1")) == 4


def test_report(tmp_path):
    out = tmp_path / "toy.jsonl"
    common = {"seed": 0, "accuracy": 1.0, "log_likelihood": -0.5, "cpu_seconds": 3.0}
    records = [
        {"method": "GPVI", "map": [0.0, 0.5]} | common,
        {"method": "NUTS", "map": [1.0, 0.0], "floor": 0.25} | common,
        {"method": "GPVI", "map": [1.0, 0.5]} | common,
        {"method": "KIVI", "error": "ValueError: lost"},
    ]
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = toy_classification.report(out).splitlines()[2:]
    assert rows[0].startswith("| NUTS, two chains | 0.250 | 0.50 |")
    assert rows[1].startswith("| GPVI | 0.500 (0.250 to 0.750) | 0.50 (0.25 to 0.75) |")
    assert rows[2].startswith("| KIVI | failed |")
    assert rows[2].endswith("| 0 of 1 |")
