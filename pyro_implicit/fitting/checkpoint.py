# SPDX-License-Identifier: Apache-2.0
"""Files from which a killed run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.runtime.files import (
    random_streams,
    read_file,
    restore_random_streams,
    write_file,
)

__all__ = ["load_checkpoint", "same_start", "save_checkpoint"]

START, TRAINING = "the start of a fit", "a training"


def same_start(path: Path, settings: dict[str, Any]) -> None:
    """Let a resumed run begin with the random streams of the first, which are kept in a file.

    :param settings: those of the run, which must be the same.
    :raises ValueError: if they are not, or the file is damaged or foreign.
    """
    if not path.exists():
        write_file(path, {"settings": settings, "random": random_streams()}, START)
        return
    content = read_file(path, "cpu", START, classes=())
    if content["settings"] != settings:
        raise ValueError(
            f"the checkpoint in {path.parent} is of a run with {content['settings']}, but this one "
            f"has {settings}. Cure: another folder, or the same settings"
        )
    restore_random_streams(content["random"])


def save_checkpoint(
    path: Path,
    state: Any,
    parameters: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    loss: Any = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Write all that training depends on, the random streams too.

    The file is complete or not there at all, whenever the process dies.

    :param state: an object whose attributes are to be kept.
    :param parameters: unconstrained, by name.
    :param optimisers: all, by name.
    :param loss: the ELBO, whose memory is kept if it has ``get_state``.
    :param buffers: of the guide, by name: a frame that it found for itself is not trained.
    """
    content = {
        "state": vars(state),
        "buffers": dict(buffers or {}),
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "optimisers": {name: optimiser.state_dict() for name, optimiser in optimisers.items()},
        "random": random_streams(),
        "loss": loss.get_state() if hasattr(loss, "get_state") else None,
    }
    write_file(path, content, TRAINING)


@torch.no_grad()
def load_checkpoint(
    path: Path,
    state: Any,
    parameters: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    loss: Any = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Put all back in place, as :func:`save_checkpoint` found it.

    A file that was written on another device is read on that of ``parameters``.

    :raises ValueError: if the file is of another model or guide, damaged or foreign.
    """
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    content = read_file(path, device, TRAINING, _classes(loss))
    found = {name: value.shape for name, value in content["parameters"].items()}
    wanted = {name: value.shape for name, value in parameters.items()}
    if found != wanted:
        raise ValueError(
            f"the checkpoint {path} has parameters {found}, but model and guide have {wanted}. "
            "Cure: resume with the same model, guide and settings, or remove the file"
        )
    for name, value in parameters.items():
        value.copy_(content["parameters"][name])
    for name, value in (buffers or {}).items():
        value.copy_(content["buffers"][name])
    for name, optimiser in optimisers.items():
        optimiser.load_state_dict(content["optimisers"][name])
    vars(state).update(content["state"])
    if content["loss"] is not None:
        loss.set_state(content["loss"])
    restore_random_streams(content["random"])


def _classes(loss: Any) -> set[type]:
    """Those of what an ELBO remembers, which was asked once before a file is read."""
    found: set[type] = set()

    def visit(part: Any) -> None:
        if isinstance(part, Tensor):
            return
        if isinstance(part, dict):
            inside = [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            inside = list(part)
        else:
            inside = list(getattr(part, "__dict__", {}).values())
        if type(part).__module__ not in ("builtins", "torch"):
            found.add(type(part))
        for one in inside:
            visit(one)

    if hasattr(loss, "get_state"):
        visit(loss.get_state())
    return found
