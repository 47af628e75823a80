# SPDX-License-Identifier: Apache-2.0
"""Inside ``vmap``, what a tensor is in all runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_runs", "in_each_run"]


def in_each_run(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Inside ``vmap``, a function of what the tensors are in all runs.

    **Example:**

    >>> def double_each(num_runs, x):
    ...     return torch.stack([2 * x_k for x_k in x])
    >>> torch.func.vmap(lambda x: in_each_run(double_each, x))(torch.arange(3))
    tensor([0, 2, 4])

    :param function: of the number of runs and the tensors, each ``(num_runs, *shape)``, to tensors
        ``(num_runs, *shape)``. If none of the tensors is batched, it gets None for the number.
    """
    return _Below.apply(function, *tensors)


class _Below(torch.autograd.Function):
    """Calls a function below the level of vmap; autograd sees what it does there."""

    @staticmethod
    def forward(function: Callable, *tensors: Tensor) -> Any:
        return function(None, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, function: Callable, *tensors: Tensor) -> tuple[Any, int]:
        size = info.batch_size
        batched = (
            tensor.expand((size,) + tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        )
        return function(size, *batched), 0


def all_runs(tensor: Tensor) -> Tensor | None:
    """The tensor in all runs, a constant ``(num_runs, *shape)``; None if it is not batched."""
    seen = []

    def look(num_runs: int | None, batched: Tensor) -> Tensor:
        seen.append(None if num_runs is None else batched)
        return batched

    in_each_run(look, tensor.detach())
    return seen[0]
