# SPDX-License-Identifier: Apache-2.0
"""
The activations a generator can have, each with its derivative.

Hand-written Jacobians need the derivative, and every one of them is cheap to obtain from the
argument and the value that the forward pass has already computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation"]


class Activation(NamedTuple):
    """An elementwise function, and its derivative given the argument and the function's value."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]


def _silu_derivative(x: Tensor, value: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate + value * (1 - gate)


#: Activations by name.
ACTIVATIONS: dict[str, Activation] = {
    "tanh": Activation(torch.tanh, lambda x, value: 1 - value * value),
    "elu": Activation(torch.nn.functional.elu, lambda x, value: 1 + value.clamp(max=0)),
    "relu": Activation(torch.relu, lambda x, value: (x > 0).to(x.dtype)),
    "silu": Activation(torch.nn.functional.silu, _silu_derivative),
}
