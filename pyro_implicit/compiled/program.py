# SPDX-License-Identifier: Apache-2.0
"""A recorded graph as one plain function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["as_function"]

Function = Callable[[Sequence[Tensor]], list[Tensor]]


def as_function(graph: fx.Graph, constants: dict[str, Tensor]) -> Function:
    """Straight-line Python that calls one kernel after the other and forgets each value at once.

    :param graph: of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param constants: by its ``get_attr`` nodes.
    :returns: a function of the list of inputs, which autograd does not see.
    """
    writer = _Writer(constants)
    last_use = {arg: node for node in graph.nodes for arg in node.all_input_nodes}
    for node in graph.nodes:
        writer.add(node)
        if node.op == "call_function":
            writer.forget([arg for arg in node.all_input_nodes if last_use[arg] is node])
    return writer.function()


class _Writer:
    def __init__(self, constants: dict[str, Tensor]) -> None:
        self.constants = constants
        self.names: dict[fx.Node, str] = {}
        self.inputs: list[str] = []
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}

    def add(self, node: fx.Node) -> None:
        name = self.names[node] = f"{node.op[0]}{len(self.names)}"
        if node.op == "placeholder":
            self.inputs.append(name)
        elif node.op == "get_attr":
            self.scope[name] = self.constants[node.target]  # type: ignore[index]
        elif node.op == "output":
            self.lines.append(f"return {self._show(node.args[0])}")
        elif isinstance(node.target, torch._ops.OpOverload):
            arguments = [self._show(arg) for arg in node.args]
            arguments += [f"{key}={self._show(value)}" for key, value in node.kwargs.items()]
            # The kernel itself, without the Python around it.
            self.scope[f"f{name}"] = node.target._op
            self.lines.append(f"{name} = f{name}({', '.join(arguments)})")
        else:
            values, i = (self._show(arg) for arg in node.args)
            self.lines.append(f"{name} = {values}[{i}]")

    def forget(self, nodes: list[fx.Node]) -> None:
        names = [self.names[node] for node in nodes if node.op != "get_attr"]
        if names:
            self.lines.append(" = ".join(names) + " = None")

    def function(self) -> Function:
        head = "def run(inputs):\n"
        if self.inputs:
            head += f"    {', '.join(self.inputs)}, = inputs\n"
        exec(head + "".join(f"    {line}\n" for line in self.lines), self.scope)
        run = self.scope["run"]

        def below_autograd(inputs: Sequence[Tensor]) -> list[Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                return run(inputs)

        return below_autograd

    def _show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._show, value)) + "]"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        name = f"value{len(self.scope)}"
        self.scope[name] = value
        return name
