# SPDX-License-Identifier: Apache-2.0
"""Inductor on a recorded graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx

__all__ = ["CompilerError", "compile_graph"]


class CompilerError(RuntimeError):
    """There is no compiler, or it fails."""


def compile_graph(
    graph: fx.Graph, constants: dict[str, Tensor], inputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    raise CompilerError("not yet")
