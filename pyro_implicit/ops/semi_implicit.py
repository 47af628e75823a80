# SPDX-License-Identifier: Apache-2.0
r"""Densities of semi-implicit distributions, and the noise behind a value.

:math:`\theta = g(z) + s \odot \eta` has the explicit conditional :math:`N(g(z),
\mathrm{diag}(s^2))`. Its marginal is a mixture over the noise z; the reverse conditional
:math:`q(z \mid \theta)` is known up to a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyro_implicit.ops.kernels import RadialKernel, imq_kernel, particle_bandwidth, rbf_kernel
from pyro_implicit.ops.policy import DAMPING_FACTOR, FIRST_DAMPING, MAX_ENTRIES, PRIOR_SHARE

__all__ = [
    "NoiseGaussian",
    "NoiseProposal",
    "PairStatistic",
    "conditional_log_density",
    "conditional_stein_discrepancy",
    "linearised_reverse_conditional",
    "mixture_log_density",
]

Generate = Callable[[Tensor], Tensor]

PairStatistic = Literal["u", "two-batch"]


def conditional_log_density(value: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    r"""Return :math:`\log N(\theta \mid g, \mathrm{diag}(s^2))`.

    **Example:**

    >>> conditional_log_density(torch.zeros(2), torch.zeros(3, 2), torch.ones(2))
    tensor([-1.8379, -1.8379, -1.8379])

    :param value: ``(*batch, m)``.
    :param mean: ``(*batch, m)``.
    :param scale: positive, ``(*batch, m)``; all three broadcast.
    :returns: ``(*batch,)``.
    """
    square = ((value - mean) / scale).square()
    return -(0.5 * square + scale.log() + 0.5 * math.log(2 * math.pi)).sum(-1)


def mixture_log_density(
    value: Tensor,
    generate: Generate,
    scale: Tensor,
    noises: Sequence[Tensor],
    log_weights: Sequence[Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r"""Return :math:`\log \frac1S \sum_s w_s\, N(\theta \mid g(z_s), \mathrm{diag}(s^2))`.

    The values of the generator are computed in chunks of the S noises and, if there are several
    chunks, recomputed for the gradient, to bound the memory.

    **Example:**

    >>> noise = torch.zeros(4, 1, 2)
    >>> mixture_log_density(torch.zeros(3, 2), lambda z: z, torch.ones(2), [noise])
    tensor([-1.8379, -1.8379, -1.8379])

    :param value: ``(*batch, m)``.
    :param generate: function from ``(*any, d)`` to ``(*any, m)``, each row independently.
    :param scale: positive, broadcastable to ``(*batch, m)``.
    :param noises: one or more sets of noise, each ``(num_noises, *batch, d)``, with size 1 in the
        batch dimensions whose elements share noise; S is the sum of their sizes.
    :param log_weights: :math:`\log w`, one tensor for each set, ``(num_noises, *batch)`` or with
        size 1 in shared dimensions; by default 0.
    :param chunk_size: noises at a time; by default limited to 2^24 numbers.
    :returns: ``(*batch,)``.
    """
    chunk_size = chunk_size or max(1, MAX_ENTRIES // value.numel())
    num_noises = sum(len(noise) for noise in noises)

    def term(noise: Tensor, log_weight: Tensor) -> Tensor:
        log_density = conditional_log_density(value, generate(noise), scale)
        return (log_density + log_weight).logsumexp(0)

    terms = []
    for i, noise in enumerate(noises):
        log_weight = log_weights[i] if log_weights else noise.new_zeros(noise.shape[:-1])
        chunks = zip(noise.split(chunk_size), log_weight.split(chunk_size), strict=True)
        if len(noise) <= chunk_size or not torch.is_grad_enabled():
            terms += [term(*chunk) for chunk in chunks]
        else:
            terms += [checkpoint(term, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(terms).logsumexp(0) - math.log(num_noises)


def linearised_reverse_conditional(
    value: Tensor,
    value_and_jacobian: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: Tensor,
    start: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    r"""Approximate :math:`q(z \mid \theta)` by a Gaussian.

    It depends only on :math:`\theta` and the initial value ``start``.

    At most ``num_steps`` damped Gauss-Newton (Levenberg-Marquardt) steps from ``start`` minimise
    :math:`\|(\theta - g(z)) / s\|^2 + \|z\|^2`. At the z found, with Jacobian J, the precision is
    :math:`I + A^\top A` with :math:`A = \mathrm{diag}(s)^{-1} J`. Exact for linear generators and
    standard normal noise. Without gradient. A step costs :math:`O(\min(m, d)^2 \max(m, d))`.

    **Example:**

    >>> identity = lambda z: (z, torch.eye(2).expand(z.shape[:-1] + (2, 2)))
    >>> mean, rows = linearised_reverse_conditional(
    ...     torch.ones(2), identity, torch.ones(2), torch.zeros(2), num_steps=8)
    >>> mean, rows.round(decimals=3).abs()
    (tensor([0.5000, 0.5000]), tensor([[1., 0.],
            [0., 1.]]))

    :param value: ``(*batch, m)``.
    :param value_and_jacobian: function from ``(*batch, d)`` to the generator's value ``(*batch,
        m)`` and its Jacobian ``(*batch, m, d)``.
    :param scale: positive, broadcastable to ``(*batch, m)``.
    :param start: ``(*batch, d)``.
    :param num_steps: evaluations of the Jacobian beyond the first.
    :returns: the mean ``(*batch, d)``, and A, ``(*batch, m, d)``.
    """
    m, d = value.shape[-1], start.shape[-1]
    identity = torch.eye(min(m, d), dtype=torch.double, device=value.device)

    def evaluate(noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return half the sum of squares, its negative gradient, and A."""
        mean, jacobian = value_and_jacobian(noise)
        residual = ((value - mean) / scale).double()
        rows = jacobian / scale.unsqueeze(-1)
        loss = 0.5 * (residual.square().sum(-1) + noise.double().square().sum(-1))
        descent = (rows.double().mT @ residual.unsqueeze(-1)).squeeze(-1) - noise
        return loss, descent, rows

    def newton(rows: Tensor, descent: Tensor, damping: Tensor) -> Tensor:
        """Solve (I + A^T A + damping I) x = descent by the smaller Gram matrix."""
        rows, right, damping = rows.double(), descent.unsqueeze(-1), damping[..., None, None]
        if d <= m:
            factor = torch.linalg.cholesky_ex(rows.mT @ rows + identity + damping * identity)[0]
            return torch.cholesky_solve(right, factor).squeeze(-1)
        ridge = 1 + damping  # Woodbury's identity
        factor = torch.linalg.cholesky_ex(rows @ rows.mT + ridge * identity)[0]
        inside = rows.mT @ torch.cholesky_solve(rows @ right, factor)
        return ((right - inside) / ridge).squeeze(-1)

    with torch.no_grad():
        noise = start
        loss, descent, rows = evaluate(noise)
        damping = torch.full_like(loss, FIRST_DAMPING)
        for _ in range(num_steps):
            trial = noise + newton(rows, descent, damping).to(noise.dtype)
            trial_loss, trial_descent, trial_rows = evaluate(trial)
            better = trial_loss < loss
            loss = torch.where(better, trial_loss, loss)
            noise = torch.where(better[..., None], trial, noise)
            descent = torch.where(better[..., None], trial_descent, descent)
            rows = torch.where(better[..., None, None], trial_rows, rows)
            damping = torch.where(better, damping / DAMPING_FACTOR, damping * DAMPING_FACTOR)
        return noise, rows


def conditional_stein_discrepancy(
    points: Tensor,
    differences: Tensor,
    kernel: RadialKernel = "rbf",
    statistic: PairStatistic = "u",
    bandwidth: Tensor | None = None,
) -> Tensor:
    r"""Estimate the squared kernel Stein discrepancy of a semi-implicit distribution from p.

    .. math::
        \mathrm{mean}_{i, j}\; k(\theta_i, \theta_j)\, a_i^\top a_j, \qquad
        a_i = \nabla \log p(\theta_i) - \nabla_\theta \log q(\theta_i \mid z_i).

    Given :math:`\theta`, the expectation of the conditional score is the score of q, so that for
    independent pairs the expectation is that of :math:`k\, \Delta^\top \Delta'` with
    :math:`\Delta = \nabla \log p - \nabla \log q`. Pairs with i = j would add the variance of the
    conditional score.

    **Example:**

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> conditional_stein_discrepancy(x, torch.ones(2, 1), bandwidth=torch.tensor(1.0))
    tensor(0.6065)

    :param points: :math:`\theta`, ``(*batch, n, m)`` with n at least 2.
    :param differences: a, ``(*batch, n, m)``.
    :param kernel: ``"rbf"`` or ``"imq"``.
    :param statistic: ``"u"``: the mean over all pairs of different draws; ``"two-batch"``: over
        pairs of a draw of the first and one of the second half.
    :param bandwidth: ``(*batch)``; by default :func:`~pyro_implicit.ops.particle_bandwidth`, which
        grows with the points. With a constant in its place, points that spread would decrease the
        kernel, and so the estimate, whatever the density.
    :returns: ``(*batch)``, differentiable in points and differences; negative values are possible.

    **References:**

    1. Cheng et al. (2024), *Kernel Semi-Implicit Variational Inference* (its "vanilla" estimator is
       ``"two-batch"``).
    """
    if bandwidth is None:
        bandwidth = particle_bandwidth(points)
    evaluate = rbf_kernel if kernel == "rbf" else imq_kernel
    half = points.shape[-2] // 2
    if statistic == "two-batch":
        gram = evaluate(points[..., :half, :], points[..., half:, :], bandwidth)
        products = differences[..., :half, :] @ differences[..., half:, :].mT
        return (gram * products).mean((-2, -1))
    num_points = points.shape[-2]
    same = torch.eye(num_points, dtype=torch.bool, device=points.device)
    terms = evaluate(points, points, bandwidth) * (differences @ differences.mT)
    return terms.masked_fill(same, 0.0).sum((-2, -1)) / (num_points * (num_points - 1))


class NoiseGaussian:
    r"""A Gaussian of precision :math:`I + A^\top A`.

    :param mean: ``(*batch, d)``.
    :param rows: A, ``(*batch, m, d)``. With m < d, no d x d matrix is computed.
    """

    def __init__(self, mean: Tensor, rows: Tensor) -> None:
        self.mean, self.rows = mean, rows
        m, d = rows.shape[-2:]
        self.is_low_rank = m < d
        wide = rows.double()
        gram = wide @ wide.mT if self.is_low_rank else wide.mT @ wide
        identity = torch.eye(min(m, d), dtype=torch.double, device=rows.device)
        factor = torch.linalg.cholesky(gram + identity)
        #: Lower Cholesky factor of I + A A^T if that is smaller than I + A^T A, in float64.
        self.factor = factor if self.is_low_rank else factor.to(mean.dtype)

    @property
    def half_log_det(self) -> Tensor:
        """Return half the log-determinant of the precision, ``(*batch,)``."""
        return self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).to(self.mean.dtype)

    def squares(self, noise: Tensor) -> Tensor:
        """Return squared Mahalanobis distances ``(n, *batch)`` of noise ``(n, *batch, d)``."""
        # The noises as columns, so that no matrix is copied for each of them.
        offsets = (noise - self.mean).movedim(0, -1)
        if not self.is_low_rank:
            return (self.factor.mT @ offsets).square().sum(-2).movedim(-1, 0)
        squares = offsets.square().sum(-2) + (self.rows @ offsets).square().sum(-2)
        return squares.movedim(-1, 0)

    def log_ratio(self, noise: Tensor) -> Tensor:
        """Return the log-ratio to the standard normal density at noise ``(n, *batch, d)``."""
        return self.half_log_det + 0.5 * (noise.square().sum(-1) - self.squares(noise))

    def sample(self, num: int) -> Tensor:
        """Return draws ``(num, *batch, d)``."""
        white = torch.randn_like(self.mean.expand((num, *self.mean.shape))).movedim(0, -1)
        if not self.is_low_rank:
            steps = torch.linalg.solve_triangular(self.factor.mT, white, upper=True)
        else:  # Matheron's rule: a draw of N(0, I), conditioned on A z + e = 0
            rows, white = self.rows.double(), white.double()
            image = rows @ white
            image = image + torch.randn_like(image)
            steps = white - rows.mT @ torch.cholesky_solve(image, self.factor)
        return self.mean + steps.movedim(-1, 0).to(self.mean.dtype)


class NoiseProposal:
    r"""The mixture :math:`\tau = \sum_k n_k \tau_k / n` of Gaussians and the standard normal prior.

    Each component gives a fixed number of noises (stratified sampling).

    :param gaussians: components that share all noises but the prior's; the last are dropped if
        there are too few noises for all.
    :param num_noises: n, at least 2.
    """

    def __init__(self, gaussians: Sequence[NoiseGaussian], num_noises: int) -> None:
        num_prior = max(1, round(PRIOR_SHARE * num_noises))
        num_left = num_noises - num_prior
        self.gaussians = list(gaussians[:num_left])
        num_parts = len(self.gaussians)
        counts = [num_left // num_parts] * num_parts
        counts[0] += num_left - sum(counts)
        self.counts, self.num_noises = [*counts, num_prior], num_noises

    def sample(self, made_by: Tensor) -> Tensor:
        """Draw noises, and put the noise that made the value among them.

        It takes the place of a draw of one stratum, by the odds of each having made it.

        :param made_by: ``(*batch, d)``.
        :returns: ``(num_noises, *batch, d)``.
        """
        strata = [q.sample(n) for q, n in zip(self.gaussians, self.counts, strict=False)]
        strata.append(torch.randn_like(made_by.expand((self.counts[-1], *made_by.shape))))
        noise = torch.cat(strata)
        odds = self._log_parts(made_by.unsqueeze(0)).squeeze(1).movedim(0, -1)
        choice = torch.distributions.Categorical(logits=odds).sample().unsqueeze(-1)
        start = 0
        for index, count in enumerate(self.counts):
            noise[start] = torch.where(choice == index, made_by, noise[start])
            start += count
        return noise

    def log_ratio(self, noise: Tensor) -> Tensor:
        r""":math:`\log \tau(z) - \log N(z \mid 0, I)`.

        :param noise: ``(n, *batch, d)``.
        :returns: ``(n, *batch)``.
        """
        return self._log_parts(noise).logsumexp(0) - math.log(self.num_noises)

    def _log_parts(self, noise: Tensor) -> Tensor:
        """Return, for each stratum, the log of its number of noises times its density ratio."""
        parts = [q.log_ratio(noise) for q in self.gaussians]
        parts.append(torch.zeros_like(parts[0]))
        numbers = [part + math.log(n) for part, n in zip(parts, self.counts, strict=True)]
        return torch.stack(numbers)
