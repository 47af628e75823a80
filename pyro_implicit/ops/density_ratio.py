# SPDX-License-Identifier: Apache-2.0
"""Density ratios of two sets of samples by kernel regression, in closed form."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_implicit.ops.kernels import Kernel, median_bandwidth, rbf_kernel
from pyro_implicit.runtime.messages import refuse_nonpositive, refuse_unknown, short_repr

__all__ = [
    "Covariance",
    "DensityRatio",
    "Direction",
    "adaptive_log_density",
    "fit_density_ratio",
    "log_density_ratio",
    "logistic_ratio_loss",
    "standardize",
]


Covariance = Literal["diagonal", "full"]
Direction = Literal["forward", "reverse"]


class DensityRatio(NamedTuple):
    r"""An estimated ratio :math:`\hat r(x) = \sum_i w_i k(c_i, x)`, which may be negative.

    ``centers`` ``(*batch, num_centers, m)``, ``weights`` ``(*batch, num_centers)``, ``bandwidth``
    ``(*batch)`` of the ``kernel``; none carries a gradient.
    """

    centers: Tensor
    weights: Tensor
    bandwidth: Tensor
    kernel: Kernel

    def __repr__(self) -> str:
        return short_repr(self)

    def __call__(self, points: Tensor) -> Tensor:
        """Evaluate the ratio at ``points`` ``(*batch, n, m)``, differentiably: ``(*batch, n)``."""
        gram = self.kernel(points, self.centers, self.bandwidth)
        return (gram @ self.weights.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def fit_density_ratio(
    numerator: Tensor, denominator: Tensor, ridge: float = 1e-3, kernel: Kernel = rbf_kernel
) -> DensityRatio:
    r"""Fit the ratio of the densities of two sets of samples by least squares.

    It minimises :math:`\tfrac12 E_d[\hat r^2] - E_n[\hat r] + \tfrac\lambda2 \|\hat r\|^2`, whose
    first part is the squared distance to :math:`r = n/d` under d, up to a constant, over the
    kernel's Hilbert space. The minimiser has the weights :math:`\beta = 1 / (\lambda n_n)` at the
    samples of n and

    .. math::
        \alpha = -\frac{1}{\lambda n_n n_d} (K_{dd} / n_d + \lambda I)^{-1} K_{dn} 1

    at the samples of d. :math:`E_d[r^2]` should be finite: d should not be narrower than n.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> ratio = fit_density_ratio(torch.randn(200, 1), torch.randn(200, 1))
    >>> (ratio(torch.zeros(1, 1)) - 1).abs() < 0.3
    tensor([True])

    :param numerator: samples of n, ``(*batch, num_n, m)``.
    :param denominator: samples of d, ``(*batch, num_d, m)``.
    :param ridge: :math:`\lambda`, positive.
    :param kernel: with its bandwidth at the median distance of all samples.
    :raises ValueError: for a ridge that is not positive.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, eqs 4-6 and appendix B
       (eq 6 lacks the minus sign of :math:`\alpha`).
    2. Kanamori, Hido and Sugiyama (2009), *A Least-squares Approach to Direct Importance
       Estimation*.
    """
    refuse_nonpositive(ridge=ridge)
    num_n, num_d = numerator.shape[-2], denominator.shape[-2]
    centers = torch.cat([denominator, numerator], -2)
    bandwidth = median_bandwidth(centers)
    gram = kernel(denominator, centers, bandwidth)
    gram_dd, gram_dn = gram.split([num_d, num_n], -1)
    penalty = ridge * torch.eye(num_d, dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(gram_dd / num_d + penalty)
    solved = torch.cholesky_solve(gram_dn.mean(-1, keepdim=True), factor).squeeze(-1)
    alpha = -solved / (ridge * num_d)
    beta = alpha.new_full(alpha.shape[:-1] + (num_n,), 1 / (ridge * num_n))
    return DensityRatio(centers, torch.cat([alpha, beta], -1), bandwidth, kernel)


def log_density_ratio(
    q_samples: Tensor,
    p_samples: Tensor,
    direction: Direction = "forward",
    ridge: float = 1e-3,
    clip: float = 0.01,
    kernel: Kernel = rbf_kernel,
) -> Tensor:
    r"""Estimate :math:`\log q(x) / p(x)` at the samples of q; its mean estimates KL(q || p).

    The gradient flows through the evaluation points only, as the gradient of the KL does.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> kl = log_density_ratio(torch.randn(200, 1) + 1, torch.randn(200, 1)).mean()
    >>> (kl - 0.5).abs() < 0.2
    tensor(True)

    :param q_samples: ``(*batch, num_q, m)``.
    :param p_samples: ``(*batch, num_p, m)``.
    :param direction: which ratio is fitted. ``"forward"``: q/p, for which q should not be wider
        than :math:`\sqrt2` times p; ``"reverse"``: p/q, for which q should not be narrower than
        :math:`1/\sqrt2` times p.
    :param ridge: see :func:`fit_density_ratio`.
    :param clip: lower limit of the fitted ratio, which may be negative. It is far above the paper's
        1e-8, because the gradient of the logarithm of a tiny ratio is mostly noise.
    :param kernel: see :func:`fit_density_ratio`.
    :returns: ``(*batch, num_q)``.
    :raises ValueError: for a direction, ridge or clip out of range.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, section 3.1.
    """
    refuse_unknown("direction", direction, "forward", "reverse")
    refuse_nonpositive(clip=clip)
    if direction == "forward":
        return fit_density_ratio(q_samples, p_samples, ridge, kernel)(q_samples).clamp(clip).log()
    return -fit_density_ratio(p_samples, q_samples, ridge, kernel)(q_samples).clamp(clip).log()


def standardize(samples: Tensor, covariance: Covariance = "diagonal") -> tuple[Tensor, Tensor]:
    r"""Standardise samples by their own mean and spread, differentiably.

    **Example:**

    >>> standardize(torch.tensor([[1.0], [5.0]]))
    (tensor([[-1.],
            [ 1.]]), tensor(0.6931))

    :param samples: x, ``(*batch, n, m)``.
    :param covariance: ``"diagonal"``: divide by standard deviations; ``"full"``: by the Cholesky
        factor of the covariance, which needs more samples than dimensions.
    :returns: :math:`L^{-1}(x - \mu)`, ``(*batch, n, m)``, and :math:`\log\det L`, ``(*batch)``.
    :raises ValueError: for another covariance, or too few samples.
    """
    refuse_unknown("covariance", covariance, "diagonal", "full")
    num_samples, dim = samples.shape[-2:]
    needed = 2 if covariance == "diagonal" else dim + 1
    if num_samples < needed:
        raise ValueError(
            f'covariance="{covariance}" of {dim} dimensions needs at least {needed} samples, but '
            f"got {num_samples}: draw more" + (', or use "diagonal"' if needed > 2 else "")
        )
    centered = samples - samples.mean(-2, keepdim=True)
    if covariance == "diagonal":
        tiny = torch.finfo(samples.dtype).tiny
        scale = centered.square().mean(-2, keepdim=True).clamp(min=tiny).sqrt()
        return centered / scale, scale.squeeze(-2).log().sum(-1)
    scale_tril = torch.linalg.cholesky(centered.mT @ centered / num_samples)
    white = torch.linalg.solve_triangular(scale_tril, centered.mT, upper=False).mT
    return white, scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def adaptive_log_density(
    samples: Tensor,
    normal_samples: Tensor,
    covariance: Covariance = "diagonal",
    direction: Direction = "forward",
    ridge: float = 1e-3,
    clip: float = 0.01,
    kernel: Kernel = rbf_kernel,
) -> Tensor:
    r"""Estimate :math:`\log q(x)` at the samples of q, by its ratio to a Gaussian of q's moments.

    :math:`\log q(x) = \log N(x \mid \mu, L L^\top) + \log \hat r(L^{-1} (x - \mu))`, where r is the
    ratio of the standardised q and N(0, I).

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> log_q = adaptive_log_density(3 * torch.randn(200, 1), torch.randn(200, 1))
    >>> (-log_q.mean() - 2.52).abs() < 0.2  # the entropy of N(0, 9)
    tensor(True)

    :param samples: x, ``(*batch, num_q, m)``.
    :param normal_samples: standard normal draws, ``(*batch, num_p, m)``.
    :param covariance: covariance of the Gaussian, see :func:`standardize`.
    :param direction: see :func:`log_density_ratio`, as ``ridge``, ``clip`` and ``kernel``.
    :returns: ``(*batch, num_q)``. The gradient of its mean estimates that of the negative entropy.
    :raises ValueError: as the functions named.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, appendix D.
    2. Mescheder, Nowozin and Geiger (2017), *Adversarial Variational Bayes*, section 3.3.
    """
    white, log_det = standardize(samples, covariance)
    log_normal = -0.5 * (white.square() + math.log(2 * math.pi)).sum(-1) - log_det.unsqueeze(-1)
    ratio = log_density_ratio(white, normal_samples, direction, ridge, clip, kernel)
    return log_normal + ratio


def logistic_ratio_loss(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    r"""Logistic loss of a discriminator T between samples of q and samples of p,

    .. math:: E_q[-\log \sigma(T(x))] + E_p[-\log(1 - \sigma(T(x)))].

    The minimiser is :math:`T = \log q / p`, the minimum twice the difference of :math:`\log 2` and
    the Jensen-Shannon divergence of q and p. The two numbers of samples may differ.

    **Example:**

    >>> import torch
    >>> logistic_ratio_loss(torch.zeros(5), torch.zeros(3))  # an uninformative T: 2 log 2
    tensor(1.3863)

    :param q_logits: T at the samples of q, ``(*batch, num_q)``.
    :param p_logits: T at the samples of p, ``(*batch, num_p)``.
    :returns: ``(*batch)``, one loss for each pair of sets.

    **References:**

    1. Mescheder, Nowozin and Geiger (2017), *Adversarial Variational Bayes*, eq 3.3.
    """
    return softplus(-q_logits).mean(-1) + softplus(p_logits).mean(-1)
