# SPDX-License-Identifier: Apache-2.0
r"""Estimates of scores :math:`\nabla \log q` from samples of q, and Stein discrepancies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.density_ratio import Covariance, standardize
from pyro_implicit.ops.kernels import (
    Kernel,
    median_bandwidth,
    rbf_kernel,
    squared_bandwidth,
    squared_distances,
)
from pyro_implicit.ops.policy import MAX_REPEATED
from pyro_implicit.runtime.messages import refuse_nonpositive

__all__ = [
    "SteinTest",
    "gaussian_entropy",
    "kernel_stein_discrepancy",
    "spectral_score",
    "stein_gram",
    "stein_score",
    "stein_test",
]


@torch.no_grad()
def stein_score(samples: Tensor, ridge: float = 1e-3, kernel: Kernel = rbf_kernel) -> Tensor:
    r"""Estimate the score at samples by the kernel Stein identity.

    For every y, :math:`E_q[k(x, y)\, \nabla \log q(x) + \nabla_x k(x, y)] = 0`. With the samples
    as x and y, and a ridge, this identity gives

    .. math::
        S = -(K + \lambda n I)^{-1} D, \qquad D_i = \sum_j \nabla_{x_j} k(x_j, x_i).

    The gradient flow with smoothed test functions (GFSF) has the same estimator: its
    :math:`-D^\top K^{-1}` is this one without the ridge.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(300, 1)
    >>> (stein_score(x) + x).square().mean() < 0.3  # the score of N(0, 1) is -x
    tensor(True)

    :param samples: ``(*batch, n, m)``.
    :param ridge: :math:`\lambda`, positive.
    :param kernel: a function of x - y, with its bandwidth at the median distance.
    :returns: ``(*batch, n, m)``, in units of 1 / sample, without gradient. Memory: n (n + m).
    :raises ValueError: for a ridge that is not positive, or fewer than 2 samples.

    **References:**

    1. Li and Turner (2018), *Gradient Estimators for Implicit Models*, eq 8.
    2. Liu et al. (2019), *Understanding and Accelerating Particle-Based Variational Inference*,
       section 3.3.
    """
    refuse_nonpositive(ridge=ridge)
    gram, slopes = _gram_and_slopes(samples, kernel)
    num_samples = samples.shape[-2]
    penalty = ridge * num_samples * torch.eye(num_samples, dtype=gram.dtype, device=gram.device)
    return -torch.cholesky_solve(slopes, torch.linalg.cholesky(gram + penalty))


@torch.no_grad()
def spectral_score(
    samples: Tensor,
    points: Tensor | None = None,
    num_eigen: int | None = None,
    threshold: float = 0.99,
    kernel: Kernel = rbf_kernel,
) -> Tensor:
    r"""Estimate the score at any points by the spectral estimator (SSGE).

    The score is expanded in the leading eigenfunctions of the kernel under q, by Nyström's method;
    Stein's identity gives the coefficients. With the largest eigenvalues of
    :math:`K = U \Lambda U^\top`, and D as in :func:`stein_score`,

    .. math::
        s(x) = -k(x, X)\, U \Lambda^{-2} U^\top D.

    At the samples this is :math:`-U \Lambda^{-1} U^\top D`: the Stein estimator with a cutoff of
    the eigenvalues instead of a ridge.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> spectral_score(torch.randn(300, 1), torch.tensor([[-1.0], [0.0], [1.0]])).sign()[::2]
    tensor([[ 1.],
            [-1.]])

    :param samples: ``(*batch, n, m)``.
    :param points: ``(*batch, k, m)``; by default the samples.
    :param num_eigen: number of eigenfunctions, at most n; by default determined by ``threshold``.
    :param threshold: share of the sum of all eigenvalues that the kept eigenvalues reach.
    :param kernel: a function of x - y, with its bandwidth at the median distance of the samples.
    :returns: ``(*batch, k, m)``, in units of 1 / sample, without gradient. Memory: n (n + k + m).
    :raises ValueError: for arguments out of range, or fewer than 2 samples.

    **References:**

    1. Shi, Sun and Zhu (2018), *A Spectral Approach to Gradient Estimation for Implicit
       Distributions*, algorithm 1.
    """
    num_samples = samples.shape[-2]
    if num_eigen is not None and not 1 <= num_eigen <= num_samples:
        raise ValueError(f"num_eigen must be from 1 to {num_samples}, but got {num_eigen}")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, but got {threshold}")
    gram, slopes = _gram_and_slopes(samples, kernel)
    values, vectors = torch.linalg.eigh(gram)  # ascending
    if num_eigen is None:
        smaller = values.clamp(min=0.0).cumsum(-1)
        kept = smaller > (1 - threshold) * smaller[..., -1:]
    else:
        kept = torch.arange(num_samples, device=values.device) >= num_samples - num_eigen
    # Drop eigenvalues below the rounding error of the Gram matrix.
    kept = kept & (values > num_samples * torch.finfo(values.dtype).eps * values[..., -1:])
    inverse = torch.where(kept, 1 / values, torch.zeros_like(values)).unsqueeze(-1)
    weights = -vectors @ (inverse.square() * (vectors.mT @ slopes))
    if points is None:
        return gram @ weights
    return kernel(points, samples, median_bandwidth(samples)) @ weights


def _gram_and_slopes(samples: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix, and for each i the sum over j of the x_j-gradient of k(x_j, x_i)."""
    bandwidth = median_bandwidth(samples)
    # For a function of x - y the gradient in x is minus the gradient in y, which one backward pass
    # computes for all sums, without an n x n x m tensor.
    with torch.enable_grad():
        centers = samples.detach().clone().requires_grad_()
        gram = kernel(samples.detach(), centers, bandwidth)
        (gradient,) = torch.autograd.grad(gram.sum(), centers)
    return gram.detach(), -gradient


def kernel_stein_discrepancy(samples: Tensor, scores: Tensor) -> Tensor:
    r"""Squared kernel Stein discrepancy between samples and the density that has these scores.

    .. math::
        \frac{1}{n^2} \sum_{ij} \left[ s_i^\top s_j + \frac{(s_i - s_j)^\top \delta_{ij}}{h^2}
        + \frac{m}{h^2} - \frac{\|\delta_{ij}\|^2}{h^4} \right] e^{-\|\delta_{ij}\|^2 / 2 h^2},
        \qquad \delta_{ij} = x_i - x_j,

    with the median distance h, a constant. Apart from the n terms i = j, its expectation is zero if
    the samples are from this density.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(300, 2)
    >>> kernel_stein_discrepancy(x, -x) < 0.1 * kernel_stein_discrepancy(x, 1 - x)
    tensor(True)

    :param samples: x, ``(*batch, n, m)``.
    :param scores: s, the gradients of the log-density at the samples, ``(*batch, n, m)``.
    :returns: ``(*batch)``, at least 0, differentiable in both arguments. Memory: n (n + m).
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*,
       theorem 3.6.
    """
    variance = squared_bandwidth(median_bandwidth(samples.detach()))
    centered = samples - samples.detach().mean(-2, keepdim=True)
    squares = squared_distances(centered, centered)
    cross = scores @ centered.mT
    # By symmetry in i and j, the part of s_i - s_j is twice the part of s_i.
    slopes = 2 * (cross.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) - cross)
    curvature = (samples.shape[-1] - squares / variance) / variance
    terms = scores @ scores.mT + slopes / variance + curvature
    return (terms * (-0.5 * squares / variance).exp()).mean((-2, -1))


def gaussian_entropy(samples: Tensor, covariance: Covariance = "diagonal") -> Tensor:
    r"""Entropy of the Gaussian with the moments of samples, unbiased for Gaussian samples.

    It is the largest entropy of any density with these moments.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> (gaussian_entropy(3 * torch.randn(2000, 1)) - 2.52).abs() < 0.1
    tensor(True)

    :param samples: ``(*batch, n, m)``.
    :param covariance: ``"diagonal"`` or ``"full"``, which needs more samples than dimensions.
    :returns: ``(*batch)``, in nats.
    :raises ValueError: as :func:`~pyro_implicit.ops.standardize`.
    """
    num_samples, dim = samples.shape[-2:]
    _, log_det = standardize(samples, covariance)
    # The log-determinant of a Wishart matrix has the expectation of a sum of log chi-squares.
    index = torch.arange(1, dim + 1, dtype=samples.dtype, device=samples.device)
    if covariance == "diagonal":
        index = torch.ones_like(index)
    bias = 0.5 * (torch.digamma((num_samples - index) / 2) + math.log(2 / num_samples)).sum()
    return log_det - bias + 0.5 * dim * (1 + math.log(2 * math.pi))


class SteinTest(NamedTuple):
    r"""The outcome of :func:`stein_test`.

    ``statistic`` is the unbiased squared discrepancy, at least about 0; ``relative`` its ratio to
    the mean of :math:`u(x, x)`, from about 0 to 1, without units; ``p_value`` the probability of at
    least this discrepancy under the density.
    """

    statistic: float
    relative: float
    p_value: float


def stein_gram(samples: Tensor, scores: Tensor, bandwidth: Tensor | None = None) -> Tensor:
    r"""Evaluate Stein's kernel, of mean zero in each argument under the density with these scores.

    With :math:`k = (1 + \|\delta\|^2 / h^2)^{-1/2}` and :math:`\delta = x - y`,

    .. math::
        u(x, y) = s_x^\top s_y\, k + \frac{(s_x - s_y)^\top \delta + m}{h^2}\, k^3
        - \frac{3 \|\delta\|^2}{h^4}\, k^5.

    The heavy tails of the inverse multiquadric detect samples that escape to infinity, which a
    Gaussian kernel does not.

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
        bandwidth = median_bandwidth(samples.detach())
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
    r"""Test whether independent samples come from the density with these scores.

    The statistic is :math:`\frac{1}{n(n-1)} \sum_{i \ne j} u(x_i, x_j)`, with u of
    :func:`stein_gram`. Under the density its asymptotic distribution is that of the same sum with
    each term times :math:`\epsilon_i \epsilon_j`, for random signs :math:`\epsilon`.
    Equal samples, as after resampling, are not independent: their terms are left out like those of
    i = j, and they have the same sign. If most samples are equal, as draws of a few particles are,
    they count as independent, and the test rejects the density.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(500, 2)
    >>> stein_test(x, -x).p_value > 0.01, stein_test(x, 0.5 - x).p_value < 0.01
    (True, True)

    :param samples: ``(n, m)``, best whitened.
    :param scores: the gradients of the log-density at the samples, ``(n, m)``.
    :param num_bootstrap: draws of the signs; the smallest p-value is about its inverse.
    :returns: statistic, relative size and p-value. Memory: n (n + num_bootstrap).
    :raises ValueError: for fewer than 2 samples.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    2. Chwialkowski, Strathmann and Gretton (2016), *A Kernel Test of Goodness of Fit* (the signs).
    """
    gram = stein_gram(samples, scores)
    size = gram.diagonal().mean()
    distinct, place = samples.unique(dim=0, return_inverse=True)
    if len(distinct) < (1 - MAX_REPEATED) * len(samples):
        place = torch.arange(len(samples), device=samples.device)
    gram.masked_fill_(place.unsqueeze(-1) == place, 0.0)
    num_pairs = len(samples) * (len(samples) - 1)
    statistic = gram.sum() / num_pairs
    signs = torch.randint_like(gram[:, :1].expand(-1, num_bootstrap), 2)[place] * 2 - 1
    null = (signs * (gram @ signs)).sum(0) / num_pairs
    p_value = (1 + (null >= statistic).sum().item()) / (1 + num_bootstrap)
    return SteinTest(statistic.item(), (statistic / size).item(), p_value)
