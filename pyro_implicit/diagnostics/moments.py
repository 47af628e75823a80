# SPDX-License-Identifier: Apache-2.0
"""Significant errors of means and standard deviations of whitened draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.policy import MOMENTS, REPORT
from pyro_implicit.ops.ensemble_hmc import Score
from pyro_implicit.ops.jacobian import lanczos

__all__ = [
    "CollapsedError",
    "Fault",
    "Fold",
    "MomentErrors",
    "Product",
    "Resolution",
    "Rows",
    "Whitened",
    "halves",
    "held_out_frames",
    "moment_errors",
    "ratio_by_difference",
    "rounding",
    "whiten_draws",
]


#: A weight, and two sets of vectors ``(n, m)``: each draw stands for weight * left right^T.
Product = tuple[float, Tensor, Tensor]
#: Coordinates of a direction with their weights.
Terms = tuple[tuple[int, float], ...]


class Fault(NamedTuple):
    """A significant error along one direction.

    The ``error`` of a ``"mean"`` is guide minus posterior, in standard deviations of the guide; the
    error of an ``"sd"`` is the ratio guide to posterior. ``terms`` are the leading coordinates of
    the direction with their weights, in standard deviations of the guide; the first weight is 1.
    """

    kind: Literal["mean", "sd"]
    error: float
    terms: Terms

    @property
    def size(self) -> float:
        """The size of the error: a mean in sds, an sd as the absolute log ratio."""
        if self.kind == "mean":
            return abs(self.error)
        return abs(math.log(self.error)) if 0 < self.error < math.inf else math.inf


class Resolution(NamedTuple):
    """The smallest errors that would be significant in every coordinate.

    ``mean`` is in standard deviations, ``sd`` is a factor.
    """

    mean: float = 0.0
    sd: float = 1.0


class MomentErrors(NamedTuple):
    """The worst significant errors of a guide's moments, in any tested direction.

    ``mean_error`` is in standard deviations of the guide, 0 if no error is significant.
    ``sd_ratios`` are the smallest and the largest ratio of standard deviations, guide to posterior,
    1 if no error is significant. ``faults`` has the directions, the worst of each kind first.
    ``resolution`` is the size of detectable errors.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    faults: tuple[Fault, ...] = ()
    resolution: Resolution = Resolution()


def ratio_by_difference(excess: float) -> float:
    """Return the ratio of standard deviations, guide to posterior.

    :param excess: the difference of the variances, divided by the guide's variance.
    """
    return (1 - excess) ** -0.5 if excess < 1 else math.inf


class Rows(NamedTuple):
    """The tested terms, one row for each draw: ``shifts`` ``(n, m)``, ``products``, ``constants``
    ``(n,)``."""

    shifts: Tensor
    products: list[Product]
    constants: Tensor

    def at(self, rows: slice | Tensor) -> Rows:
        """Return some of the rows."""
        products = [(weight, left[rows], right[rows]) for weight, left, right in self.products]
        return Rows(self.shifts[rows], products, self.constants[rows])


class Fold(NamedTuple):
    """Rows that choose the worst directions, and other rows that are tested.

    :param axes: unit columns, ``(m, m)``, that are always tested; None for the identity.
    :param unit: draws ``(n, m)`` whose standard deviation along a direction is the unit of length,
        for a frame in which the guide's covariance is not the identity.
    """

    train: Rows
    test: Rows
    axes: Tensor | None
    unit: Tensor | None = None


def halves(
    shifts: Tensor,
    products: list[Product],
    axes: Tensor | None,
    constants: Tensor | None = None,
    unit: Tensor | None = None,
) -> list[Fold]:
    """Return two folds of rows in one frame; each half is tested once.

    The other arguments are those of :class:`Rows` and :class:`Fold`.

    :param constants: by default 0.
    """
    constants = shifts.new_zeros(len(shifts)) if constants is None else constants
    rows = Rows(shifts, products, constants)
    even, odd = rows.at(slice(0, None, 2)), rows.at(slice(1, None, 2))
    return [Fold(even, odd, axes, unit), Fold(odd, even, axes, unit)]


@torch.no_grad()
def moment_errors(
    folds: Sequence[Fold],
    false_alarm: float,
    to_ratio: Callable[[float], float] = ratio_by_difference,
) -> MomentErrors:
    r"""Test that shifts and products have mean 0, along axes and in the worst directions.

    The worst directions of one half of the draws are tested on the other half. This detects wrong
    correlations without a test for each pair of coordinates.

    The ``shifts`` of :class:`Rows` are from guide to posterior, in standard deviations of the
    guide. The sum of the ``products``, plus ``constants`` times the identity, is the excess of the
    guide's covariance, one matrix for each draw.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(2000, 2)
    >>> y = x @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])  # variances right, correlation 0.8
    >>> found = moment_errors(halves(y - x, [(1.0, y, y), (-1.0, x, x)], torch.eye(2)), 0.01)
    >>> found.sd_ratios[1] > 1.6, found.faults[0].terms[1][0]
    (True, 1)

    :param folds: each draw is tested in one of them; axes of all folds are the same coordinates.
    :param false_alarm: the probability that any error is significant for a perfect guide.
    :param to_ratio: a function from an excess to a ratio of standard deviations.
    :returns: significant errors; they are infinite if fourth powers overflow.
    """
    if not all(_is_tame(part) for fold in folds for part in _parts(fold.test)):
        return MomentErrors(math.inf, (to_ratio(0.0), math.inf), (), Resolution(math.inf, math.inf))
    dim = folds[0].test.shifts.shape[-1]
    threshold = _normal_quantile(1 - false_alarm / (2 * dim + 6) / 2)
    means, squares = _Tests(threshold, dim, odd=True), _Tests(threshold, dim, odd=False)
    along = [(fold.test, fold.axes) for fold in folds]
    means.add(torch.cat([x.shifts if axes is None else x.shifts @ axes for x, axes in along]))
    squares.add(torch.cat([_quadratic(rows, axes) for rows, axes in along]))
    for train, test, axes, unit in folds:
        direction = _scaled(train.shifts.mean(0).unsqueeze(-1), unit)
        means.add(test.shifts @ direction, direction, axes)
        vectors = _scaled(_extremes(train.products), unit)
        squares.add(_quadratic(test, vectors), vectors, axes)
    excess = squares.found
    low, high = excess.min().clamp(max=0.0).item(), excess.max().clamp(min=0.0).item()
    mean_faults = [Fault("mean", -error, where) for error, where in means.faults()]
    sd_faults = [Fault("sd", to_ratio(error), where) for error, where in squares.faults()]
    narrow = to_ratio(-squares.resolution)
    widest = max(to_ratio(squares.resolution), 1 / narrow if narrow > 0 else math.inf)
    return MomentErrors(
        means.found.abs().max().item(),
        (to_ratio(low), to_ratio(high)),
        (*_worst_first(mean_faults), *_worst_first(sd_faults)),
        Resolution(means.resolution, widest),
    )


def _parts(rows: Rows) -> list[Tensor]:
    return [rows.shifts, *(part for _, left, right in rows.products for part in (left, right))]


class _Tests:
    """Tests of terms along the axes, then along directions; odd terms change sign with them."""

    def __init__(self, threshold: float, dim: int, odd: bool) -> None:
        self.threshold, self.dim, self.odd = threshold, dim, odd
        self.resolution = 0.0
        self.found = torch.empty(0)
        self.directions: list[Tensor] = []

    def add(
        self, terms: Tensor, directions: Tensor | None = None, axes: Tensor | None = None
    ) -> None:
        """Add the means of columns ``(n, k)`` that differ significantly from 0; others are 0."""
        mean, error = terms.mean(0), terms.std(0) / math.sqrt(len(terms))
        # Exact draws have a standard error of 0.
        rounded = MOMENTS.mean_rounding * torch.finfo(terms.dtype).eps
        limit = self.threshold * error + rounded
        beyond = mean.sign() * (mean.abs() - rounded).clamp(min=0.0)
        found = torch.where(_strength(beyond, terms) > self.threshold, mean, 0.0)
        if directions is None:
            self.found, self.resolution = found, limit.max().item()
        else:
            self.found = torch.cat([self.found, found])
            if axes is not None:
                directions = torch.linalg.solve(axes, directions)
            self.directions += list(directions.unbind(-1))

    def faults(self) -> list[tuple[float, Terms]]:
        """Errors of coordinates, and of directions that are far worse than any coordinate."""
        by_axis, others = self.found[: self.dim], self.found[self.dim :]
        chosen = by_axis.abs().topk(min(MOMENTS.max_faults, self.dim)).indices.tolist()
        faults: list[tuple[float, Terms]] = [
            (by_axis[i].item(), ((i, 1.0),)) for i in chosen if by_axis[i] != 0
        ]
        for sign in (-1, 1):
            worst = int((sign * others).argmax())
            error = others[worst].item()
            rivals = by_axis.abs() if self.odd else sign * by_axis
            if sign * error * MOMENTS.as_bad > max(0.0, rivals.max().item()):
                terms, sense = self._terms(self.directions[worst])
                faults.append((error * sense if self.odd else error, terms))
        return faults

    def _terms(self, direction: Tensor) -> tuple[Terms, float]:
        """The leading coordinates, and the sign by which the direction was turned."""
        shares = direction.square() / direction.square().sum()
        order = shares.topk(min(REPORT.max_named, self.dim)).indices
        before = shares[order].cumsum(0) - shares[order]
        order = order[before < MOMENTS.enough_terms]
        first = direction[order[0]]
        weights = (direction[order] / first).tolist()
        return tuple(zip(order.tolist(), weights, strict=True)), first.sign().item()


def _strength(mean: Tensor, terms: Tensor) -> Tensor:
    """Return the absolute means of columns over their standard errors, less if terms are skewed.

    Squares of draws are skewed, so a mean that is too small comes with a standard error that is too
    small, too. Hall (1992), *On the Removal of Skewness by Transformation*: a monotone cubic. It
    only lowers values, because the skewness of few terms is noisy.
    """
    deviations = terms - terms.mean(0)
    spread = deviations.square().mean(0).sqrt()
    ratio = mean * math.sqrt(len(terms)) / spread
    skew = (deviations / spread).pow(3).mean(0) / math.sqrt(len(terms))
    cubic = ratio + skew * ratio.square() / 3 + skew.square() * ratio.pow(3) / 27 + skew / 6
    found = torch.minimum(ratio.abs(), cubic.abs())
    return torch.where(spread > 0, found, torch.where(mean != 0, math.inf, 0.0))


def _worst_first(faults: list[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: -fault.size)


def _scaled(directions: Tensor, unit: Tensor | None) -> Tensor:
    directions = torch.nn.functional.normalize(directions, dim=0)
    if unit is None:
        return directions
    sd = (unit @ directions).std(0)
    return directions / sd.clamp(min=torch.finfo(sd.dtype).tiny)


def _is_tame(terms: Tensor) -> bool:
    return bool((terms.abs().amax() < torch.finfo(terms.dtype).max ** 0.2).item())


def _quadratic(rows: Rows, directions: Tensor | None) -> Tensor:
    """Each draw's matrix along directions ``(m, k)``, those of coordinates if None: ``(n, k)``."""
    lengths = 1.0 if directions is None else directions.square().sum(0)
    total = rows.constants.unsqueeze(-1) * lengths
    for weight, left, right in rows.products:
        if directions is not None:
            left, right = left @ directions, right @ directions
        total = total + weight * left * right
    return total


def _extremes(products: list[Product]) -> Tensor:
    """Directions of the smallest and the largest eigenvalue of the sum, ``(m, 2)``."""
    dim = products[0][1].shape[-1]
    if dim <= MOMENTS.max_full_dim:
        matrix = torch.stack([weight * left.mT @ right for weight, left, right in products]).sum(0)
        return torch.linalg.eigh(matrix + matrix.mT).eigenvectors[:, [0, -1]]

    def image(vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for weight, left, right in products:
            total = total + weight * (left.mT @ (right @ vector) + right.mT @ (left @ vector))
        return total

    # No random numbers: the checks read the caller's stream as they do in few dimensions.
    start = torch.linspace(1.0, 2.0, dim).to(products[0][1]).cos()
    basis, tridiagonal = lanczos(image, start, MOMENTS.krylov_steps)
    return basis @ torch.linalg.eigh(tridiagonal).eigenvectors[:, [0, -1]]


def _normal_quantile(probability: float) -> float:
    return torch.special.ndtri(torch.tensor(probability, dtype=torch.double)).item()


def rounding(values: Tensor) -> Tensor:
    """Return the spread that rounding gives to equal values, for each column."""
    return MOMENTS.rounding * torch.finfo(values.dtype).eps * values.abs().amax(0)


class CollapsedError(ValueError):
    """Draws span no volume."""


class Whitened(NamedTuple):
    """Draws in a frame in which they have mean 0 and covariance I.

    ``white`` ``(num_draws, latent_dim)`` are the draws in the frame, ``white @ frame + loc`` the
    original ones. ``axes``, unit columns ``(latent_dim, latent_dim)``, are the original coordinates
    as directions in the frame. With more than 300 latent variables, or fewer than four draws for
    each, each coordinate has its own scale: ``frame`` ``(latent_dim,)`` multiplies it, ``axes`` is
    None, and correlations remain.
    """

    white: Tensor
    loc: Tensor
    frame: Tensor
    axes: Tensor | None

    def first(self, num_draws: int) -> Whitened:
        """Return the first draws, in the frame of all draws."""
        return self._replace(white=self.white[:num_draws])

    def unwhiten(self, white: Tensor) -> Tensor:
        """Map points of the frame to the original coordinates, both ``(n, latent_dim)``."""
        return self.loc + (white * self.frame if self.axes is None else white @ self.frame)

    def whiten(self, points: Tensor) -> Tensor:
        """Map points of the original coordinates to the frame, both ``(n, latent_dim)``."""
        if self.axes is None:
            return (points - self.loc) / self.frame
        return torch.linalg.solve_triangular(self.frame, points - self.loc, upper=True, left=False)

    def scores(self, scores: Tensor) -> Tensor:
        """Map gradients in the original coordinates to gradients in the frame."""
        return scores * self.frame if self.axes is None else scores @ self.frame.mT

    def score_of(self, score: Score) -> Score:
        """Return the log-density and its gradient as functions of points of the frame."""

        def white_score(white: Tensor) -> tuple[Tensor, Tensor]:
            log_density, gradient = score(self.unwhiten(white))
            return log_density, self.scores(gradient)

        return white_score


def whiten_draws(draws: Tensor, full: bool | None = None) -> Whitened:
    """Whiten draws by their own mean and covariance, or by their standard deviations.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> whitened = whiten_draws(torch.randn(100, 2) @ torch.tensor([[3.0, 1.0], [0.0, 2.0]]))
    >>> whitened.white.mT.cov().round(decimals=3).abs()
    tensor([[1., 0.],
            [0., 1.]])

    :param draws: finite draws, ``(num_draws, latent_dim)``.
    :param full: whether to use the covariance; by default with at most 300 latent variables, and at
        least four draws for each.
    :raises CollapsedError: for draws that lie on a hyperplane, exactly or up to rounding, for
        instance because a few draws are extremely far from all others.
    """
    _refuse_far(draws)
    resolution, dtype = torch.finfo(draws.dtype).eps, draws.dtype
    num_draws, dim = draws.shape
    is_full = full
    if is_full is None:
        is_full = dim <= min(MOMENTS.max_full_dim, num_draws // MOMENTS.draws_per_dim)
    wide = draws.double() if is_full else draws
    # In units in which no square overflows.
    unit = wide.abs().amax(0).clamp(min=torch.finfo(dtype).tiny)
    mean, spread = (wide / unit).mean(0), (wide / unit).std(0)
    loc, scale = (mean * unit).to(dtype), (spread * unit).to(dtype)
    # In single precision, rounding gives equal draws a spread.
    if not (
        spread > (MOMENTS.rounding if wide.dtype == dtype else MOMENTS.wide_rounding) * resolution
    ).all():
        raise CollapsedError(_message(draws))
    standard = (wide / unit - mean) / spread
    if not is_full:
        return Whitened(standard, loc, scale, None)
    factor, info = torch.linalg.cholesky_ex(standard.mT @ standard / (len(draws) - 1))
    if info or not (factor.diagonal().square() > MOMENTS.rounding * resolution).all():
        raise CollapsedError(_message(draws))
    white = torch.linalg.solve_triangular(factor.mT, standard, upper=True, left=False).to(dtype)
    axes = factor.mT.to(dtype)
    return Whitened(white, loc, axes * scale, axes)


def held_out_frames(
    white: Tensor, axes: Tensor | None, others: Tensor | None = None
) -> Iterator[tuple[slice, slice, Whitened]]:
    r"""Yield training rows, test rows, and the frame in which the training rows are white.

    The covariance of n draws in d dimensions whitens these draws exactly, and others not: the
    inverse of a sample covariance is too large by a share of about d / n. Tests of the draws in
    their own frame would take this for an error of the draws.

    :param white: draws in a frame with these ``axes``, ``(num_draws, latent_dim)``. Without axes,
        each coordinate has its own scale, and the frame stays as it is.
    :param others: more draws in that frame, which are never tested.
    """
    even, odd = slice(0, None, 2), slice(1, None, 2)
    for train, test in ((even, odd), (odd, even)):
        if axes is None:
            yield train, test, Whitened(white, white.new_zeros(()), white.new_ones(()), None)
            continue
        known = white[train] if others is None else torch.cat([white[train], others])
        frame = whiten_draws(known, full=True)
        turned = torch.nn.functional.normalize(frame.frame @ axes, dim=0)
        yield train, test, frame._replace(axes=turned)


def _refuse_far(draws: Tensor) -> None:
    shares = torch.tensor([0.05, 0.5, 0.95]).to(draws)
    low, middle, high = torch.quantile(draws[: MOMENTS.num_sorted], shares, dim=0)
    spread = (high - low) / (2 * _normal_quantile(0.95))
    distance = ((draws - middle) / spread.clamp(min=torch.finfo(draws.dtype).tiny)).abs()
    distance = torch.where(spread > 0, distance, 0.0)
    farthest = distance.max().item()
    limit = MOMENTS.far * len(draws) ** 0.5
    if farthest > limit:
        number = int((distance.amax(-1) > limit).sum())
        raise CollapsedError(
            f"{number} of {len(draws)} draws are outliers, up to {farthest:.0e} standard "
            "deviations from the median. Cure: fit again with a smaller learning rate, or correct "
            "the part of the model or guide that produces the outliers"
        )


def _message(draws: Tensor) -> str:
    is_single = draws.dtype == torch.float32
    return (
        f"{len(draws)} draws of {draws.shape[-1]} latents lie on a hyperplane"
        f"{', as far as float32 can tell' * is_single}: the guide has collapsed, or there are "
        "fewer draws than latents. Cure: more draws (num_samples), or fit again from a wider start"
        f"{', or float64 where latents are all but collinear' * is_single}"
    )
