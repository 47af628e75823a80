# SPDX-License-Identifier: Apache-2.0
"""Distances between two sets of draws: pure functions of tensors ``(num_draws, dim)``.

Random directions and subsets come from a generator of their own with a fixed seed: the same
call gives the same number, and Pyro's random stream is left as it was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import rounding
from pyro_implicit.diagnostics.policy import DISTANCES
from pyro_implicit.ops.policy import MAX_ENTRIES

__all__ = [
    "maximum_mean_discrepancy",
    "pairwise_distances",
    "sliced_wasserstein",
    "sliced_wasserstein_floor",
    "sliced_wasserstein_interval",
    "whiten",
]


def sliced_wasserstein(
    x: Tensor, y: Tensor, num_projections: int = 500, p: int = 2, *, seed: int = 0
) -> Tensor:
    r"""Sliced Wasserstein distance of order ``p``,

    .. math:: SW_p(x, y)^p = \mathbb{E}_u \int_0^1 |F^{-1}_{u \cdot x}(t)
        - F^{-1}_{u \cdot y}(t)|^p \, dt,

    the mean over ``num_projections`` random unit directions :math:`u` of the one-dimensional
    distances between the projected draws. For equal numbers of draws the integral is the mean
    over order statistics; for unequal numbers it is the exact integral of the two step-shaped
    quantile functions, so no draw is dropped or interpolated. It is in the units of ``x``.

    **Example:**

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> print(f"{sliced_wasserstein(x, x + 3):.3f}")
    3.000

    :param x: draws ``(n, dim)``.
    :param y: draws ``(m, dim)``.
    :param num_projections: number of directions.
    :param p: order of the distance, at least 1.
    :param seed: seed of the directions.
    :returns: a scalar tensor, differentiable in ``x`` and ``y``.
    :raises ValueError: if ``x`` and ``y`` are not two matrices with the same number of columns.

    **References:**

    1. Bonneel, Rabin, Peyré, Pfister (2015), *Sliced and Radon Wasserstein barycenters of
       measures*.
    """
    _check_matrices(x, y)
    # Projections of draws far from the origin round away their spread in float32.
    center = y.detach().mean(0)
    x, y = x - center, y - center
    directions = _directions(x, num_projections, _generator(x, seed))
    x_index, y_index, weights = _quantile_steps(x.size(0), y.size(0), x)
    chunk_size = max(1, MAX_ENTRIES // (x.size(0) + y.size(0)))
    total = x.new_zeros(())
    for chunk in directions.split(chunk_size):
        x_sorted = (chunk @ x.mT).sort(dim=-1).values
        y_sorted = (chunk @ y.mT).sort(dim=-1).values
        gap = (x_sorted[:, x_index] - y_sorted[:, y_index]).abs().pow(p)
        total = total + (gap @ weights).sum()
    return (total / num_projections).pow(1 / p)


def sliced_wasserstein_floor(
    reference: Tensor,
    num_samples: int | None = None,
    num_projections: int = 500,
    effective_size: float | None = None,
    *,
    seed: int = 0,
) -> Tensor:
    r"""Sliced 2-Wasserstein distance that sampling noise alone gives exact draws.

    It is the distance between ``num_samples`` independent exact draws and the reference. The only
    exact draws at hand are the ``m`` rows of ``reference``, so two random halves are compared. The
    squared distance of finite sets goes as :math:`1/n + 1/m_e`, with :math:`m_e` the number of
    independent draws that the reference is worth, hence the distance of the halves is multiplied by
    :math:`\sqrt{(1/n + 1/m_e) / (4/m)}`, which is :math:`\sqrt{1/2}` for ``num_samples``
    :math:`= m = m_e`. The root mean square over a few splits is returned. Well-separated modes,
    whose weights fluctuate between chains, make the true floor higher than this estimate.

    **Example:**

    >>> draws = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    >>> bool(0.02 < sliced_wasserstein_floor(draws) < 0.1)
    True

    :param reference: exact draws ``(m, dim)``, at least 4.
    :param num_samples: number of draws to be compared with the reference; default ``m``.
    :param num_projections: number of directions.
    :param seed: seed of the directions and of the splits.
    :param effective_size: effective sample size of the reference; default: its number of draws.
    :returns: a scalar tensor.
    :raises ValueError: if the reference has fewer than 4 draws.
    """
    size = reference.size(0)
    if size < 4:
        raise ValueError(
            f"reference has {size} draws, but a sampling floor needs at least 4. Cure: more draws"
        )
    generator = _generator(reference, seed)
    half = size // 2
    squared = reference.new_zeros(())
    for _ in range(DISTANCES.num_splits):
        rows = torch.randperm(size, generator=generator, device=reference.device)
        first, second = reference[rows[:half]], reference[rows[half : 2 * half]]
        squared = squared + sliced_wasserstein(first, second, num_projections, seed=seed).square()
    rescale = (1 / (num_samples or size) + 1 / (effective_size or size)) / (2 / half)
    return (squared / DISTANCES.num_splits * rescale).sqrt()


@torch.no_grad()
def sliced_wasserstein_interval(
    x: Tensor, y: Tensor, effective_size: float | None = None, *, seed: int = 0
) -> tuple[float, float]:
    r"""95 % interval of the sliced 2-Wasserstein distance of the distributions behind two sets.

    The distance of the sets exceeds that of the distributions by sampling noise. With :math:`d` the
    difference of the projected sets' quantile functions and :math:`e` its noise, which a bootstrap
    gives, a distance :math:`\lambda |d|` is in the interval unless :math:`|\lambda d + e|` is above
    or below :math:`|d|` in all but 2.5 % of the resamples.

    **Example:**

    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(2, 1000, 1, generator=generator)
    >>> low, high = sliced_wasserstein_interval(x + 0.5, y)
    >>> 0.3 < low < 0.5 < high < 0.7, sliced_wasserstein_interval(x, y)[0]
    (True, 0.0)

    :param x: independent draws ``(n, dim)``.
    :param y: draws ``(m, dim)``.
    :param effective_size: effective sample size of ``y``; default: ``m``.
    :param seed: seed of the directions and of the resamples.
    :returns: both ends; the lower one is 0 where chance alone explains the distance.
    """
    _check_matrices(x, y)
    generator = _generator(x, seed)
    center = y.mean(0)
    x, y = x - center, y - center
    directions = _directions(x, DISTANCES.bootstrap_projections, generator)
    difference, noise = torch.zeros(()).to(x), torch.zeros(()).to(x)
    for draws, sign, size in ((x, 1.0, len(x)), (y, -1.0, effective_size or len(y))):
        values = _quantiles(draws @ directions.mT)
        few = _random_rows(draws, DISTANCES.bootstrap_rows, seed)
        own = _resampled_quantiles(few @ directions.mT, generator)
        # Noise of as many draws as there are, not of the few that are resampled.
        own = sign * (len(few) / size) ** 0.5 * own
        difference, noise = difference + sign * values, noise + own
    square = difference.square().mean()
    if square == 0 and not noise.any():
        return 0.0, 0.0
    length = square.sqrt()
    own = noise.square().mean((1, 2))
    farthest = length + DISTANCES.reach * own.max().sqrt()
    candidates = torch.linspace(0, 1, DISTANCES.num_candidates).to(x) * farthest
    # A difference that noise nearly cancels may lie in the direction of the most noise.
    flat = noise.flatten(1)
    share = torch.linalg.eigh(flat @ flat.mT).eigenvectors[:, -1]
    widest = (share @ flat).view_as(difference)
    first, second = (_ends(way, noise, square, candidates) for way in (difference, widest))
    low, high = first.low, max(first.high, second.high)
    is_explained = first.is_explained or second.is_explained
    if not is_explained and square < own.min():  # sets nearer to each other than chance allows
        high = own.quantile(1 - DISTANCES.tail).sqrt().item()
    # In units of the distance in all directions; the bootstrap has only a few of them.
    unit = (sliced_wasserstein(x, y, seed=seed) / length).item() if square > 0 else 1.0
    return low * unit, max(low, high) * unit


class _Ends(NamedTuple):
    """Both ends of an interval, and whether any distance explains the observed one."""

    low: float
    high: float
    is_explained: bool


def _ends(way: Tensor, noise: Tensor, square: Tensor, candidates: Tensor) -> _Ends:
    """Return the interval of distances if the true difference has the direction ``way``."""
    norm = way.square().mean().sqrt().clamp(min=torch.finfo(way.dtype).tiny)
    along = (noise * way).mean((1, 2)) / norm
    distances = candidates.unsqueeze(-1)
    shown = distances.square() + 2 * distances * along + noise.square().mean((1, 2))
    is_low = (shown >= square).double().mean(-1) >= DISTANCES.tail
    is_high = (shown <= square).double().mean(-1) >= DISTANCES.tail
    low = candidates[int(is_low.double().argmax())].item()  # the first that shows as much
    is_explained = bool(is_high.any())
    return _Ends(low, candidates[is_high].max().item() if is_explained else low, is_explained)


def maximum_mean_discrepancy(
    x: Tensor, y: Tensor, max_rows: int = 2000, *, seed: int = 0
) -> Tensor:
    r"""Unbiased estimate of the squared maximum mean discrepancy,

    .. math:: \frac{1}{n(n-1)} \sum_{i \ne j} k(x_i, x_j) + \frac{1}{m(m-1)} \sum_{i \ne j}
        k(y_i, y_j) - \frac{2}{nm} \sum_{i,j} k(x_i, y_j),

    with :math:`k(a, b) = \exp(-|a - b|^2 / 2h^2)` and :math:`h` the median distance between
    pooled draws. Being unbiased, it is negative about half of the time when both sets come
    from one distribution.

    **Example:**

    >>> x = torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    >>> bool(maximum_mean_discrepancy(x, x + 3) > 0.5)
    True

    :param x: draws ``(n, dim)``, at least 2.
    :param y: draws ``(m, dim)``, at least 2.
    :param max_rows: a larger set is reduced to a random subset of this size.
    :param seed: seed of the subset.
    :returns: a scalar tensor.
    :raises ValueError: if the shapes do not fit together.

    **References:**

    1. Gretton, Borgwardt, Rasch, Schölkopf, Smola (2012), *A kernel two-sample test*, eq. 3.
    """
    _check_matrices(x, y)
    if min(x.size(0), y.size(0)) < 2:
        raise ValueError(
            f"maximum_mean_discrepancy needs at least 2 draws of each, but got {x.size(0)} of x "
            f"and {y.size(0)} of y. Cure: more draws"
        )
    x, y = _random_rows(x, max_rows, seed), _random_rows(y, max_rows, seed + 1)
    xx, yy, xy = torch.pdist(x), torch.pdist(y), pairwise_distances(x, y).flatten()
    bandwidth = torch.cat([xx, yy, xy]).detach().median().clamp(min=torch.finfo(x.dtype).tiny)

    def mean_kernel(distance: Tensor) -> Tensor:
        return (distance / bandwidth).square().mul(-0.5).exp().mean()

    return mean_kernel(xx) + mean_kernel(yy) - 2 * mean_kernel(xy)


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    r"""Return the Euclidean distances of all pairs, accurate also far from the origin.

    The default mode of ``torch.cdist`` takes :math:`|x|^2 + |y|^2 - 2 x^\top y`, which loses
    distances far smaller than the points' distance from the origin. Up to 300 coordinates the
    differences are squared; above, the same formula is evaluated in double precision around the
    mean of ``y``.

    **Example:**

    >>> x = 20_000 + torch.arange(30.0)[:, None] / 8
    >>> pairwise_distances(x, x)[0, :3]
    tensor([0.0000, 0.1250, 0.2500])

    :param x: points ``(n, dim)``.
    :param y: points ``(m, dim)``.
    :returns: ``(n, m)``.
    """
    if x.size(1) <= DISTANCES.exact_dim:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    center = y.detach().double().mean(0)
    return torch.cdist(x.double() - center, y.double() - center).to(x.dtype)


def whiten(x: Tensor, reference: Tensor) -> Tensor:
    r"""Maps draws to the frame in which ``reference`` has mean 0 and covariance :math:`I`.

    It is :math:`L^{-1}(x - \mu)` with :math:`LL^\top` the reference's covariance.

    **Example:**

    >>> draws = torch.randn(1000, 2) @ torch.tensor([[1.0, 5.0], [0.0, 0.1]]) + 7
    >>> torch.allclose(whiten(draws, draws).mT.cov(), torch.eye(2), atol=1e-3)
    True

    :param x: draws ``(n, dim)``.
    :param reference: draws ``(m, dim)``, with more draws than dimensions.
    :returns: ``(n, dim)``.
    :raises ValueError: if the covariance of ``reference`` is singular.
    """
    _check_matrices(x, reference)
    mean = reference.mean(dim=0)
    # QR of the draws is the covariance's Cholesky factor without squaring its condition number,
    # which strongly correlated posteriors in float32 need; only the signs are to be fixed.
    upper = torch.linalg.qr(reference - mean, mode="r").R
    diagonal = upper.diagonal()
    if reference.size(0) <= x.size(1) or (diagonal.abs() <= rounding(reference)).any():
        raise ValueError(
            f"the covariance of the {reference.size(0)} reference draws in {x.size(1)} dimensions "
            "is singular. Cure: leave out constant or duplicated coordinates, or more draws"
        )
    factor = (upper * diagonal.sign()[:, None]).mT / (reference.size(0) - 1) ** 0.5
    return torch.linalg.solve_triangular(factor, (x - mean).mT, upper=False).mT


def _quantile_steps(n: int, m: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order statistics of both sets on the pieces where both are constant, and their lengths."""
    # In units of 1/(nm) all steps are whole numbers, so that coinciding steps merge exactly.
    first = torch.arange(1, n + 1, device=like.device) * m
    second = torch.arange(1, m + 1, device=like.device) * n
    ends = torch.cat([first, second]).unique()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    weights = lengths.to(like.dtype) / (n * m)
    return (ends - 1) // m, (ends - 1) // n, weights


def _directions(x: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return random unit vectors, ``(number, dim)``."""
    shape = (number, x.size(1))
    directions = torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
    return directions / directions.norm(dim=-1, keepdim=True)


def _levels(like: Tensor) -> Tensor:
    """Return the probabilities of the quantiles that the interval compares."""
    return (torch.arange(DISTANCES.num_levels, device=like.device) + 0.5) / DISTANCES.num_levels


def _quantiles(projected: Tensor) -> Tensor:
    ranks = (_levels(projected) * len(projected)).long().clamp(max=len(projected) - 1)
    return projected.sort(0).values[ranks]


def _resampled_quantiles(projected: Tensor, generator: torch.Generator) -> Tensor:
    """Deviations of resamples' quantiles, ``(num_resamples, num_levels, num_columns)``."""
    count, device = len(projected), projected.device
    values, order = projected.mT.contiguous().sort(-1)
    levels = _levels(projected) * count
    levels = levels.to(projected).expand(len(values), -1).contiguous()
    found = []
    for _ in range(DISTANCES.num_bootstrap):
        rows = torch.randint(count, (count,), generator=generator, device=device)
        weights = torch.bincount(rows, minlength=count).to(projected)
        ranks = torch.searchsorted(weights[order].cumsum(-1), levels).clamp(max=count - 1)
        found.append(values.gather(-1, ranks).mT)
    return torch.stack(found) - _quantiles(projected)


def _random_rows(x: Tensor, max_rows: int, seed: int) -> Tensor:
    if x.size(0) <= max_rows:
        return x
    return x[torch.randperm(x.size(0), generator=_generator(x, seed), device=x.device)[:max_rows]]


def _generator(like: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(device=like.device).manual_seed(seed)


def _check_matrices(x: Tensor, y: Tensor) -> None:
    if x.dim() != 2 or y.dim() != 2 or x.size(1) != y.size(1):
        raise ValueError(
            "draws must have shapes (n, dim) and (m, dim) with the same dim, but got "
            f"{tuple(x.shape)} and {tuple(y.shape)}. Cure: flatten the sites of a draw into one row"
        )
    if not (math.prod(x.shape) and math.prod(y.shape)):
        raise ValueError(
            f"x or y is empty: shapes {tuple(x.shape)} and {tuple(y.shape)}. Cure: at least one "
            "draw and one coordinate in each"
        )
