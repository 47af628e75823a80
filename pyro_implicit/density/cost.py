# SPDX-License-Identifier: Apache-2.0
"""Cost of an evaluation, counted instead of timed, so that equal runs make equal plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from pyro_implicit.compiled.recorder import DispatchMode
from pyro_implicit.density.policy import COST

__all__ = ["count_operations", "estimated_seconds", "nearby", "seconds_near"]


def estimated_seconds(evaluate: Callable[[], Any], times: float = 1.0, num_runs: int = 1) -> float:
    """Return the seconds that one core needs for an evaluation, by its operations and their sizes.

    The estimate does not depend on the machine or its load, so that plans are reproducible.

    **Example:**

    >>> import torch
    >>> small, large = torch.ones(10), torch.ones(1000, 1000)
    >>> estimated_seconds(lambda: small + 1) < estimated_seconds(lambda: large @ large)
    True

    :param evaluate: is called once; it may be a vectorised run with its gradients.
    :param times: scales the sizes; the number of operations stays.
    :param num_runs: runs of the model in it, one after the other.
    """
    with _Counter() as counter:
        evaluate()
    return (
        COST.per_run * num_runs
        + COST.per_operation * counter.operations
        + times * (COST.per_element * counter.elements + COST.per_flop * counter.flops)
    )


def seconds_near(
    evaluate: Callable[[Tensor], Any], point: Tensor, number: int, one_by_one: bool = False
) -> float:
    """Return :func:`estimated_seconds` of an evaluation at several points around one.

    **Example:**

    >>> import torch
    >>> one, many = (seconds_near(torch.exp, torch.zeros(3), number) for number in (1, 100))
    >>> one < many
    True

    :param evaluate: of points ``(number, dim)``.
    :param point: ``(dim,)``.
    :param one_by_one: whether the model runs once for each point.
    """
    points = nearby(point, number)
    return estimated_seconds(lambda: evaluate(points), num_runs=number if one_by_one else 1)


def nearby(point: Tensor, number: int) -> Tensor:
    """Return distinct points ``(number, dim)`` around one: copies would agree on every branch.

    **Example:**

    >>> import torch
    >>> nearby(torch.zeros(1), 3).squeeze(-1)
    tensor([-0.1000,  0.0000,  0.1000])

    :param point: ``(dim,)``.
    """
    return point + torch.linspace(-COST.spread, COST.spread, number).to(point).unsqueeze(-1)


def count_operations(evaluate: Callable[[], Any]) -> int:
    """Return the number of kernels that an evaluation calls, views included.

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


class _Counter(DispatchMode):
    """Counts below autograd and ``vmap``, where each operation is one call of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.elements = self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.operations += 1
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=found)
        if not func.is_view:
            leaves = pytree.tree_leaves(found)
            elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            self.elements += _weight(packet.__name__, args) * elements
        return found


def _weight(name: str, args: tuple) -> float:
    """Return the cost of an element of a result, in elements of a sum."""
    if name in COST.factorisations:
        return COST.factorisations[name] * (1 + args[0].shape[-1] / COST.large_matrix)
    return COST.functions.get(name, 1)
