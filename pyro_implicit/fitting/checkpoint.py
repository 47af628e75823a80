# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of trainings, and trainings in several processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.runtime.files import read_file, write_file
from pyro_implicit.runtime.global_state import random_streams, restore_random_streams
from pyro_implicit.runtime.processes import num_processes

__all__ = [
    "TrainingCheckpoint",
    "loss_of_processes",
    "loss_settings",
    "own_file",
    "same_start",
]


START, TRAINING = "the start of a fit", "a training"


def same_start(path: Path, settings: dict[str, Any]) -> None:
    """Write settings and random streams of a new run, or restore the streams of a resumed run.

    :param settings: the settings of the run.
    :raises ValueError: if a resumed run has other settings, or the file is damaged or foreign.
    """
    if not path.exists():
        write_file(path, {"settings": settings, "random": random_streams()}, START)
        return
    content = read_file(path, "cpu", START, classes=())
    old = content["settings"]
    other = [name for name in settings if settings[name] != old.get(name)]
    if other:
        there, here = (", ".join(_shown(k, one.get(k)) for k in other) for one in (old, settings))
        raise ValueError(
            f"the checkpoint in {path.parent} is of a run with {there}, but this run has {here}. "
            "Cure: another folder, or the same settings"
        )
    restore_random_streams(content["random"])


def _shown(name: str, setting: Any) -> str:
    return f"another {name}" if name in ("loss", "policy") else f"{name}={setting!r}"


def loss_settings(loss: Trace_ELBO | None) -> dict[str, Any] | None:
    """Return the class of an ELBO and the options of its constructor that are plain values.

    **Example:**

    >>> from pyro.infer import Trace_ELBO
    >>> loss_settings(Trace_ELBO(num_particles=3))["num_particles"]
    3
    """
    if loss is None:
        return None
    kinds = type(loss).__mro__
    options = {name for kind in kinds for name in inspect.signature(kind).parameters}
    options -= {"max_plate_nesting"}  # the first step sets it
    values = {name: getattr(loss, name) for name in sorted(options) if hasattr(loss, name)}
    plain = {k: v for k, v in values.items() if isinstance(v, str | bool | int | float | None)}
    return {"class": kinds[0].__name__, **plain}


@dataclass
class TrainingCheckpoint:
    """What a file of a training stores, in addition to the random streams.

    :param state: an object whose attributes are stored.
    :param parameters: unconstrained parameters, by name.
    :param optimisers: all optimisers, by name.
    :param loss: the ELBO; its state is stored if it has ``get_state``.
    :param buffers: buffers of the guide, by name, such as a frame that it computed.
    """

    state: Any
    parameters: Mapping[str, Tensor]
    optimisers: Mapping[str, torch.optim.Optimizer]
    loss: Any = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a file, which is complete or absent, whenever the process dies."""
        loss, optimisers = self.loss, self.optimisers
        content = {
            "state": vars(self.state),
            "buffers": {name: value.detach() for name, value in self.buffers.items()},
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimisers": {name: optimiser.state_dict() for name, optimiser in optimisers.items()},
            "random": random_streams(),
            "loss": loss.get_state() if hasattr(loss, "get_state") else None,
        }
        write_file(path, content, TRAINING)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Restore what :meth:`save` wrote, on the device of the parameters.

        :raises ValueError: if the file is of another model or guide, damaged or foreign.
        """
        parameters = self.parameters
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        content = read_file(path, device, TRAINING, _classes(self.loss))
        found = {name: value.shape for name, value in content["parameters"].items()}
        wanted = {name: value.shape for name, value in parameters.items()}
        if found != wanted:
            raise ValueError(
                f"the checkpoint {path} has parameters {found}, but model and guide have {wanted}. "
                "Cure: resume with the same model, guide and settings, or remove the file"
            )
        for name, value in parameters.items():
            value.copy_(content["parameters"][name])
        for name, value in self.buffers.items():
            value.copy_(content["buffers"][name])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(content["optimisers"][name])
        vars(self.state).update(content["state"])
        if content["loss"] is not None:
            self.loss.set_state(content["loss"])
        restore_random_streams(content["random"])


def _classes(loss: Any) -> set[type]:
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


def own_file(folder: str | Path, name: str) -> Path:
    """Return the checkpoint of this process; each process has its own random streams."""
    number = f"-{distributed.get_rank()}" if num_processes() > 1 else ""
    return Path(folder) / f"{name}{number}.pt"


def loss_of_processes(
    evaluate: Callable[..., Tensor],
    loss: Trace_ELBO,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Callable[..., Tensor]:
    """Return a differentiable loss whose gradient is the mean over processes; parameters and
    buffers become those of the first process.

    :raises TypeError: for ``pyro.param`` outside of modules, which ``DistributedDataParallel``
        does not know.
    :raises ValueError: for a loss that trains networks of its own.
    """
    if isinstance(loss, NetworkELBO):
        raise ValueError(
            f"{type(loss).__name__} trains networks of its own, which would differ between "
            "processes. Cure: one process, or a loss without networks, such as LIVI_ELBO"
        )
    module = _Loss(evaluate)
    for index, (name, value) in enumerate(parameters.items()):
        if not isinstance(value, nn.Parameter):
            raise TypeError(
                f"parameter '{name}' is a pyro.param outside of any module, which several "
                "processes cannot share. Cure: a PyroModule with a PyroParam in its place"
            )
        module.register_parameter(f"parameter_{index}", value)
    for index, value in enumerate(buffers.values()):
        module.register_buffer(f"buffer_{index}", value)
    return DistributedDataParallel(module)


class _Loss(nn.Module):
    def __init__(self, evaluate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.evaluate = evaluate

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.evaluate(*args, **kwargs)
