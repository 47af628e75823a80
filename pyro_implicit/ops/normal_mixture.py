# SPDX-License-Identifier: Apache-2.0
"""Mixtures of normal distributions of weighted points."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_implicit.ops.matrices import lower_factor
from pyro_implicit.ops.policy import NUM_EM_STEPS

__all__ = ["fit_normal_mixture"]


@torch.no_grad()
def fit_normal_mixture(
    points: Tensor, shares: Tensor, num_components: int, num_effective: float
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Fit a mixture of normal distributions to weighted points by expectation-maximisation.

    With the responsibility :math:`r_{ik}` of component k for point i, the effective number of
    points :math:`n_k = n \sum_i s_i r_{ik}` and their covariance :math:`S_k`, the components have
    the covariances

    .. math:: \Sigma_k = \frac{\nu K^{-2/d} S + n_k S_k}{\nu + n_k}, \qquad \nu = d + 2,

    where S is the covariance of all points. The first term keeps components of few points from
    collapsing; a single component has the moments of the points. scikit-learn's mixtures take no
    weights.

    **Example:**

    >>> points = torch.tensor([[0.0], [1.0], [2.0]])
    >>> log_weights, loc, scale_tril = fit_normal_mixture(points, torch.ones(3) / 3, 1, 3.0)
    >>> loc, scale_tril**2
    (tensor([[1.]]), tensor([[[0.6667]]]))

    :param points: ``(num_points, dim)``; those with a weight must span all dimensions.
    :param shares: :math:`s_i`, the weights of the points, which add up to one, ``(num_points,)``.
    :param num_components: K, at least 1. Their first means are random points.
    :param num_effective: n, the effective number of points.
    :returns: log-weights ``(K,)``, means ``(K, dim)`` and Cholesky factors of the covariances
        ``(K, dim, dim)``.

    Source: Fraley and Raftery (2007), *Bayesian regularization for normal mixture estimation and
    model-based clustering*, section 3.2, for the priors of the covariances.
    """
    points, shares = points[shares > 0], shares[shares > 0]  # 0 * NaN is NaN
    dim, share = points.shape[-1], shares.double().unsqueeze(-1)
    loc = (share * points).sum(0)
    factor = lower_factor((share.sqrt() * (points - loc)).mT)
    white = torch.linalg.solve_triangular(factor, (points - loc).mT, upper=False).mT
    prior = torch.eye(dim).to(white) * num_components ** (-2 / dim)
    strength = dim + 2
    if num_components == 1:
        means, factors = white.new_zeros(1, dim), prior.unsqueeze(0)
        log_weights = white.new_zeros(1)
    else:
        means = white[shares.multinomial(num_components)]
        factors = prior.sqrt().expand(num_components, dim, dim)
        log_weights = white.new_zeros(num_components).log_softmax(0)
        for _ in range(NUM_EM_STEPS):
            normals = MultivariateNormal(means, scale_tril=factors)
            log_joint = log_weights + normals.log_prob(white.unsqueeze(-2))
            joint = share * log_joint.softmax(-1)
            sizes = joint.sum(0)
            means = joint.mT @ white / sizes.unsqueeze(-1)
            gaps = white - means.unsqueeze(-2)
            scatter = (joint.mT.unsqueeze(-1) * gaps).mT @ gaps  # of all effective points
            number = (num_effective * sizes)[:, None, None]
            covariances = (strength * prior + num_effective * scatter) / (strength + number)
            factors = torch.linalg.cholesky(covariances)
            log_weights = (num_effective * sizes + 1).log().log_softmax(0)
    return (
        log_weights.to(points),
        (loc + means @ factor.mT).to(points),
        (factor @ factors).to(points),
    )
