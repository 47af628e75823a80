# SPDX-License-Identifier: Apache-2.0
"""A function of tensors that was recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pyro_implicit.compiled.guard import Guard
from pyro_implicit.compiled.inductor import compile_graph
from pyro_implicit.compiled.program import as_function
from pyro_implicit.compiled.recorder import record
from pyro_implicit.compiled.simplify import simplify

__all__ = ["RandomState", "RecordedFunction", "rounding"]


def rounding(dtype: torch.dtype) -> float:
    """By how much a recording's numbers may differ from plain ones, relative to the largest.

    **Example:**

    >>> rounding(torch.float64)
    1e-08
    """
    return 1e-8 if dtype == torch.float64 else 1e-3


class RecordedFunction:
    """A function of tensors, recorded, without what Python, Pyro and autograd take beside it.

    Numbers and random draws are those of the function itself, to the last bit, until
    :meth:`compile`.

    **Example:**

    >>> x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    >>> recorded = RecordedFunction(lambda: torch.autograd.grad(x.square().sum(), x), [x])
    >>> recorded([y])
    [tensor([6., 6.])]

    :param function: without arguments; it finds ``inputs`` by itself, as these very objects.
    :param inputs: all that may differ at a call.
    :param modules: that it reads, whose parameters and buffers shall stay the same objects.
    :param writable: inputs that it may change in place.
    :raises Untraceable: naming the cause.
    """

    def __init__(
        self,
        function: Callable[[], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        modules: Iterable[nn.Module] = (),
        writable: Sequence[Tensor] = (),
    ) -> None:
        recorder = record(function, inputs, writable)
        simplify(recorder.graph, recorder.mutated)
        self.graph, self._constants = recorder.graph, recorder.constants
        self._guard = Guard(recorder.captured, modules)
        self._run = as_function(self.graph, self._constants)

    def holds(self) -> bool:
        """Whether tensors that it reads, and that are no inputs, are as they were."""
        return self._guard.holds()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the function returns for other inputs of the same shapes; autograd sees nothing."""
        return self._run(inputs)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Let inductor make few kernels of many, which takes seconds to a minute.

        :param inputs: an example.
        :raises CompilerError: where there is no compiler, or it fails.
        """
        self._run = compile_graph(self.graph, self._constants, inputs)


class RandomState:
    """The states of torch's generators, of the CPU and of the devices of some tensors.

    :param tensors: on those devices.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._cpu = torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Go back to them."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
