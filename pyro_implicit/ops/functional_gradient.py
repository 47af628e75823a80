# SPDX-License-Identifier: Apache-2.0
r"""Gradients in a function space: kernels share what particles feel, and push particles apart.

A velocity field v in the space of a kernel k changes KL(q || p) fastest along

.. math::
    v(y_i) = \frac1n \sum_j \left[ g_j\, k(x_j, y_i) - J_j^{-\top} \nabla_{x_j} k(x_j, y_i)
    \right],

with :math:`g_j` the gradient of :math:`-\log p` at the value made of :math:`x_j`, and
:math:`J_j` the Jacobian of that value in :math:`x_j`. In Stein variational gradient descent x are
the values themselves and J is the identity; in generative particle VI they are noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.factors import matvec
from pyro_implicit.ops.kernels import imq_kernel, median_bandwidth, rbf_kernel

__all__ = [
    "InverseTransposed",
    "RadialKernel",
    "kernel_and_slopes",
    "particle_bandwidth",
    "repulsion",
]

RadialKernel = Literal["rbf", "imq"]


class InverseTransposed(NamedTuple):
    r"""Matrices :math:`J_j^{-\top}` of m rows, of which only the first r differ from each other.

    The product with a vector y is ``rows @ compress(y)`` above ``diagonal * y[r:]``. A dense matrix
    has r = m, no diagonal and nothing to compress.

    ``rows`` are ``(*batch, n, r, s)``, ``diagonal`` is ``(m - r,)``, and ``compress``, linear and
    the same for all matrices, turns ``(*batch, k, m)`` into ``(*batch, k, s)``, keeping the first r
    numbers; None stands for the identity.
    """

    rows: Tensor
    diagonal: Tensor
    compress: Callable[[Tensor], Tensor] | None = None

    def log_abs_det(self) -> Tensor:
        r""":math:`\log |\det J_j^{-\top}|`, ``(*batch, n)``."""
        corner = self.rows[..., : self.rows.shape[-2]]
        return torch.linalg.slogdet(corner).logabsdet + self.diagonal.abs().log().sum()


def particle_bandwidth(samples: Tensor) -> Tensor:
    r"""The bandwidth :math:`h = \mathrm{med} / \sqrt{2 \log n}` with which the kernel values of one
    sample sum to about 1, itself not counted; med is the median distance of two samples.

    **Example:**

    >>> particle_bandwidth(torch.tensor([[0.0], [1.0], [3.0]]))
    tensor(1.3493)

    :param samples: ``(*batch, n, m)`` with n at least 2.
    :returns: ``(*batch)``, without gradient, as :func:`~pyro_implicit.ops.rbf_kernel` takes it.
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
    r"""A kernel between two sets of points, and its gradient :math:`\nabla_x k(x, y) = -c\, (x -
    y)` as the numbers c, at no more than a matrix product.

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
    variance = bandwidth.square().clamp(min=torch.finfo(gram.dtype).tiny)[..., None, None]
    return gram, (gram if kernel == "rbf" else gram**3) / variance


@torch.no_grad()
def repulsion(
    slopes: Tensor, x: Tensor, y: Tensor, inverse_transposed: InverseTransposed | None = None
) -> Tensor:
    r"""The sums :math:`\sum_j J_j^{-\top} \nabla_{x_j} k(x_j, y_i)`, for each i.

    As :math:`\nabla_{x_j} k = -c_{ji} (x_j - y_i)` they are

    .. math::
        \Big(\sum_j c_{ji} J_j^{-\top}\Big)\, y_i - \sum_j c_{ji}\, J_j^{-\top} x_j,

    so that no pair needs a vector of its own: nothing is larger than all x and y together and the
    matrices' own rows.

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
    # Differences alone matter: rounding grows with the distance to the origin.
    center = y.mean(-2, keepdim=True)
    points = torch.cat([x - center, y - center], -2)
    sizes = [x.shape[-2], y.shape[-2]]
    if inverse_transposed is None:
        return _differences(slopes, *points.split(sizes, -2))
    rows, diagonal, compress = inverse_transposed
    # All points at once, as the compression may be a large matrix.
    x, y = (points if compress is None else compress(points)).split(sizes, -2)
    summed = (slopes.mT @ rows.flatten(-2)).unflatten(-1, rows.shape[-2:])
    upper = matvec(summed, y) - slopes.mT @ matvec(rows, x)
    lower = _differences(slopes, *points[..., rows.shape[-2] :].split(sizes, -2))
    return torch.cat([upper, diagonal * lower], -1)


def _differences(slopes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The sums over j of c_ji (y_i - x_j)."""
    return slopes.sum(-2).unsqueeze(-1) * y - slopes.mT @ x
