# SPDX-License-Identifier: Apache-2.0
"""Files from which killed chains go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pyro_implicit.runtime.files import (
    random_streams,
    read_file,
    restore_random_streams,
    write_file,
)

__all__ = ["load_chains", "save_chains"]

KIND = "chains of refine"


def save_chains(path: Path, settings: dict[str, Any], chains: Any) -> None:
    """Write chains and random streams.

    The file is complete or not there at all, whenever the process dies.

    :param settings: those of the run; a resumed run must have the same.
    :param chains: anything that pickles.
    """
    content = {"settings": settings, "chains": chains, "random": random_streams()}
    write_file(path, content, KIND)


def load_chains(path: Path, settings: dict[str, Any], device: torch.device) -> Any:
    """Chains as :func:`save_chains` found them; the random streams are put back too.

    :param device: where the chains are to be.
    :raises ValueError: if the file is of a run with other settings, damaged or foreign.
    """
    content = read_file(path, device, KIND)
    if content["settings"] != settings:
        raise ValueError(
            f"the checkpoint {path} is of a run with {content['settings']}, but this one has "
            f"{settings}. Cure: another file, or the same settings"
        )
    restore_random_streams(content["random"])
    return content["chains"]
