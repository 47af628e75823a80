# SPDX-License-Identifier: Apache-2.0
"""The affine frame of chains, in which posterior sds are near one."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.kernels.step_choice import finite_gradient
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, FramePolicy
from pyro_implicit.ops.ensemble_hmc import Score
from pyro_implicit.ops.matrices import geometric_mean
from pyro_implicit.ops.policy import MAX_ENTRIES
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.minibatches import BatchStream

__all__ = [
    "FrameKind",
    "WhiteningFrame",
    "estimate_frame",
    "fisher_frame",
    "frame_at",
    "minibatch_frame",
    "outlier_bounds",
    "widened_frame",
]


FrameKind = Literal["diagonal", "low-rank", "full"]


class WhiteningFrame(NamedTuple):
    r"""An affine map from white coordinates :math:`z` to points :math:`u`.

    .. math:: u = \mu + D (I + V (\Lambda - I) V^\top) z \quad\text{or}\quad u = \mu + D L z

    ``loc`` is :math:`\mu` and ``scale`` the diagonal of :math:`D`, both ``(d,)``; ``directions`` is
    :math:`V`, ``(d, rank)`` with orthonormal columns, and ``stretch`` the diagonal of
    :math:`\Lambda`, ``(rank,)``; ``scale_tril`` is the lower triangular :math:`L`, ``(d, d)``. In a
    diagonal frame the last three are None.
    """

    loc: Tensor
    scale: Tensor
    directions: Tensor | None = None
    stretch: Tensor | None = None
    scale_tril: Tensor | None = None

    @property
    def kind(self) -> FrameKind:
        """The kind of correlations."""
        if self.scale_tril is not None:
            return "full"
        return "diagonal" if self.directions is None else "low-rank"

    def to_points(self, white: Tensor) -> Tensor:
        """Map white coordinates ``(*batch, d)`` to points."""
        if self.scale_tril is not None:
            white = white @ self.scale_tril.mT
        return self.loc + self.scale * self._stretched(white, inverse=False)

    def to_white(self, points: Tensor) -> Tensor:
        """Map points ``(*batch, d)`` to white coordinates."""
        white = self._stretched((points - self.loc) / self.scale, inverse=True)
        if self.scale_tril is not None:
            white = torch.linalg.solve_triangular(self.scale_tril, white.mT, upper=False).mT
        return white

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Map a gradient by points to one by white coordinates, ``(*batch, d)``."""
        gradient = self._stretched(gradient * self.scale, inverse=False)
        return gradient if self.scale_tril is None else gradient @ self.scale_tril

    def _stretched(self, white: Tensor, inverse: bool) -> Tensor:
        if self.directions is None or self.stretch is None:
            return white
        stretch = 1 / self.stretch if inverse else self.stretch
        return white + (white @ self.directions * (stretch - 1)) @ self.directions.mT


@torch.no_grad()
def estimate_frame(
    draws: Tensor, kind: Literal["diagonal", "full"], policy: FramePolicy = DEFAULT.frame
) -> WhiteningFrame:
    """Estimate a frame from the moments of draws.

    ``"full"`` takes their covariance; with fewer than ten draws for each dimension its correlations
    are shrunk towards 0. Coordinates further than six interquartile ranges from their median are
    clamped first.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> draws = torch.randn(1000, 2) @ torch.tensor([[1.0, 3.0], [0.0, 0.1]])
    >>> frame = estimate_frame(draws, "full")
    >>> frame.to_white(draws).mT.cov().round(decimals=3).abs()
    tensor([[1., 0.],
            [0., 1.]])

    :param draws: ``(n, d)``, finite. A coordinate that does not vary keeps its unit.
    :param policy: the limits.
    :raises ValueError: for draws that are not finite.
    """
    draws, varies = _clamped(draws, policy)
    loc = draws.mean(0)
    scale = torch.where(varies, draws.std(0), 1.0)
    if kind == "diagonal" or len(loc) == 1:
        return WhiteningFrame(loc, scale)
    standard = torch.where(varies, (draws - loc) / scale, 0.0)
    factor = _factor(standard, policy).to(draws.dtype)
    return WhiteningFrame(loc, scale, scale_tril=factor)


@torch.no_grad()
def fisher_frame(
    draws: Tensor, scores: Tensor, policy: FramePolicy = DEFAULT.frame
) -> WhiteningFrame:
    r"""Estimate a low-rank frame in which the scores of draws are closest to minus the draws.

    This is the normal law of least Fisher divergence. Its covariance :math:`\Sigma` solves

    .. math:: \Sigma \, C_s \, \Sigma = C_u

    with the covariances :math:`C_u` of the draws and :math:`C_s` of the scores (Seyboldt et al.
    2026, arXiv 2603.18845). The diagonal has the ratios of sds as its variances. In the units of
    this diagonal, the equation is solved in the span of the first principal axes of draws and of
    scores, at most 32 of each; those of scores are the narrowest directions. If the density is
    normal and narrow or wide in these directions only, the solution is exact however few and
    correlated the draws are, because draws and scores have the same noise. Otherwise noise changes
    a variance by a factor of about :math:`1 + \sqrt{d/n}` (Marchenko and Pastur); directions within
    it are left as they are.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> variance = torch.tensor([100.0, 1.0, 0.01])
    >>> mix = torch.linalg.qr(torch.randn(3, 3)).Q
    >>> draws = torch.randn(20, 3) * variance.sqrt() @ mix.T
    >>> frame = fisher_frame(draws, -draws @ mix / variance @ mix.T)
    >>> points = frame.to_points(torch.eye(3)) - frame.loc
    >>> torch.allclose(points.T @ points, mix * variance @ mix.T, rtol=1e-2)
    True

    :param draws: ``(n, d)``, finite. A coordinate that does not vary keeps its unit.
    :param scores: gradients of the log-density at the draws, ``(n, d)``, finite.
    :param policy: the limits.
    :raises ValueError: for draws or scores that are not finite.
    """
    draws, varies = _clamped(draws, policy)
    scores, has_slope = _clamped(scores, policy)
    loc, varies = draws.mean(0), varies & has_slope
    scale = torch.where(varies, (draws.std(0) / scores.std(0)).sqrt(), 1.0)
    count, dim = draws.shape
    rank = min(policy.max_rank, dim, (count - 1) // 2)
    if rank == 0:
        return WhiteningFrame(loc, scale)
    both = [(draws - loc) / scale, (scores - scores.mean(0)) * scale]
    both = [torch.where(varies, one, 0.0).double() for one in both]
    axes = [torch.svd_lowrank(one, q=rank, niter=4)[2] for one in both]
    basis, _ = torch.linalg.qr(torch.cat(axes, -1))
    # Where neither varies, their ratio is 1.
    ridge = torch.finfo(draws.dtype).eps ** policy.rounding_power
    identity = ridge * torch.eye(basis.shape[-1]).to(basis)
    of_draws, of_scores = ((one @ basis).mT.cov() + identity for one in both)
    variance, vectors = torch.linalg.eigh(geometric_mean(of_draws, of_scores))
    noise = policy.axis_margin * (1 + math.sqrt(dim / count))
    kept = variance.log().abs() > math.log(noise)
    if not kept.any():
        return WhiteningFrame(loc, scale)
    directions = (basis @ vectors[:, kept]).to(draws)
    return WhiteningFrame(loc, scale, directions, variance[kept].sqrt().to(draws))


def frame_at(
    draws: Tensor,
    kind: FrameKind,
    score: Score,
    chunk: int,
    policy: FramePolicy = DEFAULT.frame,
    split: int | None = None,
) -> WhiteningFrame:
    """Estimate a frame of some kind; one of low rank takes scores at some of the draws.

    :param draws: ``(n, d)``, finite.
    :param score: the log-density of points and its gradient.
    :param chunk: the number of points at which it is evaluated, for which it may be recorded.
    :param split: if given, the frame is that of the first coordinates.
    """
    if kind != "low-rank":
        return estimate_frame(draws[:, :split], kind, policy)
    number = chunk * max(1, min(len(draws), policy.max_scored) // chunk)
    some = draws[torch.linspace(0, len(draws) - 1, number).long()]
    scores = torch.cat([score(part)[1] for part in some.split(chunk)])
    is_sound = scores.isfinite().all(-1)
    return fisher_frame(some[is_sound, :split], scores[is_sound, :split], policy)


def _clamped(values: Tensor, policy: FramePolicy) -> tuple[Tensor, Tensor]:
    """Clamp outliers, and tell which coordinates ``(d,)`` vary beyond rounding.

    :raises ValueError: for values that are not finite.
    """
    if not values.isfinite().all():
        raise ValueError("a frame needs finite draws. Cure: leave out those with NaN or infinities")
    values = values.clamp(*outlier_bounds(values, policy.outlier_ranges))
    info = torch.finfo(values.dtype)
    rounding = info.eps * values.abs().amax(0) + math.sqrt(info.tiny)  # dead weights decay to 1e-40
    return values, values.std(0) > rounding


def outlier_bounds(draws: Tensor, ranges: float) -> tuple[Tensor, Tensor]:
    """Return the bounds, ``(d,)``, beyond which draws are outliers; infinite if none vary.

    Clamped to them, neither a lost chain nor a tail without a variance sets the scale.

    **Example:**

    >>> draws = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e9]).unsqueeze(-1)
    >>> outlier_bounds(draws, 6.0)  # the median is 4, the quartiles are 2 and 6
    (tensor([-20.]), tensor([28.]))

    :param draws: ``(n, d)``.
    :param ranges: interquartile ranges from the median.
    """
    ordered = draws.sort(0).values
    low, middle, high = (ordered[len(draws) * quarter // 4] for quarter in (1, 2, 3))
    reach = ranges * (high - low)
    reach = torch.where(reach > 0, reach, torch.full_like(reach, torch.inf))
    return middle - reach, middle + reach


def _factor(standard: Tensor, policy: FramePolicy) -> Tensor:
    """Factor the correlations of standardised draws in double precision."""
    count, dim = standard.shape
    identity = torch.eye(dim, dtype=torch.double, device=standard.device)
    standard = standard.double()
    correlation = standard.mT @ standard / (count - 1)
    weight = 0.0 if count >= policy.draws_per_dim * dim else dim / (count + dim)
    correlation = (1 - weight) * correlation + weight * identity
    correlation.diagonal().masked_fill_((standard == 0).all(0), 1.0)
    ridge = torch.finfo(torch.double).eps ** policy.rounding_power
    return torch.linalg.cholesky(correlation + ridge * identity)


@torch.no_grad()
def widened_frame(
    target: Target, draws: Tensor, stream: BatchStream, policy: FramePolicy = DEFAULT.frame
) -> WhiteningFrame:
    r"""Return the full frame of draws, widened in coordinates in which they are far too narrow.

    The posterior's sd of a coordinate, given the coordinates before it, is at least
    :math:`E[h]^{-1/2}`, with h the curvature of the log-density along it. If the mean of h over
    draws and minibatches allows ten times the sd of these draws, the coordinate gets the width
    :math:`E[h]^{-1/2}`, at most the prior's sd, and no correlations.

    :param draws: unconstrained, finite draws, ``(num_draws, latent_dim)``.
    :param policy: the limits.
    """
    frame = estimate_frame(draws, "full", policy)
    sd = draws.std(0)
    if frame.scale_tril is not None:
        sd = sd * frame.scale_tril.diagonal()
    width = _allowed_width(target, draws, sd, stream, policy)
    wider = width > sd
    if not wider.any():
        return frame
    frame = estimate_frame(torch.where(wider, draws.mean(0), draws), "full", policy)
    return frame._replace(scale=torch.where(wider, width, frame.scale))


def _allowed_width(
    target: Target, draws: Tensor, sd: Tensor, stream: BatchStream, policy: FramePolicy
) -> Tensor:
    """Return the widths that the log-density allows; the sd itself if they are not far larger."""
    with seeded(0, draws.device):
        prior = target.sample_prior(policy.num_draws)
    most = prior[prior.isfinite().all(-1)].std(0)
    width, reach = sd.clone(), policy.too_narrow * sd.clamp(min=1e-30)
    free = (reach < most).nonzero().squeeze(-1)
    while len(free):
        step = torch.minimum(reach, most)[free]
        drop = _drop(target, draws, free, step, stream)
        allowed = drop < 1
        has_grown = width[free] > sd[free]
        # At the end, the width that the curvature over the last step implies.
        found = torch.maximum(width[free], step * drop.clamp(min=1).rsqrt())
        width[free] = torch.where(allowed | has_grown, found, width[free])
        free = free[allowed & (step < most[free])]
        reach = policy.too_narrow * reach
    return width


def _drop(
    target: Target, draws: Tensor, which: Tensor, step: Tensor, stream: BatchStream
) -> Tensor:
    """Average curvature times squared step over draws and minibatches, for some coordinates."""
    drops = []
    for seed, batch in enumerate(stream.probed):
        gradient = finite_gradient(target.on(batch, seed=seed).score)
        start = draws[seed * len(draws) // len(stream.probed)]
        signed = step if seed % 2 else -step
        before = gradient(start.unsqueeze(0))[0]
        after = []
        # Sixteen points a pass, so that many coordinates do not fill the memory.
        for part, sizes in zip(which.split(16), signed.split(16), strict=True):
            points = start.repeat(len(part), 1)
            rows = torch.arange(len(part), device=draws.device)
            points[rows, part] += sizes
            after.append(gradient(points)[rows, part])
        drops.append((before[which] - torch.cat(after)) * signed)
    drop = torch.stack(drops).mean(0)
    return torch.where(drop.isfinite(), drop, torch.inf)


@torch.no_grad()
def minibatch_frame(
    target: Target, sampler: Sampler, stream: BatchStream, policy: ChainPolicy = DEFAULT
) -> WhiteningFrame:
    r"""Return the frame of a guide's draws: full up to 100 dimensions, diagonal above.

    A full frame is widened in coordinates in which the draws are far narrower than the posterior,
    see :func:`widened_frame`. Coordinates that do not vary, and all coordinates if fewer than
    ``policy.frame.least_draws`` are given, have the scales :math:`(s^{-2} + F)^{-1/2}`, where s is
    the scale of the prior and F the information of the data: with E minibatches in an epoch, the
    variance of their gradients over E - 1, which is the diagonal of Fisher's information if the
    model is right. F is the mean over given draws, because the region between the members of an
    ensemble has no mass.
    """
    limits = policy.frame
    dim, given = target.latent_dim, sampler.num_given
    count = given or (limits.draws_per_dim * dim if dim <= MAX_DENSE_DIM else limits.num_draws)
    if dim <= MAX_DENSE_DIM and count >= limits.least_draws:
        draws = sampler.draw(max(count, limits.num_draws))
        draws = draws[draws.isfinite().all(-1)]
        if len(draws) >= limits.least_draws and bool((draws != draws[:1]).any(0).all()):
            return widened_frame(target, draws, stream, limits)
    chunk = max(1, min(count, MAX_ENTRIES // dim))
    moments = _Moments(dim, target.init_loc)
    points = None
    if given:
        points = sampler.draw(count)
        moments.add(points)
        points = points[points.isfinite().all(-1)][: limits.num_points]
    else:
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            moments.add(sampler.draw(size))
    scale = moments.sd()
    fixed = scale == 0 if count >= limits.least_draws else torch.ones_like(scale, dtype=torch.bool)
    if fixed.any():
        prior = _Moments(dim, target.init_loc)
        for start in range(0, limits.num_draws, chunk):
            prior.add(target.sample_prior(min(chunk, limits.num_draws - start)))
        spread = prior.sd()
        spread = torch.where(spread > 0, spread, 1.0)
        if points is None or not len(points):
            points = moments.mean.unsqueeze(0)
        spread = (spread**-2 + _information(target, points, stream)).rsqrt()
        scale = torch.where(fixed, spread, scale)
    return WhiteningFrame(moments.mean.clone(), scale)


def _information(target: Target, points: Tensor, stream: BatchStream) -> Tensor:
    """Average the diagonal of Fisher's information over points; 0 for non-finite gradients."""
    if stream.epoch_length == 1:
        return torch.zeros_like(points[0])
    each = [_Moments(points.shape[-1], points) for _ in points]
    for seed, batch in enumerate(stream.probed):
        found = target.on(batch, seed=seed).score(points)[1]
        for moments, gradient in zip(each, found, strict=True):
            moments.add(gradient.unsqueeze(0))
    information = torch.stack([moments.sd().square() for moments in each]).mean(0)
    return information / (stream.epoch_length - 1)


class _Moments:
    def __init__(self, dim: int, like: Tensor) -> None:
        self.count = 0
        self.mean = like.new_zeros(dim)
        self._squares = like.new_zeros(dim)

    def add(self, draws: Tensor) -> None:
        draws = draws[draws.isfinite().all(-1)]
        for draw in draws:  # Welford's recursion: exact zeros for coordinates that do not vary
            self.count += 1
            change = draw - self.mean
            self.mean = self.mean + change / self.count
            self._squares = self._squares + change * (draw - self.mean)

    def sd(self) -> Tensor:
        return (self._squares / max(1, self.count - 1)).clamp(min=0).sqrt()
