# SPDX-License-Identifier: Apache-2.0
r"""Log-determinants and densities of the linearised generator.

A generator :math:`g: R^d \to R^m` with Jacobian J and conditional scales s gives, linearised around
the noise z, a Gaussian of covariance :math:`C = J J^\top + \mathrm{diag}(s^2)` (LIVI, eqs 8-12).
Everything works on the whitened Jacobian :math:`\mathrm{diag}(s)^{-1} J` and on the smaller of its
two Gram matrices, never on more than min(d, m) dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_implicit.ops.krylov import log_quadratic_and_solve, smallest_eigenpair

__all__ = [
    "covariance_log_det",
    "linearised_log_density",
    "smallest_singular_log_det",
    "stochastic_log_det",
]

Operator = Callable[[Tensor], Tensor]


def covariance_log_det(jacobian: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\log\det(J J^\top + \mathrm{diag}(s^2))`, exactly, by Cholesky.

    **Example:**

    >>> covariance_log_det(torch.zeros(2, 5), torch.ones(2))
    tensor(0.)

    :param jacobian: ``(*batch, m, d)``.
    :param scale: positive, ``(*batch, m)``.
    :returns: ``(*batch,)``.
    """
    factor = _gram_factor(jacobian / scale.unsqueeze(-1))
    return 2 * (_half_log_det(factor) + scale.log().sum(-1))


def linearised_log_density(residual: Tensor, jacobian: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\log N(r \mid 0, J J^\top + \mathrm{diag}(s^2))`, exactly.

    With :math:`r = \theta - g(z) + J z` this is LIVI's density before the limit of small s
    (eqs 8-12); for a linear generator it is the density of :math:`\theta`.

    **Example:**

    >>> linearised_log_density(torch.zeros(2), torch.zeros(2, 5), torch.ones(2))
    tensor(-1.8379)

    :param residual: ``(*batch, m)``.
    :param jacobian: ``(*batch, m, d)``.
    :param scale: positive, ``(*batch, m)``.
    :returns: ``(*batch,)``.
    """
    jacobian, residual = jacobian / scale.unsqueeze(-1), residual / scale
    factor = _gram_factor(jacobian)
    if jacobian.shape[-1] <= jacobian.shape[-2]:  # Woodbury, on the noise's side
        projected = _solve_lower(factor, (jacobian * residual.unsqueeze(-1)).sum(-2))
        quadratic = residual.square().sum(-1) - projected.square().sum(-1)
    else:
        quadratic = _solve_lower(factor, residual).square().sum(-1)
    log_normaliser = 0.5 * scale.shape[-1] * math.log(2 * math.pi)
    return -0.5 * quadratic - _half_log_det(factor) - scale.log().sum(-1) - log_normaliser


def smallest_singular_log_det(
    times: Operator, transposed_times: Operator, scale: Tensor, start: Tensor, num_steps: int = 100
) -> tuple[Tensor, Tensor]:
    r"""A lower bound on the log-determinant from the smallest singular value (LIVI, eqs 17-18).

    :math:`\log\det C \ge \sum_i \log s_i^2 + d \log(1 + \sigma_{\min}^2)` with the smallest
    singular value of the whitened Jacobian, found by LOBPCG; for equal scales this is
    :math:`d \log(s_{\min}^2 + s^2) + (m - d) \log s^2`. It is differentiated with the singular
    vector held fixed (envelope theorem). An unconverged vector makes the value too large.

    **Example:**

    >>> double = lambda v: 2.0 * v
    >>> value, residual = smallest_singular_log_det(double, double, torch.ones(3), torch.ones(3))
    >>> torch.allclose(value, 3 * torch.tensor(5.0).log())
    True

    :param times: ``v -> J v`` from ``(*batch, d)`` to ``(*batch, m)``, d <= m, differentiable.
    :param transposed_times: ``u -> J^T u``.
    :param scale: positive, ``(*batch, m)``.
    :param start: first guess of the singular vector, ``(*batch, d)``.
    :param num_steps: LOBPCG steps at most.
    :returns: the bound, and the residual relative to :math:`1 + \sigma_{\min}^2`: both
        ``(*batch,)``.
    """
    noise_dim = start.shape[-1]
    with torch.no_grad():
        operator = lambda v: v + transposed_times(times(v) / scale.square())  # noqa: E731
        _, vector, residual = smallest_eigenpair(operator, start, num_steps)
    smallest = (times(vector) / scale).square().sum(-1)
    return noise_dim * smallest.log1p() + 2 * scale.log().sum(-1), residual


def stochastic_log_det(
    times: Operator, transposed_times: Operator, scale: Tensor, probes: Tensor, num_steps: int = 30
) -> tuple[Tensor, Tensor]:
    r"""The log-determinant by stochastic Lanczos quadrature, with an unbiased gradient.

    With :math:`A = I + J^\top \mathrm{diag}(s^{-2}) J`, the value is the mean over Rademacher
    probes v of :math:`v^\top \log(A) v`, and the gradient that of
    :math:`\mathrm{tr}(A^{-1} dA) = E_v[(A^{-1} v)^\top dA\, v]`, both up to the residual that is
    returned. J is never stored.

    **Example:**

    >>> double = lambda v: 2.0 * v
    >>> probes = torch.ones(1, 3)
    >>> value, residual = stochastic_log_det(double, double, torch.ones(1, 3), probes)
    >>> torch.allclose(value, 3 * torch.tensor(5.0).log())
    True

    :param times: ``v -> J v`` from ``(num_probes, *batch, d)`` to ``(num_probes, *batch, m)``,
        differentiable.
    :param transposed_times: ``u -> J^T u``.
    :param scale: positive, broadcastable to ``(num_probes, *batch, m)``.
    :param probes: random signs, ``(num_probes, *batch, d)``.
    :param num_steps: Lanczos steps.
    :returns: the estimate ``(*batch,)`` and the relative residual of the solves
        ``(num_probes, *batch)``.

    **References:**

    1. Gardner et al. (2018), *GPyTorch: Blackbox Matrix-Matrix Gaussian Process Inference*.
    """
    with torch.no_grad():
        operator = lambda v: v + transposed_times(times(v) / scale.square())  # noqa: E731
        quadratic, solution, residual = log_quadratic_and_solve(operator, probes, num_steps)
    slope = ((times(solution) / scale) * (times(probes) / scale)).sum(-1)
    log_det = (quadratic + slope - slope.detach()).mean(0)
    return log_det + 2 * scale.log().sum(-1).expand(probes.shape[:-1]).mean(0), residual


def _gram_factor(jacobian: Tensor) -> Tensor:
    """Cholesky factor of I + the smaller Gram matrix, ``(*batch, k, k)`` with k = min(m, d).

    In float64, as its pivots, at least 1, may be many powers smaller than its entries. NaN where
    the Jacobian is not finite.
    """
    dtype, jacobian = jacobian.dtype, jacobian.double()
    tall = jacobian.shape[-2] >= jacobian.shape[-1]
    gram = jacobian.mT @ jacobian if tall else jacobian @ jacobian.mT
    gram = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram)
    return factor.masked_fill((info != 0)[..., None, None], math.nan).to(dtype)


def _half_log_det(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _solve_lower(factor: Tensor, vector: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False).squeeze(-1)
