# SPDX-License-Identifier: Apache-2.0
"""The logarithm of the normal distribution function, with derivatives that hold far out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["log_ndtr"]

SERIES = (1.0, -2.0, 10.0, -74.0, 706.0)  # of x + h(x) in odd powers of -1 / x


def log_ndtr(value: Tensor) -> Tensor:
    r"""The same as :func:`torch.special.log_ndtr`, and can be differentiated twice anywhere.

    .. math::

        \frac{d}{dx} \log \Phi(x) = h(x)
            = \frac{\sqrt{2 / \pi}}{\operatorname{erfcx}(-x / \sqrt 2)},
        \qquad h'(x) = -h(x) \, (x + h(x)),

    where far below zero :math:`x + h(x)` is the difference of two large numbers, and a series in
    :math:`1 / x` takes its place. Torch computes h by :math:`\exp(-x^2 / 2 - \log \Phi(x))`, which
    is off by a twentieth at -1,000 in float32, and of another sign in its derivative.

    **Example:**

    >>> import torch
    >>> log_ndtr(torch.tensor([-1000.0, 0.0]))
    tensor([-5.0001e+05, -6.9315e-01])

    :param value: of any shape, in float32 or float64.
    """
    return _LogNdtr.apply(value)


class _Elementwise(torch.autograd.Function):
    """Of one tensor, and so in all runs of ``vmap`` at once, where torch would loop over them."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int], value: Tensor) -> tuple[Tensor, int]:
        return cls.apply(value), in_dims[0]


class _LogNdtr(_Elementwise):
    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return torch.special.log_ndtr(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return grad * _Hazard.apply(value)


class _Hazard(_Elementwise):
    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return math.sqrt(2 / math.pi) / torch.special.erfcx(-value / math.sqrt(2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        hazard = _Hazard.apply(value)
        far = -(torch.finfo(value.dtype).eps ** (-1 / 6))  # either way loses about as little there
        inverse = -1 / value.clamp(max=far)
        series = sum(c * inverse ** (2 * i + 1) for i, c in enumerate(SERIES))
        total = torch.where(value < far, series, value + hazard)
        # Where there is no hazard left, its product with an infinite value is 0.
        return -grad * torch.where(hazard == 0, hazard, hazard * total)
