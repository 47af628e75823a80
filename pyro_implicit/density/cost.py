# SPDX-License-Identifier: Apache-2.0
"""What an evaluation costs, counted instead of timed: equal runs make equal plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from pyro_implicit.compiled.dispatch import DispatchMode

__all__ = [
    "MAX_DENSE_DIM",
    "PER_RUN",
    "count_operations",
    "estimated_seconds",
    "nearby",
    "seconds_near",
]

#: Latents up to which matrices over all of them are affordable: covariances, a climb's Hessians.
MAX_DENSE_DIM = 100

# Of one core of a CPU, measured on models of 4 to 100 latents, within a factor of two.
PER_RUN = 3e-3  # Pyro's handlers
PER_OPERATION = 8e-6
PER_ELEMENT = 2e-9
PER_FLOP = 1e-10
# Elements of the result for one of these count as so many, and more in large matrices.
DEAR = {"lgamma": 15, "digamma": 15, "polygamma": 30, "special_log_ndtr": 15}
DEAR_MATRICES = {
    "linalg_cholesky_ex": 4,
    "linalg_solve_triangular": 4,
    "triangular_solve": 4,
    "cholesky_inverse": 8,
    "cholesky_solve": 8,
    "linalg_lu_factor_ex": 5,
    "_linalg_slogdet": 5,
    "_linalg_det": 5,
    "_linalg_solve_ex": 15,
    "linalg_inv_ex": 15,
    "linalg_qr": 15,
    "_linalg_eigh": 50,
    "_linalg_svd": 100,
}
SPREAD = 0.1  # of nearby points, in unconstrained coordinates
LARGE = 100  # rows, from which on the cube counts


def estimated_seconds(evaluate: Callable[[], Any], times: float = 1.0, num_runs: int = 1) -> float:
    """Seconds that one core would need for an evaluation of a model, by its operations and sizes.

    It is a property of the evaluation and not of the machine's load, so that what is planned by it
    repeats to the last bit.

    **Example:**

    >>> import torch
    >>> small, large = torch.ones(10), torch.ones(1000, 1000)
    >>> estimated_seconds(lambda: small + 1) < estimated_seconds(lambda: large @ large)
    True

    :param evaluate: is called once, and may be a vectorised run with its gradients.
    :param times: of an evaluation of so many times the size, with as many operations.
    :param num_runs: of the model in it, one after the other.
    """
    with _Counter() as counter:
        evaluate()
    return (
        PER_RUN * num_runs
        + PER_OPERATION * counter.operations
        + times * (PER_ELEMENT * counter.elements + PER_FLOP * counter.flops)
    )


def seconds_near(
    evaluate: Callable[[Tensor], Any], point: Tensor, number: int, one_by_one: bool = False
) -> float:
    """What :func:`estimated_seconds` says of an evaluation at points around one.

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
    """Points ``(number, dim)`` to evaluate a model at, which differ: of one point many times, what
    a model reads of it is the same.

    **Example:**

    >>> import torch
    >>> nearby(torch.zeros(1), 3).squeeze(-1)
    tensor([-0.1000,  0.0000,  0.1000])

    :param point: ``(dim,)``.
    """
    return point + torch.linspace(-SPREAD, SPREAD, number).to(point).unsqueeze(-1)


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


class _Counter(DispatchMode):
    """Counts below autograd and vmap, where each operation is one call of a kernel."""

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
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=found)
        if not _is_view(func):
            leaves = pytree.tree_leaves(found)
            elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            self.elements += _weight(func, args) * elements
        return found


def _weight(func: Any, args: tuple) -> float:
    """What an element of an operation's result costs, in elements of a sum."""
    name = func._overloadpacket.__name__
    if name in DEAR_MATRICES:
        return DEAR_MATRICES[name] * (1 + args[0].shape[-1] / LARGE)
    return DEAR.get(name, 1)


def _is_view(func: Any) -> bool:
    alias = next((one.alias_info for one in func._schema.returns), None)
    return alias is not None and not alias.is_write
