# SPDX-License-Identifier: Apache-2.0
"""Values that the processes of ``torch.distributed`` share."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

__all__ = [
    "any_process",
    "common_seed",
    "from_first",
    "is_first",
    "mean_over_processes",
    "num_processes",
]


def num_processes() -> int:
    """Return the number of processes, 1 without ``torch.distributed.init_process_group``."""
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def common_seed() -> int:
    """Draw a seed, the same in all processes."""
    seed = torch.randint(2**31, ())
    if num_processes() > 1:
        distributed.broadcast(seed, 0)
    return int(seed)


def any_process(condition: bool, device: torch.device) -> bool:
    """Return whether a condition holds in any process, so that all of them decide alike.

    :param device: a device from which the backend can send.
    """
    return mean_over_processes(float(condition), device) > 0


def is_first() -> bool:
    """Return whether this process shows progress."""
    return num_processes() == 1 or distributed.get_rank() == 0


def mean_over_processes(
    value: float, device: torch.device | str = "cpu", weight: float = 1.0
) -> float:
    """Return the weighted mean of a value over processes, so that all of them decide alike.

    :param device: a device from which the backend can send.
    :param weight: the weight of this process, for instance its number of rows.
    """
    if num_processes() == 1:
        return value
    total = torch.tensor([weight * value, weight], dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return (total[0] / total[1]).item()


def from_first(values: Tensor) -> Tensor:
    """Return the values of the first process, for all processes."""
    if num_processes() == 1:
        return values
    size = torch.tensor(values.shape, device=values.device)
    distributed.broadcast(size, 0)
    found = values.new_empty(size.tolist()) if distributed.get_rank() else values.contiguous()
    distributed.broadcast(found, 0)
    return found
