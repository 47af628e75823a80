# SPDX-License-Identifier: Apache-2.0
"""How results that hold tensors print: shapes in place of numbers, on one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["short_repr"]

MANY = 4


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a dataclass or named tuple.

    **Example:**

    >>> import torch
    >>> from pyro_implicit.guides import Frame
    >>> Frame(torch.zeros(200), scale=torch.ones(200))
    Frame(loc=(200,), scale=(200,), scale_tril=None)
    """
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self) if field.repr]
    else:
        names = list(self._fields)
    return f"{type(self).__name__}({', '.join(f'{n}={_short(getattr(self, n))}' for n in names)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return _short(value.item()) if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        found = [f"{key!r}: {_short(one)}" for key, one in list(value.items())[:MANY]]
        return f"{{{', '.join(found)}{', ...' * (len(value) > MANY)}}}"
    if isinstance(value, list) and len(value) > MANY:
        return f"[{len(value)} values]"
    return getattr(value, "__name__", None) or repr(value)
