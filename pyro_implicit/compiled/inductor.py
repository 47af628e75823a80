# SPDX-License-Identifier: Apache-2.0
"""Inductor on a recorded graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_implicit.compiled.one_library import one_library
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["CompilerError", "compile_graph"]

#: Draws come from torch's generator, the same as without compilation.
SETTINGS: dict[str, Any] = {"fallback_random": True}
#: For a single file: headers need no compilation of their own, and nothing runs side by side.
CPU_SETTINGS: dict[str, Any] = {"cpp_cache_precompile_headers": False, "compile_threads": 1}
#: What one number takes without vector instructions, in seconds: a sum or a product, a function.
PER_NUMBER, PER_FUNCTION = 1e-9, 3e-8
#: Seconds of a run from which vector instructions are worth six seconds more of compilation.
LONG_RUN = 2e-3
FUNCTIONS = set(
    "exp expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid "
    "softplus logaddexp pow erf erfc erfinv lgamma digamma softplus_backward".split()
)


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
    module, held = _without_attributes(graph, constants)
    examples = [tensor.detach() for tensor in (*inputs, *held)]
    vectorised = _scalar_seconds(graph) > LONG_RUN
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about its own affairs
            compiled = _compile(module, examples, vectorised)
    except Exception as error:
        raise CompilerError(first_line(error)) from error

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(compiled(*inputs, *held))

    return run


def _compile(module: fx.GraphModule, examples: list[Tensor], vectorised: bool) -> Any:
    # Imported here, as it takes seconds.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    settings = SETTINGS
    if all(tensor.device.type == "cpu" for tensor in examples):
        settings = SETTINGS | {k: v for k, v in CPU_SETTINGS.items() if hasattr(config, k)}
    try:
        with one_library(vectorised):
            return compile_fx(module, examples, config_patches=settings)
    except Exception:  # of another torch, maybe: inductor alone may succeed
        return compile_fx(module, examples, config_patches=SETTINGS)


def _scalar_seconds(graph: fx.Graph) -> float:
    """What its operations on single numbers take without vector instructions, roughly."""
    total = 0.0
    for node in graph.nodes:
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            is_function = node.target.overloadpacket.__name__ in FUNCTIONS
            total += (PER_FUNCTION if is_function else PER_NUMBER) * math.prod(node.meta["shape"])
    return total


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
