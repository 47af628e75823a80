# SPDX-License-Identifier: Apache-2.0
"""The likelihood of a hidden Markov chain by a product of matrices in logarithmic depth."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hmm_log_likelihood"]


def hmm_log_likelihood(transition: Tensor, emissions: Tensor) -> Tensor:
    """Sum a hidden Markov chain over all paths of its states; all initial weights are 1.

    The matrices of the steps are multiplied in pairs, then the products in pairs, and so on. Every
    product is divided by its largest entry, whose logarithm is added up: plain sums and products
    instead of the logarithms and exponentials of the textbook recursion.

    :param transition: probabilities from state (row) to state, shape ``(..., states, states)``.
    :param emissions: log densities of the observations, shape ``(..., steps, states)``.
    :returns: the log likelihood, shape ``(...,)``.
    """
    # The scales are constants for autograd: the value does not depend on them.
    scale = emissions.detach().amax(-1, keepdim=True)
    weights = torch.exp(emissions - scale)
    total = scale.sum((-2, -1))
    first, rest = weights[..., 0, :], weights[..., 1:, :]
    chain = transition.unsqueeze(-3) * rest.unsqueeze(-2)
    while chain.shape[-3] > 1:
        even = chain.shape[-3] // 2 * 2
        product = chain[..., 0:even:2, :, :] @ chain[..., 1:even:2, :, :]
        scale = product.detach().amax((-2, -1), keepdim=True)
        total = total + scale.log().sum((-3, -2, -1))
        chain = torch.cat([product / scale, chain[..., even:, :, :]], dim=-3)
    return total + torch.log((first.unsqueeze(-1) * chain.squeeze(-3)).sum((-2, -1)))
