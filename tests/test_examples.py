# SPDX-License-Identifier: Apache-2.0
"""Every example runs to its end with tiny arguments and leaves its picture."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "eight_schools.py": "--steps 3 --particles 2 --nuts-samples 4 --nuts-warmup 4 --num-draws 20 "
    "--max-seconds 1",
    "bnn_regression.py": "--steps 3 --particles 2 --hidden 4 --ensemble 2 --nuts 2",
    "lenet_mnist.py": "--subset 20 --epochs 1 --batch-size 10 --num-samples 2 --data-dir .",
    "vae.py": "--num-train 40 --num-test 8 --num-eval 4 --hidden 8 --latent-dim 2 --epochs 2 "
    "--batch-size 20 --entropy-particles 10 --bound-particles 10 --importance-samples 50",
}


def run(script: str, arguments: list[str], out: Path) -> str:
    """Run one example as a user would and return what it printed."""
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
    }
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def write_images(folder: Path) -> None:
    """A few images of noise, in the files of MNIST."""
    folder.mkdir()
    for part in ("train", "t10k"):
        images = struct.pack(">4i", 0x803, 20, 28, 28) + os.urandom(20 * 28 * 28)
        labels = struct.pack(">2i", 0x801, 20) + bytes(range(10)) * 2
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def test_every_example_is_listed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("script", sorted(EXAMPLES))
def test_example_runs(script: str, tmp_path: Path) -> None:
    if "--data-dir" in EXAMPLES[script]:
        write_images(tmp_path / "mnist")
    printed = run(script, EXAMPLES[script].split(), tmp_path)
    assert printed.strip(), f"{script} prints no table"
    assert list(tmp_path.glob("*.png")), f"{script} leaves no picture in --out"


def test_bnn_regression_reads_a_csv(tmp_path: Path) -> None:
    rows = [f"{i % 7},{i % 3},{i % 7 + 0.1 * (i % 5)}" for i in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["first,second,target", *rows]))
    arguments = "--steps 2 --particles 2 --hidden 4 --ensemble 2".split()
    assert run("bnn_regression.py", ["--data", str(table), *arguments], tmp_path).strip()
