# SPDX-License-Identifier: Apache-2.0
"""The table against the field: its own references, and what it says of each cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.common import append_record
from benchmarks.speed import field, field_problems
from pyro_implicit.density import Target

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("name", ["regression", "gp"])
def test_gaussian_references_are_draws_of_the_models(name):
    problem = field_problems.load(name, None)
    draws = problem.reference[:4000]
    score = Target(problem.model, *problem.args).score(draws)[1]
    assert (score.mean(0) / score.std(0)).abs().max() < 0.08
    # Stein: the covariance of draws and scores is minus the identity.
    products = (draws - draws.mean(0)).mT @ score / len(draws)
    scale = draws.std(0).unsqueeze(-1) * score.std(0)
    assert ((products + torch.eye(len(products))) / scale).abs().max() < 0.09


def test_exact_draws_are_a_floor_away():
    problem = field_problems.load("funnel", None)
    v, x = problem.reference[:400].split([1, 9], -1)
    problem = replace(problem, reference=problem.reference[400:1200])
    assert field.measured({"v": v.squeeze(-1), "x": x}, problem)["floors"] < 1.5
    found = field.measured({"v": v.squeeze(-1) + 2, "x": x}, problem)["floors"]
    assert found > 3


def test_the_table_says_who_came_near_and_who_ran_out_of_time(tmp_path):
    cell = {"problem": "funnel", "seed": 0, "cpu_seconds": 2.0, "compile_seconds": 1, "seconds": 3}
    path = tmp_path / "cells.jsonl"
    append_record(path, cell | {"method": "fit", "floors": 0.9})
    append_record(path, cell | {"method": "Pyro AutoNormal", "floors": 7.0})
    late = {"problem": "gp", "seed": 0, "method": "Pyro NUTS", "error": "more than 120 CPU s"}
    append_record(path, late)
    lines = [line for line in field.report(path).splitlines() if line.startswith("| ")]
    assert "| fit | 2.0 | 1.0 | 3.0 | 0.90 | yes |" in lines
    assert "| Pyro AutoNormal | 2.0 | 1.0 | 3.0 | 7.00 | no |" in lines
    assert "| Pyro NUTS | more than 120 CPU s |  |  |  | no |" in lines
