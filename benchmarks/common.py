# SPDX-License-Identifier: Apache-2.0
"""What every benchmark script shares: fitting under a clock, and one line of JSON per run."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.optim import CosineAnnealingLR, PyroLRScheduler

__all__ = [
    "RESULTS",
    "add_machine_arguments",
    "append_record",
    "cosine_adam",
    "environment",
    "fit",
    "markdown_table",
    "read_records",
    "seconds",
]

RESULTS = Path(__file__).parent / "results"


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device`` and ``--threads``."""
    parser.add_argument("--device", default="cpu", help="where the tensors live, e.g. cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")


def seconds(work: Callable[[], Any], device: str = "cpu") -> float:
    """Wall time of ``work()``, the device's queue included."""
    start = time.perf_counter()
    work()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def cosine_adam(lr: float, steps: int) -> PyroLRScheduler:
    """Adam with clipped gradients whose rate falls to zero along a cosine over ``steps``."""
    return CosineAnnealingLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "T_max": steps},
        {"clip_norm": 10.0},
    )


def fit(svi: SVI, steps: int, *args: Any) -> list[float]:
    """Takes ``steps`` steps of ``svi`` and of its learning-rate schedule; returns the losses."""
    losses = []
    for _ in range(steps):
        losses.append(svi.step(*args))
        svi.optim.step()
    return losses


def environment(device: str) -> dict[str, Any]:
    """What a number depends on besides the settings: commit, versions, machine."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()

    is_cuda = torch.device(device).type == "cuda"
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("diff", "HEAD") else ""),
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
    }


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one line of JSON, so that a run that is cut short loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]) + "\n"
