# SPDX-License-Identifier: Apache-2.0
"""Recorded functions on a GPU: all their kernels in one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx

__all__ = ["Function", "replayed"]

#: A function of a list of tensors, without autograd.
Function = Callable[[Sequence[Tensor]], list[Tensor]]

aten = torch.ops.aten
#: Prefixes of linear algebra operations. Many of them wait for the GPU inside a library, which
#: torch's check does not detect.
_LINEAR_ALGEBRA = ("linalg_", "cholesky_", "lu_", "geqrf", "orgqr", "ormqr", "triangular_solve")
#: Linear algebra operations that were captured without an error (H100, torch 2.11).
_CAPTURED = {
    aten.linalg_cholesky_ex.default,
    aten.linalg_solve_triangular.default,
    aten.linalg_vector_norm.default,
}


def replayed(run: Function, graph: fx.Graph, inputs: Sequence[Tensor]) -> Function:
    """Capture a function as a CUDA graph, if all that it computes is on one GPU.

    A small model's step takes hundreds of kernels, each shorter than its launch; a CUDA graph has
    one launch. Random draws are those of the function: a graph reads the generator's state anew.

    :param run: a function without autograd, whose results depend on its inputs alone.
    :param graph: its operations.
    :param inputs: example inputs.
    :returns: the captured function, or ``run`` itself on another device, or if a kernel cannot be
        captured.
    """
    nodes = [node for node in graph.nodes if node.op != "get_attr" and "device" in node.meta]
    devices = {node.meta["device"] for node in nodes}
    if not inputs or len(devices) != 1 or any(map(_may_wait, graph.nodes)):
        return run
    (device,) = devices
    if device.type != "cuda":
        return run
    state = torch.cuda.get_rng_state(device)
    try:
        with torch.cuda.device(device), torch.no_grad():
            return _Replay(run, inputs)
    except RuntimeError:  # of an operation that cannot be captured, or of memory
        return run
    finally:
        torch.cuda.set_rng_state(state, device)


class _Replay:
    def __init__(self, run: Function, inputs: Sequence[Tensor]) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        # In this first run, libraries create handles and workspaces, and an operation that waits
        # for the GPU raises an error. In the capture, that error would break torch's generator.
        with torch.cuda.stream(aside), _no_waiting():
            run(self._inputs)
        here.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = run(self._inputs)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return [output.clone() for output in self._outputs]


def _may_wait(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name.removeprefix("aten::").lstrip("_")
    return name.startswith(_LINEAR_ALGEBRA) and node.target not in _CAPTURED


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise an error if torch waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, and torch says so
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
