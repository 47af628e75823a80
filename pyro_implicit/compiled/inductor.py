# SPDX-License-Identifier: Apache-2.0
"""Compile a recorded graph with inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["CompilerError", "compile_graph"]


class CompilerError(RuntimeError):
    """There is no compiler, or it fails."""


def compile_graph(
    graph: fx.Graph, constants: dict[str, Tensor], inputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Compile a graph into few kernels, whose random draws are those of torch's generator.

    Inductor keeps its kernels on disk (``TORCHINDUCTOR_CACHE_DIR``), so that another process that
    compiles the same graph finds them there.

    :param graph: the graph of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param constants: its constants, by its ``get_attr`` nodes.
    :param inputs: example inputs.
    :returns: a function of the list of inputs, without autograd.
    :raises CompilerError: if there is no compiler, or it fails.
    """
    module, held = _without_attributes(graph, constants)
    examples = [tensor.detach() for tensor in (*inputs, *held)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own internals
            compiled = _compile(module, examples)
    except Exception as error:
        raise CompilerError(first_line(error)) from error

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(compiled(*inputs, *held))

    return run


def _compile(module: fx.GraphModule, examples: list[Tensor]) -> Any:
    # Imported here, as they take seconds.
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without an environment of symbolic shapes, inductor looks for no graphs on disk.
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with tracing(TracingContext(fake)):
        return compile_fx(module, examples, config_patches={"fallback_random": True})


def _without_attributes(
    graph: fx.Graph, constants: dict[str, Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a copy of a graph that has its constants as further inputs, and these."""
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
