# SPDX-License-Identifier: Apache-2.0
"""Positive definite kernels on sets of samples, and their bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "Kernel",
    "imq_kernel",
    "median_bandwidth",
    "multiscale_rbf_kernel",
    "rbf_kernel",
    "squared_distances",
]

#: ``(x, y, bandwidth) -> Gram matrix``, as :func:`rbf_kernel`.
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs, without a tensor of all differences.

    **Example:**

    >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[25.,  0.]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :returns: ``(*batch, n, k)``, at least 0.
    """
    # Rounding grows with the distance to the origin, so the origin moves to the points.
    center = y.detach().mean(-2, keepdim=True)
    x, y = x - center, y - center
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    squares = squares - 2 * x @ y.mT
    # From torch 2.15 on ``clamp`` has no gradient at its bound, where second derivatives want it.
    return squares.masked_fill(squares < 0, 0.0)


def median_bandwidth(samples: Tensor) -> Tensor:
    """The median distance between two different samples, without gradient.

    Of more than 128 samples it takes every second (third, ...): sorting the distances of all would
    cost more than the kernel itself.

    **Example:**

    >>> median_bandwidth(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor(2.)

    :param samples: ``(*batch, n, m)`` with n at least 2.
    :returns: ``(*batch)``, positive.
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, section 3.1.
    """
    num_samples = samples.shape[-2]
    if num_samples < 2:
        raise ValueError(f"a median distance wants at least 2 samples, but got {num_samples}")
    with torch.no_grad():
        samples = samples[..., :: -(-num_samples // 128), :]
        size = samples.shape[-2]
        rows, columns = torch.triu_indices(size, size, offset=1, device=samples.device)
        distances = squared_distances(samples, samples)[..., rows, columns]
        tiny = torch.finfo(samples.dtype).tiny
        return distances.median(-1).values.clamp(min=tiny).sqrt()


def rbf_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    r"""The Gaussian kernel :math:`k(x, y) = \exp(-\|x - y\|^2 / 2 h^2)`.

    **Example:**

    >>> rbf_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.2231]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: h, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    return (-0.5 * squared_distances(x, y) / _square(bandwidth)).exp()


def multiscale_rbf_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    """The average of :func:`rbf_kernel` at the bandwidth, a half, a quarter and an eighth of it.

    Where modes are far apart, the median distance is that between the modes, and a kernel that wide
    sees nothing of the shape of one of them. This one does; in return it fits more of the noise.

    **Example:**

    >>> multiscale_rbf_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.0564]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: the widest, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    widest = -0.5 * squared_distances(x, y) / _square(bandwidth)
    return torch.stack([(4**k * widest).exp() for k in range(4)]).mean(0)


def imq_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    r"""The inverse multiquadric kernel :math:`k(x, y) = (1 + \|x - y\|^2 / h^2)^{-1/2}`.

    Its tails are heavy: far points still see each other.

    **Example:**

    >>> imq_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.5000]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: h, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    return (1 + squared_distances(x, y) / _square(bandwidth)).rsqrt()


def _square(bandwidth: Tensor) -> Tensor:
    tiny = torch.finfo(bandwidth.dtype).tiny
    return bandwidth.square().clamp(min=tiny)[..., None, None]
