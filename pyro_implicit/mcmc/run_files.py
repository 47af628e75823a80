# SPDX-License-Identifier: Apache-2.0
"""Files and random streams from which a killed run goes on to the same last bit."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["random_streams", "read_file", "restore_random_streams", "write_file"]


def write_file(path: Path, content: Any) -> None:
    """Write anything that pickles.

    The file is complete or not there at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_file(path: Path, device: torch.device | str) -> Any:
    """What :func:`write_file` wrote, on a device.

    Random states of Python and numpy are no tensors: only read files that you have written.
    """
    return torch.load(path, weights_only=False, map_location=device)


def random_streams() -> dict[str, Any]:
    """The states of all random number generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": get_rng_state(), "cuda": cuda}


def restore_random_streams(states: dict[str, Any]) -> None:
    """Put back what :func:`random_streams` gave."""
    # Wherever the file was read to: random states are tensors on the CPU.
    to_cpu = functools.partial(pytree.tree_map_only, Tensor, Tensor.cpu)
    set_rng_state(to_cpu(states["cpu"]))
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(to_cpu(states["cuda"]))
