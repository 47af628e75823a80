# SPDX-License-Identifier: Apache-2.0
"""Logarithms of sums and integrals: einsum, the normal distribution function, hidden Markov models.

The module is a backend of ``opt_einsum``: ``einsum``, ``tensordot`` and ``transpose`` are its
interface.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.ops.einsum.util import Tensordot
from torch import Tensor

__all__ = ["einsum", "log_forward", "log_mean_exp", "log_ndtr", "tensordot", "transpose"]


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return the logarithm of ``torch.einsum`` of exponentials.

    Unlike Pyro's ``torch_log`` backend, it does not underflow for factors with different peaks, and
    runs inside ``vmap``. Its memory is the product of all dimensions. The gradient is 0 if all
    terms are 0.

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
    """Permute the dimensions of a tensor."""
    return tensor.permute(axes)


tensordot = Tensordot(einsum)


def log_ndtr(value: Tensor) -> Tensor:
    r"""Evaluate :func:`torch.special.log_ndtr`, with accurate first and second derivatives.

    .. math::

        \frac{d}{dx} \log \Phi(x) = h(x)
            = \frac{\sqrt{2 / \pi}}{\operatorname{erfcx}(-x / \sqrt 2)},
        \qquad h'(x) = -h(x) \, (x + h(x)),

    Far below zero :math:`x + h(x)` is the difference of two large numbers and is replaced by a
    series in :math:`1 / x`. Torch's own gradient, :math:`\exp(-x^2 / 2 - \log \Phi(x))`, has a
    relative error of 5 % at -1,000 in float32, and its derivative has the wrong sign.

    **Example:**

    >>> import torch
    >>> log_ndtr(torch.tensor([-1000.0, 0.0]))
    tensor([-5.0001e+05, -6.9315e-01])

    :param value: of any shape, in float32 or float64.
    """
    return _LogNdtr.apply(value)


class _Elementwise(torch.autograd.Function):
    """An elementwise function, which needs no loop inside ``vmap``."""

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
        far = -(torch.finfo(value.dtype).eps ** (-1 / 6))  # equal errors on both sides
        inverse = -1 / value.clamp(max=far)
        coefficients = (1.0, -2.0, 10.0, -74.0, 706.0)  # of x + h(x) in odd powers of -1 / x
        series = sum(c * inverse ** (2 * i + 1) for i, c in enumerate(coefficients))
        total = torch.where(value < far, series, value + hazard)
        # The limit of the product is 0 if the hazard underflows.
        return -grad * torch.where(hazard == 0, hazard, hazard * total)


def log_mean_exp(values: Tensor) -> Tensor:
    """Return the logarithm of the mean of exponentials along the first dimension."""
    return values.logsumexp(0) - math.log(len(values))


def log_forward(initial: Tensor, transition: Tensor, observed: Tensor) -> Tensor:
    r"""Log-density of a hidden Markov model with its states marginalised,

    .. math:: \log \sum_{z_0, \dots, z_T} p(z_0) \prod_t p(z_t \mid z_{t-1}) p(y_t \mid z_t),

    by products of neighbouring matrices in :math:`\log_2 T` steps.

    **Example:**

    >>> half = torch.full((2,), 0.5).log()
    >>> print(f"{log_forward(half, half.expand(2, 2), torch.zeros(3, 2)).abs():.3f}")
    0.000

    :param initial: log-probabilities of the state before the first, ``(*batch, num_states)``.
    :param transition: of the next state, ``(*batch, T or 1, num_states, num_states)``, or for all
        steps and batches ``(num_states, num_states)``.
    :param observed: log-densities of the observations in each state, ``(*batch, T, num_states)``.
    :returns: ``(*batch,)``.

    **References:**

    1. Särkkä and García-Fernández (2021), *Temporal Parallelization of Bayesian Smoothers*: the
       products in any order.
    """
    product = transition + observed.unsqueeze(-2)
    while (length := product.shape[-3]) > 1:
        even = length // 2 * 2
        merged = _log_matmul(product[..., 0:even:2, :, :], product[..., 1:even:2, :, :])
        product = torch.cat([merged, product[..., even:, :, :]], -3)
    return (initial + product.squeeze(-3).logsumexp(-1)).logsumexp(-1)


def _log_matmul(one: Tensor, other: Tensor) -> Tensor:
    """Return ``log(exp(one) @ exp(other))``; entries of -inf have no gradient."""
    least = torch.finfo(one.dtype)
    row = one.detach().amax(-1, keepdim=True).clamp(min=least.min)
    column = other.detach().amax(-2, keepdim=True).clamp(min=least.min)
    product = (one - row).exp() @ (other - column).exp()
    log = torch.where(product > 0, product.clamp(min=least.tiny).log(), -math.inf)
    return log + row + column
