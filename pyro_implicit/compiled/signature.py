# SPDX-License-Identifier: Apache-2.0
"""Arguments of a recorded function: which of them are inputs, and when another is wanted."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.compiled.recorder import Untraceable

__all__ = ["Arguments", "Same", "flatten_arguments"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class Arguments(NamedTuple):
    """Arguments taken apart.

    ``tensors`` are the inputs, each once; ``key`` is equal for arguments that differ in the values
    of tensors alone; ``rebuild`` turns other tensors of their kind into arguments.
    """

    key: Hashable
    tensors: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]]


def flatten_arguments(args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Take arguments apart: tensors, and all else, which a recording holds for constant.

    **Example:**

    >>> x, y = torch.zeros(3), torch.ones(3)
    >>> flatten_arguments((x, 2), {}).key == flatten_arguments((y, 2), {}).key
    True
    >>> flatten_arguments((x, x), {}).key == flatten_arguments((x, y), {}).key
    False

    :raises Untraceable: for an argument that may change without anybody's knowledge, like an array.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    index: dict[int, int] = {}
    places: list[int | None] = []
    key: list[Hashable] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            place = index.setdefault(id(leaf), len(tensors))
            if place == len(tensors):
                tensors.append(leaf)
            places.append(place)
            if leaf.layout != torch.strided:
                raise Untraceable("an argument is a tensor that is not dense")
            key.append((
                place, type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device,
                leaf.requires_grad,
            ))  # fmt: skip
            continue
        places.append(None)
        if isinstance(leaf, (*_PLAIN, *_OF_TORCH)):
            key.append((type(leaf), leaf))
        elif callable(leaf):  # modules too
            key.append(Same(leaf))
        else:
            raise Untraceable(f"an argument is a {type(leaf).__name__}. Cure: pass a tensor")

    def rebuild(others: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        new = [
            leaf if place is None else others[place]
            for leaf, place in zip(leaves, places, strict=True)
        ]
        return pytree.tree_unflatten(new, spec)

    return Arguments(tuple(key), tensors, rebuild)


class Same:
    """A key that equals itself alone, and keeps its object so that no other gets its address.

    :param target: the object.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)
