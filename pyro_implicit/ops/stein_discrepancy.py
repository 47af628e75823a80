# SPDX-License-Identifier: Apache-2.0
"""Whether samples come from the density that has given scores: Stein's kernel and its test."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.kernels import median_bandwidth, squared_distances

__all__ = ["SteinTest", "stein_gram", "stein_test"]


class SteinTest(NamedTuple):
    r"""The outcome of :func:`stein_test`.

    ``statistic`` is the unbiased squared discrepancy, at least about 0; ``relative`` its share of
    the mean of :math:`u(x, x)`, from about 0 to 1, without units; ``p_value`` how often samples of
    the density itself would show as much.
    """

    statistic: float
    relative: float
    p_value: float


def stein_gram(samples: Tensor, scores: Tensor, bandwidth: Tensor | None = None) -> Tensor:
    r"""Stein's kernel, of mean zero in each argument under the density that has these scores.

    With :math:`k = (1 + \|\delta\|^2 / h^2)^{-1/2}` and :math:`\delta = x - y`,

    .. math::
        u(x, y) = s_x^\top s_y\, k + \frac{(s_x - s_y)^\top \delta + m}{h^2}\, k^3
        - \frac{3 \|\delta\|^2}{h^4}\, k^5.

    The inverse multiquadric has heavy tails: unlike with a Gaussian kernel, samples that spread to
    infinity do not pass for the density.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(500, 2)
    >>> stein_gram(x, -x).mean() < 0.1 * stein_gram(x, 1 - x).mean()
    tensor(True)

    :param samples: x, ``(n, m)``, best whitened.
    :param scores: s, the gradients of the log-density at the samples, ``(n, m)``.
    :param bandwidth: h, in the units of the samples; by default their median distance.
    :returns: ``(n, n)``, symmetric and positive semi-definite.
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Gorham and Mackey (2017), *Measuring Sample Quality with Kernels*, theorem 8.
    """
    if bandwidth is None:
        bandwidth = median_bandwidth(samples)
    precision = bandwidth.square().reciprocal()
    centered = samples - samples.mean(-2, keepdim=True)
    squares = squared_distances(centered, centered) * precision
    kernel = (1 + squares).rsqrt()
    cross = scores @ centered.mT
    own = cross.diagonal(dim1=-2, dim2=-1)
    slopes = own.unsqueeze(-1) + own.unsqueeze(-2) - cross - cross.mT
    curvature = precision * (slopes + samples.shape[-1]) - 3 * precision * squares * kernel.square()
    return scores @ scores.mT * kernel + curvature * kernel.pow(3)


@torch.no_grad()
def stein_test(samples: Tensor, scores: Tensor, num_bootstrap: int = 1000) -> SteinTest:
    r"""Test whether independent samples come from the density that has these scores.

    The statistic is :math:`\frac{1}{n(n-1)} \sum_{i \ne j} u(x_i, x_j)`, with u of
    :func:`stein_gram`. Under the density it has the distribution, in the limit, of the same sum
    with each term times :math:`\epsilon_i \epsilon_j`, for random signs :math:`\epsilon`.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(500, 2)
    >>> stein_test(x, -x).p_value > 0.01, stein_test(x, 0.5 - x).p_value < 0.01
    (True, True)

    :param samples: ``(n, m)``, best whitened.
    :param scores: the gradients of the log-density at the samples, ``(n, m)``.
    :param num_bootstrap: draws of the signs; no p-value is below the inverse of this number.
    :returns: statistic, relative size and p-value. Memory: n (n + num_bootstrap).
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    2. Chwialkowski, Strathmann and Gretton (2016), *A Kernel Test of Goodness of Fit* (the signs).
    """
    gram = stein_gram(samples, scores)
    size = gram.diagonal().mean()
    gram.fill_diagonal_(0.0)
    num_pairs = len(samples) * (len(samples) - 1)
    statistic = gram.sum() / num_pairs
    signs = torch.randint_like(gram[:, :1].expand(-1, num_bootstrap), 2) * 2 - 1
    null = (signs * (gram @ signs)).sum(0) / num_pairs
    p_value = (1 + (null >= statistic).sum().item()) / (1 + num_bootstrap)
    return SteinTest(statistic.item(), (statistic / size).item(), p_value)
