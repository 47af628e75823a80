# SPDX-License-Identifier: Apache-2.0
"""The density of a hidden Markov model, in operations that run in any batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["log_forward"]


def log_forward(initial: Tensor, transition: Tensor, observed: Tensor) -> Tensor:
    r"""The log-density of a sequence whose states are summed out:

    .. math:: \log \sum_{z_0, \dots, z_T} p(z_0) \prod_t p(z_t \mid z_{t-1}) p(y_t \mid z_t),

    by products of neighbouring matrices, in a number of steps that is the logarithm of T.

    **Example:**

    >>> half = torch.full((2,), 0.5).log()
    >>> log_forward(half, half.expand(2, 2), torch.zeros(3, 2)).abs()
    tensor(0.)

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
    """``log(exp(one) @ exp(other))``, -inf without a gradient where nothing leads."""
    least = torch.finfo(one.dtype)
    row = one.detach().amax(-1, keepdim=True).clamp(min=least.min)
    column = other.detach().amax(-2, keepdim=True).clamp(min=least.min)
    product = (one - row).exp() @ (other - column).exp()
    log = torch.where(product > 0, product.clamp(min=least.tiny).log(), -math.inf)
    return log + row + column
