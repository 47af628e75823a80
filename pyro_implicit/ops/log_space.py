# SPDX-License-Identifier: Apache-2.0
"""Logarithms of sums and integrals: einsum, the normal distribution function, hidden Markov models.

The module is a backend of ``opt_einsum``: ``einsum``, ``tensordot`` and ``transpose`` are its
interface.
"""

from __future__ import annotations

import math

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
    least = torch.finfo(total.dtype).min / 8  # finite, so that impossible terms have gradient 0
    log_sum = total.clamp(min=least).logsumexp(dims)
    return torch.where(log_sum < least / 2, -math.inf, log_sum)


def transpose(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Permute the dimensions of a tensor."""
    return tensor.permute(axes)


tensordot = Tensordot(einsum)


def log_ndtr(value: Tensor) -> Tensor:
    r"""Evaluate :func:`torch.special.log_ndtr`, with accurate first and second derivatives.

    Far below zero it is the asymptotic series

    .. math::

        \log \Phi(x) = -\tfrac12 x^2 - \log(-x \sqrt{2 \pi})
            + \log\Bigl(1 - \frac{1}{x^2} + \frac{1 \cdot 3}{x^4}
            - \frac{1 \cdot 3 \cdot 5}{x^6} + \dots\Bigr)

    (Abramowitz and Stegun 1964, 26.2.12). Torch's own gradient,
    :math:`\exp(-x^2 / 2 - \log \Phi(x)) / \sqrt{2 \pi}`, has a relative error of 5 % at -1,000 in
    float32, and its derivative has the wrong sign.

    **Example:**

    >>> import torch
    >>> log_ndtr(torch.tensor([-1000.0, 0.0]))
    tensor([-5.0001e+05, -6.9315e-01])

    :param value: value of any shape, in float32 or float64.
    """
    eps, tiny = torch.finfo(value.dtype).eps, torch.finfo(value.dtype).tiny
    start = max(-25.0, -(eps ** (-1 / 9)))  # the square of erfc does not underflow
    far = value.clamp(max=start)
    inverse = far.square().reciprocal()
    series = torch.ones_like(inverse)
    for odd in (11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = 1 - odd * inverse * series
    below = torch.log(series / -far) - 0.5 * (far.square() + math.log(2 * math.pi))
    near = value.clamp(min=start, max=40.0)  # where all derivatives underflow
    is_positive = near > 0
    tail = 0.5 * torch.special.erfc(torch.where(is_positive, near, -near) / math.sqrt(2))
    near = torch.where(is_positive, torch.log1p(-tail), tail.clamp(min=tiny).log())
    return torch.where(value < start, below, near)


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
