# SPDX-License-Identifier: Apache-2.0
r"""Positive definite kernels on sets of samples, and gradients in their function space.

A velocity field v in the space of a kernel k changes KL(q || p) fastest along

.. math::
    v(y_i) = \frac1n \sum_j \left[ g_j\, k(x_j, y_i) - J_j^{-\top} \nabla_{x_j} k(x_j, y_i)
    \right],

where :math:`g_j` is the gradient of :math:`-\log p` at the value made of :math:`x_j`, and
:math:`J_j` the Jacobian of that value in :math:`x_j`. In Stein variational gradient descent x are
the values themselves and J is the identity; in generative particle VI x is noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from pyro.ops.tensor_utils import matvecmul
from torch import Tensor

from pyro_implicit.ops.policy import MAX_MEDIAN_SAMPLES

__all__ = [
    "InverseTransposed",
    "Kernel",
    "RadialKernel",
    "imq_kernel",
    "kernel_and_slopes",
    "median_bandwidth",
    "multiscale_rbf_kernel",
    "particle_bandwidth",
    "rbf_kernel",
    "repulsion",
    "squared_bandwidth",
    "squared_distances",
]


#: ``(x, y, bandwidth) -> Gram matrix``, as :func:`rbf_kernel`.
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return squared Euclidean distances of all pairs, without a tensor of all differences.

    **Example:**

    >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[25.,  0.]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :returns: ``(*batch, n, k)``, at least 0.
    """
    # Centre the points: rounding errors grow with the distance to the origin.
    center = y.detach().mean(-2, keepdim=True)
    is_one = x is y
    x = x - center
    y = x if is_one else y - center
    norms = x.square().sum(-1)
    others = norms if is_one else y.square().sum(-1)
    squares = norms.unsqueeze(-1) + others.unsqueeze(-2) - 2 * (x @ y.mT)
    # Not clamp: from torch 2.15 on it has no gradient at its bound.
    return squares.masked_fill(squares < 0, 0.0)


def median_bandwidth(samples: Tensor) -> Tensor:
    """Return the median distance between two different samples.

    More than 128 samples are thinned evenly to at most 128.

    **Example:**

    >>> median_bandwidth(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor(2.)

    :param samples: ``(*batch, n, m)`` with n at least 2.
    :returns: ``(*batch)``, positive, differentiable.
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, section 3.1.
    """
    num_samples = samples.shape[-2]
    if num_samples < 2:
        raise ValueError(f"a median distance needs at least 2 samples, but got {num_samples}")
    samples = samples[..., :: -(-num_samples // MAX_MEDIAN_SAMPLES), :]
    size = samples.shape[-2]
    rows, columns = torch.triu_indices(size, size, offset=1, device=samples.device)
    distances = squared_distances(samples, samples)[..., rows, columns]
    tiny = torch.finfo(samples.dtype).tiny
    return distances.median(-1).values.clamp(min=tiny).sqrt()


def rbf_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    r"""Evaluate the Gaussian kernel :math:`k(x, y) = \exp(-\|x - y\|^2 / 2 h^2)`.

    **Example:**

    >>> rbf_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.2231]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: h, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    return (-0.5 * squared_distances(x, y) / squared_bandwidth(bandwidth)).exp()


def multiscale_rbf_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    """Average :func:`rbf_kernel` at the bandwidth, a half, a quarter and an eighth of it.

    If modes are far apart, the median distance is the distance between modes, and a kernel of this
    width cannot resolve the shape of a single mode. This kernel can, but it fits more of the noise.

    **Example:**

    >>> multiscale_rbf_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.0564]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: the widest, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    widest = -0.5 * squared_distances(x, y) / squared_bandwidth(bandwidth)
    return torch.stack([(4**k * widest).exp() for k in range(4)]).mean(0)


def imq_kernel(x: Tensor, y: Tensor, bandwidth: Tensor) -> Tensor:
    r"""Evaluate the inverse multiquadric kernel
    :math:`k(x, y) = (1 + \|x - y\|^2 / h^2)^{-1/2}`, which has heavy tails.

    **Example:**

    >>> imq_kernel(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1.0))
    tensor([[0.5000]])

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: h, ``(*batch)``, in the units of the points.
    :returns: ``(*batch, n, k)``.
    """
    return (1 + squared_distances(x, y) / squared_bandwidth(bandwidth)).rsqrt()


def squared_bandwidth(bandwidth: Tensor) -> Tensor:
    """Return the positive squares of bandwidths ``(*batch)``, as ``(*batch, 1, 1)``."""
    tiny = torch.finfo(bandwidth.dtype).tiny
    return bandwidth.square().clamp(min=tiny)[..., None, None]


RadialKernel = Literal["rbf", "imq"]


class InverseTransposed(NamedTuple):
    r"""Matrices :math:`J_j^{-\top}` of m rows, whose last m - r rows are a common diagonal.

    The product with a vector y is ``rows @ compress(y)`` above ``diagonal * y[r:]``. A dense matrix
    has r = m and an empty diagonal.

    ``rows`` are ``(*batch, n, r, s)``, ``diagonal`` is ``(m - r,)``. ``compress``, a linear map
    common to all matrices, turns ``(*batch, k, m)`` into ``(*batch, k, s)`` and keeps the first r
    numbers; None is the identity.
    """

    rows: Tensor
    diagonal: Tensor
    compress: Callable[[Tensor], Tensor] | None = None

    def slogdet(self) -> tuple[Tensor, Tensor]:
        r"""The sign of :math:`\det J_j^{-\top}` and :math:`\log |\det J_j^{-\top}|`,
        ``(*batch, n)`` each."""
        sign, log_abs_det = torch.linalg.slogdet(self.rows[..., : self.rows.shape[-2]])
        log_abs_det = log_abs_det + self.diagonal.abs().log().sum()
        return sign * self.diagonal.sign().prod(), log_abs_det


def particle_bandwidth(samples: Tensor) -> Tensor:
    r"""Return the bandwidth :math:`\mathrm{med} / \sqrt{2 \log n}` for the median distance med.

    The kernel values between one sample and all others then sum to about 1.

    **Example:**

    >>> particle_bandwidth(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor(1.3493)

    :param samples: ``(*batch, n, m)`` with n at least 2.
    :returns: ``(*batch)``, differentiable, as :func:`~pyro_implicit.ops.rbf_kernel` takes it.
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Liu and Wang (2016), *Stein Variational Gradient Descent*, section 5. There the kernel is
       :math:`\exp(-\|x - y\|^2 / h')` with :math:`h' = 2 h^2`.
    """
    return median_bandwidth(samples) / math.sqrt(2 * math.log(samples.shape[-2]))


@torch.no_grad()
def kernel_and_slopes(
    x: Tensor, y: Tensor, bandwidth: Tensor, kernel: RadialKernel = "rbf"
) -> tuple[Tensor, Tensor]:
    r"""Evaluate a kernel k between two sets of points, and the factor c of its gradient
    :math:`\nabla_x k(x, y) = -c\, (x - y)`, by one matrix product.

    **Example:**

    >>> gram, slopes = kernel_and_slopes(torch.randn(4, 2), torch.randn(3, 2), torch.tensor(1.0))
    >>> gram.shape, slopes.shape
    (torch.Size([4, 3]), torch.Size([4, 3]))

    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param bandwidth: ``(*batch)``, in the units of the points.
    :param kernel: ``"rbf"`` or ``"imq"``, see :func:`~pyro_implicit.ops.rbf_kernel` and
        :func:`~pyro_implicit.ops.imq_kernel`.
    :returns: k and c, each ``(*batch, n, k)``, without gradient.
    """
    gram = (rbf_kernel if kernel == "rbf" else imq_kernel)(x, y, bandwidth)
    return gram, (gram if kernel == "rbf" else gram**3) / squared_bandwidth(bandwidth)


@torch.no_grad()
def repulsion(
    slopes: Tensor, x: Tensor, y: Tensor, inverse_transposed: InverseTransposed | None = None
) -> Tensor:
    r"""Return the sums :math:`\sum_j J_j^{-\top} \nabla_{x_j} k(x_j, y_i)`, for each i.

    As :math:`\nabla_{x_j} k = -c_{ji} (x_j - y_i)`, the sums are

    .. math::
        \Big(\sum_j c_{ji} J_j^{-\top}\Big)\, y_i - \sum_j c_{ji}\, J_j^{-\top} x_j,

    which need no vector for each pair.

    **Example:**

    >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    >>> repulsion(torch.ones(1, 1), x, y)  # the gradient in x points from x to y
    tensor([[3., 4.]])

    :param slopes: c, ``(*batch, n, k)``, see :func:`kernel_and_slopes`.
    :param x: ``(*batch, n, m)``.
    :param y: ``(*batch, k, m)``.
    :param inverse_transposed: :math:`J_j^{-\top}` for each j; None is the identity.
    :returns: ``(*batch, k, m)``, without gradient.
    """
    # Only differences matter: centre the points to reduce rounding errors.
    center = y.mean(-2, keepdim=True)
    points = torch.cat([x - center, y - center], -2)
    sizes = [x.shape[-2], y.shape[-2]]
    if inverse_transposed is None:
        return _differences(slopes, *points.split(sizes, -2))
    rows, diagonal, compress = inverse_transposed
    # Compress all points at once, as the compression may be a large matrix.
    x, y = (points if compress is None else compress(points)).split(sizes, -2)
    summed = (slopes.mT @ rows.flatten(-2)).unflatten(-1, rows.shape[-2:])
    upper = matvecmul(summed, y) - slopes.mT @ matvecmul(rows, x)
    lower = _differences(slopes, *points[..., rows.shape[-2] :].split(sizes, -2))
    return torch.cat([upper, diagonal * lower], -1)


def _differences(slopes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return slopes.sum(-2).unsqueeze(-1) * y - slopes.mT @ x
