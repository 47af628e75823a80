# SPDX-License-Identifier: Apache-2.0
"""How much of a number is rounding, as arithmetic tells that errs in the last bit at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.compiled.dispatch import DispatchMode

__all__ = ["InexactArithmetic"]

# What rounds, and neither copies nor compares.
_ROUNDING = {
    *("add", "sub", "rsub", "mul", "div", "reciprocal", "pow", "sqrt", "rsqrt", "exp", "expm1"),
    *("log", "log1p", "lgamma", "digamma", "sigmoid", "log_sigmoid_forward", "softplus", "tanh"),
    *("sum", "mean", "cumsum", "cumprod", "prod", "logsumexp", "_log_softmax", "_softmax"),
    *("mm", "bmm", "addmm", "baddbmm", "dot", "mv"),
}


class InexactArithmetic(DispatchMode):
    """Each result of a sum, a product or a function is off by one last bit, as if at random.

    Repeated runs then differ as rounding errors do: in what is lost where 1e12 + 1 is 1e12, too,
    which is the same in each exact run.

    **Example:**

    >>> large = torch.full((4,), 1e12)
    >>> (large + 1 - large).unique()
    tensor([0.])
    >>> with InexactArithmetic():
    ...     found = large + 1 - large
    >>> bool((found.abs() > 1e4).all())
    True

    **References:**

    1. Vignes (2004), *Discrete stochastic arithmetic for validating results of numerical software*.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ not in _ROUNDING:
            return found
        return pytree.tree_map_only(Tensor, self._off, found)

    def _off(self, result: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result
        # A hash in place of a generator: it leaves the random streams as they are, on any device.
        self._calls += 1
        place = torch.ones_like(result).flatten().cumsum(0)
        is_up = (12.9898 * place + 78.233 * self._calls).sin().reshape(result.shape) > 0
        eps = torch.finfo(result.dtype).eps
        return torch.where(is_up, result * (1 + eps), result * (1 - eps))
