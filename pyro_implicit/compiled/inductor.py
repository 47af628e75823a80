# SPDX-License-Identifier: Apache-2.0
"""Inductor on a recorded graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["CompilerError", "compile_graph"]

SETTINGS: dict[str, Any] = {
    "fallback_random": True,  # draws from torch's generator, the same as without compilation
}


class CompilerError(RuntimeError):
    """There is no compiler, or it fails."""


def compile_graph(
    graph: fx.Graph, constants: dict[str, Tensor], inputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Few kernels in the place of many.

    :param graph: of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param constants: by its ``get_attr`` nodes.
    :param inputs: an example.
    :returns: a function of the list of inputs, which autograd does not see.
    :raises CompilerError: where there is no compiler, or it fails.
    """
    # Imported here, as it takes seconds.
    from torch._inductor.compile_fx import compile_fx

    module, held = _without_attributes(graph, constants)
    examples = [tensor.detach() for tensor in (*inputs, *held)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about its own affairs
            compiled: Any = compile_fx(module, examples, config_patches=SETTINGS)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise CompilerError(f"{type(error).__name__}: {text}") from error

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(compiled(*inputs, *held))

    return run


def _without_attributes(
    graph: fx.Graph, constants: dict[str, Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy whose constants are further inputs, and these."""
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    held = []
    for node in list(copy.nodes):
        if node.op == "get_attr":
            held.append(constants[str(node.target)])
            with copy.inserting_before(node):
                node.replace_all_uses_with(copy.placeholder(node.name))
            copy.erase_node(node)
    return fx.GraphModule({}, copy), held
