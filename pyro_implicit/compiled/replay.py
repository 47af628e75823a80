# SPDX-License-Identifier: Apache-2.0
"""Recorded functions on a GPU: all their kernels in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

__all__ = ["replayed"]

Function = Callable[[Sequence[Tensor]], list[Tensor]]


def replayed(run: Function, graph: fx.Graph, inputs: Sequence[Tensor]) -> Function:
    """Capture a function as a CUDA graph, if all that it computes is on one GPU.

    A small model's step takes hundreds of kernels, each shorter than its launch; a CUDA graph has
    one launch. Random draws are those of the function: a graph's kernels read the generator's state
    anew.

    :param run: a function without autograd, whose results depend on its inputs alone.
    :param graph: the operations of the function, by device.
    :param inputs: example inputs.
    :returns: the captured function, or ``run`` itself on another device, or where a kernel cannot
        be captured.
    """
    computed = [node for node in graph.nodes if node.op != "get_attr" and "device" in node.meta]
    devices = {node.meta["device"] for node in computed}
    if len(devices) != 1 or not inputs or next(iter(devices)).type != "cuda":
        return run
    device = next(iter(devices))
    state = torch.cuda.get_rng_state(device)
    try:
        with torch.cuda.device(device), torch.no_grad():
            return _Replay(run, inputs)
    except RuntimeError:  # a kernel that waits for the GPU, as some decompositions do
        torch.cuda.synchronize(device)
        return run
    finally:
        torch.cuda.set_rng_state(state, device)


class _Replay:
    def __init__(self, run: Function, inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make handles and workspaces before the capture
            run(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = run(self._inputs)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return [output.clone() for output in self._outputs]
