# SPDX-License-Identifier: Apache-2.0
"""The kill test on a training of its own, and that it sees a difference of one bit."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kill_test

# A training of 100 steps; where it forgets what it had, a restart shows in the result.
TRAINING = """
import json, os, sys, time
folder, forgets = sys.argv[1], sys.argv[2] == "True"
path = folder + "/checkpoint.json"
step, x = json.load(open(path)) if os.path.exists(path) else (0, 0.5)
if forgets:
    x = 0.5
print("training", flush=True)
start = time.perf_counter()
while step < 100:
    time.sleep(0.005)
    step, x = step + 1, 3.9 * x * (1 - x)
    if step % 5 == 0:
        json.dump((step, x), open(path + ".new", "w"))
        os.replace(path + ".new", path)
json.dump((x, time.perf_counter() - start), open(folder + "/final.pt", "w"))
"""


def load(path: Path) -> dict[str, Any]:
    """What the training leaves, which saves the time of torch's import."""
    x, seconds = json.loads(path.read_text())
    return {"parameters": {"x": torch.tensor(x)}, "losses": torch.zeros(3), "seconds": seconds}


@pytest.mark.parametrize("forgets", [False, True])
def test_kill_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    def child(args: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", TRAINING, str(folder), str(forgets)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        return process

    monkeypatch.setattr(kill_test, "child", child)
    monkeypatch.setattr(torch, "load", load)
    result = kill_test.kill_and_resume(argparse.Namespace(kills=3, seed=0), tmp_path)
    assert result["kills"] == 3
    assert result["parameters_equal"] is not forgets
    assert result["losses_equal"]


def test_a_training_that_fails_is_an_error(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="ended with 3"):
        kill_test.finish(process, tmp_path)


def test_identical_is_bit_by_bit() -> None:
    a = {"x": torch.tensor([1.0, math.nan]), "deeper": {"y": torch.tensor([0.0])}}
    b = {"x": torch.tensor([1.0, math.nan]), "deeper": {"y": torch.tensor([0.0])}}
    assert kill_test.identical(a, b)
    b["deeper"]["y"] = torch.tensor([-0.0])
    assert not kill_test.identical(a, b)
    b["deeper"]["y"] = torch.tensor([0.0])
    b["x"][0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert not kill_test.identical(a, b)
    assert not kill_test.identical({"x": torch.zeros(1)}, {})
    assert not kill_test.identical(torch.zeros(1), torch.zeros(1).double())
    assert not kill_test.identical(torch.zeros(1), torch.zeros(1, 1))
