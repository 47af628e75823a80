# SPDX-License-Identifier: Apache-2.0
"""What an evaluation costs, counted instead of timed: equal runs make equal plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["PER_RUN", "count_operations", "estimated_seconds"]

# Of one core of a CPU, measured on models of 4 to 100 latents, within a factor of two.
PER_RUN = 3e-3  # Pyro's handlers
PER_OPERATION = 8e-6
PER_ELEMENT = 1e-9
PER_FLOP = 1e-10


def estimated_seconds(evaluate: Callable[[], Any]) -> float:
    """Seconds that one core would need for an evaluation of a model, by its operations and sizes.

    It is a property of the evaluation and not of the machine's load, so that what is planned by it
    repeats to the last bit.

    **Example:**

    >>> import torch
    >>> small, large = torch.ones(10), torch.ones(1000, 1000)
    >>> estimated_seconds(lambda: small + 1) < estimated_seconds(lambda: large @ large)
    True

    :param evaluate: is called once, and may be a vectorised run with its gradients.
    """
    with _Counter() as counter:
        evaluate()
    return (
        PER_RUN
        + PER_OPERATION * counter.operations
        + PER_ELEMENT * counter.elements
        + PER_FLOP * counter.flops
    )


def count_operations(evaluate: Callable[[], Any]) -> int:
    """The kernels that an evaluation calls, views included.

    **Example:**

    >>> import torch
    >>> x = torch.ones(2)
    >>> count_operations(lambda: (2 * x).exp())
    2

    :param evaluate: is called once.
    """
    with _Counter() as counter:
        evaluate()
    return counter.operations


class _Counter(TorchDispatchMode):
    """Counts below autograd and vmap, where each operation is one call of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler to keep it away from the counter, in seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.operations += 1
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=found)
        if not _is_view(func):
            leaves = pytree.tree_leaves(found)
            self.elements += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return found


def _is_view(func: Any) -> bool:
    alias = next((one.alias_info for one in func._schema.returns), None)
    return alias is not None and not alias.is_write
