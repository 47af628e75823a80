# SPDX-License-Identifier: Apache-2.0
"""Rules for integrals over a few dimensions, as nodes of a standard normal and log-weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_implicit.ops.policy import MAX_PRODUCT_DIM

__all__ = ["NormalRule", "log_integral", "normal_draws", "normal_rule"]


class NormalRule(NamedTuple):
    """Options of :func:`normal_rule`.

    **Example:**

    >>> NormalRule(size=15)
    NormalRule(size=15, scale=1.0, seed=0)
    """

    #: Nodes per dimension of a product rule; in more than three dimensions about ``size**2``
    #: nodes in all, a power of two.
    size: int

    #: Scale of the nodes: more than 1 for integrands with heavier tails than a normal density.
    scale: float = 1.0

    #: Seed of the random nodes.
    seed: int = 0


def normal_rule(dim: int, rule: NormalRule, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return nodes t and log-weights for :math:`\int f(t) dt \approx \sum_k e^{w_k} f(t_k)`.

    Up to three dimensions this is the product of Gauss-Hermite rules, exact if f is a standard
    normal density times a polynomial of degree ``2 * size - 1`` in each coordinate. In more
    dimensions the nodes are the normal quantiles of Sobol points, with the importance weights of
    the normal density.

    **Example:**

    >>> nodes, log_weights = normal_rule(1, NormalRule(5), torch.zeros((), dtype=torch.float64))
    >>> normal = torch.distributions.Normal(0.0, 1.0).log_prob(nodes.squeeze(-1))
    >>> print(f"{(log_weights.exp() * normal.exp() * nodes.squeeze(-1) ** 4).sum():.4f}")
    3.0000

    :param dim: the number of dimensions.
    :param rule: the number of nodes, their scale and their seed.
    :param like: a tensor of the dtype and device of the result.
    :returns: ``(num_nodes, dim)`` and ``(num_nodes,)``.
    """
    if dim <= MAX_PRODUCT_DIM:
        points, weights = np.polynomial.hermite_e.hermegauss(rule.size)
        line, log_line = torch.from_numpy(points), torch.from_numpy(weights).log()
        nodes = torch.cartesian_prod(*[line] * dim).reshape(-1, dim)
        log_weights = torch.cartesian_prod(*[log_line] * dim).reshape(-1, dim).sum(-1)
    else:
        number = max(2 ** round(2 * math.log2(rule.size)), 4 * 2 ** math.ceil(math.log2(2 * dim)))
        like_cpu = torch.empty((), dtype=torch.float64, device="cpu")
        nodes = normal_draws(number // 2, dim, like_cpu, rule.seed)
        # The jackknife compares two halves; each has the moments of a normal up to the third.
        random = torch.Generator().manual_seed(rule.seed)
        nodes = nodes[torch.randperm(number // 2, generator=random, device="cpu")]
        nodes = torch.cat(
            [sign * _standardised(half) for half in nodes.chunk(2) for sign in (1, -1)]
        )
        log_weights = nodes.new_full((number,), 0.5 * dim * math.log(2 * math.pi))
        log_weights = log_weights - math.log(number)
    log_weights = log_weights + 0.5 * nodes.square().sum(-1) + dim * math.log(rule.scale)
    return (rule.scale * nodes).to(like), log_weights.to(like)


def normal_draws(number: int, dim: int, like: Tensor, seed: int = 0) -> Tensor:
    """Return standard normal quantiles of scrambled Sobol points.

    **Example:**

    >>> normal_draws(1024, 2, torch.zeros(())).std(0).round(decimals=2)
    tensor([1., 1.])

    :param number: a power of two.
    :param dim: the number of dimensions.
    :param like: a tensor of the dtype and device of the result.
    :param seed: seed of the scrambling.
    :returns: ``(number, dim)``.
    """
    points = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(
        number, dtype=torch.float64
    )
    tiny = torch.finfo(torch.float64).eps
    return torch.special.ndtri(points.clamp(tiny, 1 - tiny)).to(like)


def _standardised(draws: Tensor) -> Tensor:
    """Map draws linearly such that their second moments are those of a standard normal."""
    factor = torch.linalg.cholesky(draws.mT @ draws / len(draws))
    return torch.linalg.solve_triangular(factor, draws.mT, upper=False).mT


def log_integral(log_values: Tensor, dim: int) -> Tensor:
    r"""Return the logarithm of a sum of weighted values, without the first order of its bias.

    The logarithm of a mean of K random values is too low by about their variance over 2 K. For
    the random nodes of more than three dimensions this is the jackknife of the two halves,
    :math:`2 L_K - \tfrac12 (L_{K/2} + L'_{K/2})`, which adds at most :math:`\log 2`.

    **Example:**

    >>> log_integral(torch.zeros(4, 1), 1)
    tensor([1.3863])

    :param log_values: log-weights plus log f at the nodes, ``(num_nodes, *batch)``.
    :param dim: the dimension of the integral.
    :returns: ``(*batch,)``.
    """
    whole = log_values.logsumexp(0)
    if dim <= MAX_PRODUCT_DIM:
        return whole
    one, other = (half.logsumexp(0) + math.log(2) for half in log_values.chunk(2))
    # Bounded, as the correction is infinite if one half has no weight: the result then is about
    # that of the other half.
    correction = (whole - 0.5 * (one + other)).nan_to_num(0.0).clamp(max=math.log(2))
    return whole + correction
