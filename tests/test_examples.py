# SPDX-License-Identifier: Apache-2.0
"""Every example runs to its end with tiny arguments and leaves its picture."""

from __future__ import annotations

import gzip
import os
import runpy
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyro
import pytest

from pyro_implicit.diagnostics import distances
from pyro_implicit.guides import auto_implicit

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "eight_schools.py": "--steps 3 --particles 2 --nuts-samples 4 --nuts-warmup 4 --num-draws 20 "
    "--max-seconds 1",
    "bnn_regression.py": "--steps 3 --particles 2 --hidden 4 --ensemble 2 --nuts 2",
    "lenet_mnist.py": "--subset 20 --epochs 1 --batch-size 10 --num-samples 2 --data-dir .",
    "vae.py": "--num-train 40 --num-test 8 --num-eval 4 --hidden 8 --latent-dim 2 --epochs 1 "
    "--batch-size 20 --entropy-particles 10 --bound-particles 10 --importance-samples 10",
}


# What they warn of with so few steps is for their reader.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run one example as its command does, in this process, and return what it printed."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        # A search and intervals take most of the time of such short runs.
        monkeypatch.setattr(auto_implicit, "find_frame", lambda *args: None)
        few = replace(distances.DISTANCES, num_bootstrap=10)
        monkeypatch.setattr(distances, "DISTANCES", few)
        path = str(ROOT / "examples" / script)
        monkeypatch.setattr(sys, "argv", [path, *arguments, "--out", str(tmp_path)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def write_images(folder: Path) -> None:
    """A few images of noise, in the files of MNIST."""
    folder.mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">4i", 0x803, 20, 28, 28) + os.urandom(20 * 28 * 28)
        labels = struct.pack(">2i", 0x801, 20) + bytes(range(10)) * 2
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def test_every_example_is_listed() -> None:
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert found == {*EXAMPLES, "lightning_network.py"}


@pytest.mark.parametrize("script", sorted(EXAMPLES))
def test_example_runs(script: str, run: Callable[..., str], tmp_path: Path) -> None:
    if "--data-dir" in EXAMPLES[script]:
        write_images(tmp_path / "mnist")
    printed = run(script, *EXAMPLES[script].split())
    assert printed.strip(), f"{script} prints no table"
    assert list(tmp_path.glob("*.png")), f"{script} leaves no picture in --out"


def test_lightning_network(run: Callable[..., str]) -> None:
    pytest.importorskip("lightning")
    with pyro.settings.context(module_local_params=True):  # which the script sets
        assert "accuracy" in run("lightning_network.py", "--epochs", "1")


def test_bnn_regression_reads_a_csv(run: Callable[..., str], tmp_path: Path) -> None:
    rows = [f"{i % 7},{i % 3},{i % 7 + 0.1 * (i % 5)}" for i in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["first,second,target", *rows]))
    arguments = "--steps 2 --particles 2 --hidden 4 --ensemble 2".split()
    assert run("bnn_regression.py", "--data", str(table), *arguments).strip()
