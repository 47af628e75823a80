# SPDX-License-Identifier: Apache-2.0
"""Krylov methods for batches of symmetric positive definite operators known by their products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["lanczos", "log_quadratic_and_solve", "smallest_eigenpair"]

Operator = Callable[[Tensor], Tensor]


def lanczos(operator: Operator, start: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Tridiagonalise an operator on the Krylov space of ``start``, fully reorthogonalised.

    **Example:**

    >>> basis, tridiagonal = lanczos(lambda v: 2.0 * v, torch.tensor([3.0, 4.0]), num_steps=1)
    >>> tridiagonal
    tensor([[2.]])

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric.
    :param start: ``(*batch, d)``.
    :param num_steps: size k of the Krylov space, at most d.
    :returns: orthonormal basis Q ``(*batch, d, k)`` and T = Q^T A Q ``(*batch, k, k)``.

    **References:**

    1. Golub and Van Loan, *Matrix Computations*, section 10.1.
    """
    tiny = torch.finfo(start.dtype).tiny
    basis = [start / start.norm(dim=-1, keepdim=True).clamp(min=tiny)]
    diagonal, off_diagonal = [], []
    for step in range(num_steps):
        image = operator(basis[-1])
        diagonal.append((basis[-1] * image).sum(-1))
        if step == num_steps - 1:
            break
        stacked = torch.stack(basis, -1)
        for _ in range(2):
            overlap = (stacked * image.unsqueeze(-1)).sum(-2, keepdim=True)
            image = image - (stacked * overlap).sum(-1)
        norm = image.norm(dim=-1, keepdim=True)
        # Once the space is invariant the remainder is rounding noise: stop there with a zero.
        alive = norm > diagonal[0].unsqueeze(-1).abs() * torch.finfo(start.dtype).eps * 10
        basis.append(torch.where(alive, image / norm.clamp(min=tiny), 0.0))
        off_diagonal.append(torch.where(alive, norm, 0.0).squeeze(-1))
    tridiagonal = torch.diag_embed(torch.stack(diagonal, -1))
    if off_diagonal:
        side = torch.stack(off_diagonal, -1)
        tridiagonal = tridiagonal + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    return torch.stack(basis, -1), tridiagonal


def log_quadratic_and_solve(
    operator: Operator, probe: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Both :math:`v^\top \log(A) v` and :math:`A^{-1} v` from one Lanczos run.

    The solution is that of the conjugate gradient method after as many steps; the quadratic form is
    stochastic Lanczos quadrature: its mean over Rademacher probes is the log-determinant.

    **Example:**

    >>> probe = torch.ones(4)
    >>> log, solution, residual = log_quadratic_and_solve(lambda v: 2.0 * v, probe, num_steps=2)
    >>> torch.allclose(log, 4 * torch.tensor(2.0).log()), torch.allclose(solution, probe / 2)
    (True, True)

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric with eigenvalues of at least 1.
    :param probe: ``(*batch, d)``.
    :param num_steps: size of the Krylov space; at most d is used.
    :returns: the quadratic form ``(*batch,)``, the solution ``(*batch, d)`` and the relative
        residual ``|A x - v| / |v|`` of the solution ``(*batch,)``.

    **References:**

    1. Ubaru, Chen and Saad (2017), *Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature*.
    """
    basis, tridiagonal = lanczos(operator, probe, min(num_steps, probe.shape[-1]))
    values, vectors = torch.linalg.eigh(tridiagonal)
    # Directions dropped by an early end of the recursion have eigenvalue 0 and no weight.
    weights, values = vectors[..., 0, :], values.clamp(min=1.0)
    norm = probe.norm(dim=-1)
    quadratic = norm.square() * (weights.square() * values.log()).sum(-1)
    coefficients = (vectors * (weights / values).unsqueeze(-2)).sum(-1)
    solution = norm.unsqueeze(-1) * (basis * coefficients.unsqueeze(-2)).sum(-1)
    residual = (operator(solution) - probe).norm(dim=-1) / norm
    return quadratic, solution, residual


def smallest_eigenpair(
    operator: Operator, start: Tensor, num_steps: int = 100, tolerance: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest eigenvalue of each operator by LOBPCG with one vector.

    Each step minimises the Rayleigh quotient over the span of the vector, its residual and the last
    direction, so the value decreases towards the eigenvalue from above.

    **Example:**

    >>> scales = torch.tensor([3.0, 1.0, 2.0])
    >>> value, vector, residual = smallest_eigenpair(lambda v: scales * v, torch.ones(3))
    >>> round(value.item(), 3)
    1.0

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric positive semi-definite.
    :param start: ``(*batch, d)``, not orthogonal to the eigenvector sought.
    :param num_steps: at most so many steps.
    :param tolerance: stop when every relative residual is below.
    :returns: eigenvalues ``(*batch,)``, unit vectors ``(*batch, d)``, and the relative residuals
        ``|A v - value v| / value`` ``(*batch,)``.

    **References:**

    1. Knyazev (2001), *Toward the Optimal Preconditioned Eigensolver*.
    """
    tiny = torch.finfo(start.dtype).tiny
    num_directions = min(3, start.shape[-1])
    vector = start / start.norm(dim=-1, keepdim=True)
    direction = torch.zeros_like(vector)
    for step in range(num_steps + 1):
        image = operator(vector)
        value = (vector * image).sum(-1)
        remainder = image - value.unsqueeze(-1) * vector
        residual = remainder.norm(dim=-1) / value.clamp(min=tiny)
        if step == num_steps or bool((residual <= tolerance).all()):
            break
        remainder = remainder / remainder.norm(dim=-1, keepdim=True).clamp(min=tiny)
        space = torch.stack([vector, remainder, direction], -1)[..., :num_directions]
        space = torch.linalg.qr(space).Q
        images = torch.stack([operator(column) for column in space.unbind(-1)], -1)
        small = torch.linalg.eigh(space.mT @ images).eigenvectors[..., :1]
        new_vector = (space @ small).squeeze(-1)
        direction = (space[..., 1:] @ small[..., 1:, :]).squeeze(-1)
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=tiny)
        vector = new_vector / new_vector.norm(dim=-1, keepdim=True)
    return value, vector, residual
