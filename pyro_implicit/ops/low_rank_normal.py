# SPDX-License-Identifier: Apache-2.0
r"""Normal vectors whose precision is the identity plus a matrix of known eigenvectors.

With orthonormal columns V and gains g, the precision is :math:`A = I + V \mathrm{diag}(g) V^\top`.
If only the gains change from point to point, no matrix is factored: a point costs two products with
V. The symmetric root of A leaves directions without gain as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LinearTerm", "eigenbasis", "from_symmetric_root", "to_symmetric_root"]


class LinearTerm(NamedTuple):
    """A vector t as ``V inner + outer``, with ``outer`` orthogonal to V."""

    inner: Tensor
    outer: Tensor


def from_symmetric_root(
    standard: Tensor, vectors: Tensor, gains: Tensor, told: LinearTerm
) -> tuple[Tensor, Tensor]:
    r"""Transform standard normals x to draws of :math:`N(A^{-1} t, A^{-1})`.

    .. math:: z = A^{-1/2} x + A^{-1} t

    **Example:**

    >>> told = LinearTerm(torch.tensor([[18.0]]), torch.zeros(1, 2))
    >>> from_symmetric_root(torch.ones(1, 2), torch.eye(2)[:, :1], torch.tensor([[8.0]]), told)
    (tensor([[2.3333, 1.0000]]), tensor([-1.0986]))

    :param standard: x, ``(num_points, n)``.
    :param vectors: V, ``(n, rank)``.
    :param gains: g, ``(num_points, rank)``, above -1.
    :param told: t, with ``inner`` ``(num_points, rank)`` and ``outer`` ``(num_points, n)``.
    :returns: z, and the log-determinants ``(num_points,)``.
    """
    stretch = (1 + gains).sqrt()
    moved = standard @ vectors * (1 / stretch - 1) + told.inner / (1 + gains)
    return standard + told.outer + moved @ vectors.mT, -stretch.log().sum(-1)


def to_symmetric_root(values: Tensor, vectors: Tensor, gains: Tensor, told: LinearTerm) -> Tensor:
    """Invert :func:`from_symmetric_root`: x of z."""
    stretch = (1 + gains).sqrt()
    moved = values @ vectors * (stretch - 1) - told.inner / stretch
    return values - told.outer + moved @ vectors.mT


def eigenbasis(matrix: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors ``(n, rank)`` and eigenvalues ``(rank,)`` above a limit.

    **Example:**

    >>> eigenbasis(torch.diag(torch.tensor([3.0, 1e-3, -1.0])), least=0.01)[1]
    tensor([3.])

    :param matrix: symmetric, ``(n, n)``.
    :param least: the limit.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values > least
    return vectors[:, kept], values[kept]
