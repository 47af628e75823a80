# SPDX-License-Identifier: Apache-2.0
"""Whether all that a recording holds for constant is still as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["Guard"]


class Guard:
    """Remembers tensors with their versions, and the contents of modules.

    :param captured: tensors that a recording took in, with their versions.
    :param modules: whose parameters, buffers, submodules and modes are to stay the same objects.
    """

    def __init__(
        self, captured: Iterable[tuple[Tensor, int]], modules: Iterable[nn.Module]
    ) -> None:
        self._captured = list(captured)
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        for module in modules:
            for part in module.modules():
                self._modes.append((part, part.training))
                for entries in (part._parameters, part._buffers, part._modules):
                    self._entries += [(entries, name, value) for name, value in entries.items()]

    def holds(self) -> bool:
        """Whether nothing was replaced or written to."""
        return (
            all(tensor._version == version for tensor, version in self._captured)
            and all(entries.get(name) is value for entries, name, value in self._entries)
            and all(module.training == mode for module, mode in self._modes)
        )
