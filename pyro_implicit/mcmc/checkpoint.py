# SPDX-License-Identifier: Apache-2.0
"""Files from which killed chains go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pyro.util import get_rng_state, set_rng_state

__all__ = ["load_chains", "save_chains"]


def save_chains(path: Path, settings: dict[str, Any], chains: Any) -> None:
    """Write chains and random streams. The file is complete or not there at all, whenever the
    process dies.

    :param settings: those of the run; a resumed run must have the same.
    :param chains: anything that pickles.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    content = {"settings": settings, "chains": chains, "cpu": get_rng_state(), "cuda": cuda}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_chains(path: Path, settings: dict[str, Any]) -> Any:
    """Chains as :func:`save_chains` found them; the random streams are put back too.

    Random states of Python and numpy are no tensors: only load files that you have written.

    :raises ValueError: if the file is of a run with other settings.
    """
    content = torch.load(path, weights_only=False)
    if content["settings"] != settings:
        raise ValueError(
            f"the checkpoint {path} is of a run with {content['settings']}, but this one has "
            f"{settings}. Cure: another file, or the same settings"
        )
    set_rng_state(content["cpu"])
    if content["cuda"]:
        torch.cuda.set_rng_state_all(content["cuda"])
    return content["chains"]
