# SPDX-License-Identifier: Apache-2.0
"""Trainings of several processes, each with its part of every minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_implicit.infer.networks import NetworkELBO

__all__ = [
    "is_first",
    "loss_function",
    "mean_over_processes",
    "num_processes",
    "own_file",
    "refuse_processes",
]


def num_processes() -> int:
    """After ``torch.distributed.init_process_group``; 1 without."""
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def is_first() -> bool:
    """Whether this process is the one that speaks for all."""
    return num_processes() == 1 or distributed.get_rank() == 0


def own_file(folder: str | Path, name: str) -> Path:
    """Where this process keeps what it goes on from: each has random streams of its own."""
    number = f"-{distributed.get_rank()}" if num_processes() > 1 else ""
    return Path(folder) / f"{name}{number}.pt"


def mean_over_processes(value: float, device: torch.device | str = "cpu") -> float:
    """By which all of them decide alike; the value itself in a process that is alone.

    :param device: one that the processes' backend can send from.
    """
    if num_processes() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return total.item() / num_processes()


def refuse_processes(batch: tuple, refine: bool) -> None:
    """What several processes do not do better than one.

    :param batch: the first minibatch.
    :param refine: whether chains follow.
    :raises ValueError: if the minibatch is the same in all of them, or for chains.
    """
    if num_processes() == 1:
        return
    if refine:
        raise ValueError(
            "chains see the minibatches of one process alone. Cure: fit with refine=False, then "
            "in one process refine(model, result.guide, kernel='sghmc', batches=all_rows)"
        )
    tensors = [part.double() for part in batch if isinstance(part, Tensor)]
    own = [(tuple(part.shape), part.sum().item(), part.square().sum().item()) for part in tensors]
    found: list[Any] = [None] * num_processes()
    distributed.all_gather_object(found, own)
    if own and all(one == own for one in found):
        raise ValueError(
            f"all {len(found)} processes have the same minibatches. Cure: a DataLoader with "
            "sampler=torch.utils.data.DistributedSampler(dataset), and a batch_size for each"
        )


def loss_function(
    loss: Trace_ELBO,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Callable[..., Tensor]:
    """The differentiable loss of model and guide. Its gradient is the mean over processes, of which
    each now has the first one's parameters and buffers.

    :raises TypeError: in several processes, for ``pyro.param`` outside of modules, which
        ``DistributedDataParallel`` does not know.
    :raises ValueError: in several processes, for a loss that trains networks of its own.
    """

    def evaluate(*args: Any, **kwargs: Any) -> Tensor:
        return loss.differentiable_loss(model, guide, *args, **kwargs)

    if num_processes() == 1:
        return evaluate
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
