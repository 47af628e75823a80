# SPDX-License-Identifier: Apache-2.0
"""Factors of covariances, from a Hessian or from another factor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lower_factor", "matvec", "root_of_inverse"]


def root_of_inverse(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """F with F F^T = |H|^-1, by eigenvalues after scaling to a unit diagonal, and whether H < 0."""
    hessian = torch.nan_to_num(hessian)
    # A coordinate without any curvature has no scale of its own: it is left as it is.
    is_flat = (hessian == 0).all(-1)
    hessian = hessian - torch.diag_embed(is_flat.to(hessian))
    scale = hessian.diagonal(dim1=-2, dim2=-1).abs().clamp(min=1e-20).rsqrt()
    scaled = scale.unsqueeze(-1) * hessian * scale.unsqueeze(-2)
    values, vectors = _eigh(scaled)
    is_concave = (values < 0).all(-1)
    values = values.abs().clamp(min=10 * torch.finfo(values.dtype).eps)
    return scale.unsqueeze(-1) * vectors * values.rsqrt().unsqueeze(-2), is_concave


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 where float32 does not converge, as with entries that are many powers apart."""
    try:
        return tuple(torch.linalg.eigh(matrix))
    except torch.linalg.LinAlgError:
        largest = torch.finfo(matrix.dtype).max ** 0.5
        values, vectors = torch.linalg.eigh(matrix.double().clamp(-largest, largest))
        return values.to(matrix), vectors.to(matrix)


def lower_factor(root: Tensor) -> Tensor:
    """The Cholesky factor of R R^T, without that product: it exists however thin R is.

    :param root: ``(*batch, dim, num_columns)``, of at least as many columns as rows.
    :returns: ``(*batch, dim, dim)``.
    """
    factor = torch.linalg.qr(root.mT).R.mT
    sign = torch.where(factor.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(factor)
    return (factor * sign.unsqueeze(-2)).tril()


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """``(*batch, m, n)`` times ``(*batch, n)``; the batches broadcast."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
