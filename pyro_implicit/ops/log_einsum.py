# SPDX-License-Identifier: Apache-2.0
"""Sums of products of exponentials, in logarithms: a backend for ``opt_einsum``."""

from __future__ import annotations

import math

import torch
from pyro.ops.einsum.util import Tensordot
from torch import Tensor

__all__ = ["einsum", "tensordot", "transpose"]


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """The logarithm of ``torch.einsum`` of exponentials.

    Where Pyro's ``torch_log`` underflows, as factors that peak at different places do, this one
    does not, and it can run inside ``vmap``; its memory is that of the product of all dimensions.
    The gradient is 0 where all terms are.

    **Example:**

    >>> a, b = torch.tensor([[0.0, -900.0]]), torch.tensor([-900.0, 0.0])
    >>> einsum("ij,j->i", a, b).round()
    tensor([-899.])

    :param equation: with an arrow.
    :param operands: logarithms.
    """
    inputs, output = equation.split("->")
    summed = sorted(set(inputs) - set(output) - {","})
    order = {symbol: place for place, symbol in enumerate([*output, *summed])}
    total = torch.zeros((), dtype=operands[0].dtype, device=operands[0].device)
    for symbols, operand in zip(inputs.split(","), operands, strict=True):
        places = sorted(order[symbol] for symbol in symbols)
        axes = [symbols.index(symbol) for symbol in sorted(symbols, key=order.__getitem__)]
        permuted = operand.permute(axes)
        sizes = dict(zip(places, permuted.shape, strict=True))
        total = total + permuted.reshape([sizes.get(place, 1) for place in range(len(order))])
    if not summed:
        return total
    dims = tuple(range(len(output), len(order)))
    shift = total.detach().amax(dims, keepdim=True).clamp(min=torch.finfo(total.dtype).min)
    sum_ = (total - shift).exp().sum(dims)
    log_sum = torch.where(sum_ > 0, sum_, 1.0).log()
    return torch.where(sum_ > 0, log_sum, -math.inf) + shift.reshape(sum_.shape)


def transpose(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions in another order."""
    return tensor.permute(axes)


tensordot = Tensordot(einsum)
