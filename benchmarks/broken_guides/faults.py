# SPDX-License-Identifier: Apache-2.0
"""Distributions of the latent vector with one fault of a known kind and size.

* ``shift``: moved by ``size`` standard deviations in a random direction.
* ``width``: all standard deviations times ``size``; ``direction``: that along one random direction.
* ``tail``: the outermost share ``size`` of the mass cut off on one side of a random direction;
  ``tails``: that beyond an ellipsoid.
* ``correlation``: all correlations times 1 - ``size``.
* ``mode``: one of several modes, or a third of many, has ``size`` times its weight; 0 drops it.

Directions are random in the frame in which the good draws have covariance I. A broken guide has an
exact density if the good guide has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.distributions.implicit import IntractableDensityError
from pyro_implicit.guides.auto_draws import AutoDraws

__all__ = ["SIZES", "BrokenGuide", "Fault", "Good", "break_it"]

SIZES: dict[str, tuple[float, ...]] = {
    "none": (0.0,),
    "shift": (0.1, 0.2, 0.3, 0.6),
    "width": (0.6, 0.8, 1.4),
    "direction": (0.6, 0.8, 1.4),
    "tail": (0.03, 0.1, 0.2, 0.4),
    "tails": (0.1, 0.3),
    "correlation": (0.2, 0.5, 1.0),
    "mode": (0.6, 0.3, 0.1, 0.0),
}
LEAST_CORRELATION = 0.3
NUM_DRAWS = 20_000


class Good(Protocol):
    """A good approximation: draws ``(num, dim)`` and their log-density ``(num,)``."""

    def sample(self, num: int) -> Tensor: ...

    def log_prob(self, points: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Affine:
    """Points ``u`` of a good distribution moved to ``loc + (u - loc) matrix^T + shift``."""

    good: Good
    loc: Tensor
    matrix: Tensor
    shift: Tensor

    def sample(self, num: int) -> Tensor:
        return self.loc + self.shift + (self.good.sample(num) - self.loc) @ self.matrix.T

    def log_prob(self, points: Tensor) -> Tensor:
        rows = (points - self.loc - self.shift).T
        before = self.loc + torch.linalg.solve(self.matrix, rows).T
        return self.good.log_prob(before) - torch.linalg.slogdet(self.matrix).logabsdet


@dataclass(frozen=True)
class Reweighted:
    """A good density times ``factor``, which is at most 1 and has the mean ``mass``."""

    good: Good
    factor: Callable[[Tensor], Tensor]
    mass: float

    def sample(self, num: int) -> Tensor:
        kept = torch.empty(0)
        while len(kept) < num:
            some = self.good.sample(math.ceil(1.1 * num / self.mass) + 10)
            some = some[torch.rand(len(some)) < self.factor(some)]
            kept = torch.cat([kept, some]) if len(kept) else some
        return kept[:num]

    def log_prob(self, points: Tensor) -> Tensor:
        return self.good.log_prob(points) + self.factor(points).log() - math.log(self.mass)


@dataclass(frozen=True)
class Fault:
    """A broken distribution, and the directions ``(dim, k)`` along which the fault is largest."""

    broken: Good
    directions: Tensor


def break_it(good: Good, kind: str, size: float, modes: Tensor | None = None) -> Fault | None:
    """Return the fault of a kind and size; ``None`` if it does not apply.

    :param good: the distribution to break.
    :param modes: centres of separate modes, ``(num_modes, dim)``.
    """
    draws = good.sample(NUM_DRAWS)
    loc, covariance = draws.mean(0), draws.mT.cov().reshape(draws.shape[1], -1)
    factor = torch.linalg.cholesky(covariance)
    dim = len(loc)
    # The coordinate with sd 1, and the step along it that leaves all others uncorrelated.
    unit = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    covector = torch.linalg.solve_triangular(factor.T, unit[:, None], upper=True)[:, 0]
    step, no_shift, same = factor @ unit, torch.zeros(dim), torch.eye(dim)
    if kind == "none":
        return Fault(good, torch.empty(dim, 0))
    if kind == "shift":
        return Fault(Affine(good, loc, same, size * step), covector[:, None])
    if kind == "width":
        return Fault(Affine(good, loc, size * same, no_shift), torch.empty(dim, 0))
    if kind == "direction" and dim > 1:
        matrix = same + (size - 1) * torch.outer(step, covector)
        return Fault(Affine(good, loc, matrix, no_shift), covector[:, None])
    if kind == "correlation":
        return _uncorrelated(good, size, loc, covariance)
    if kind == "tail":
        edge = (draws @ covector).quantile(1 - size)
        return _cut(good, draws, lambda u: u @ covector <= edge, covector[:, None])
    if kind == "tails":

        def distance(points: Tensor) -> Tensor:
            rows = torch.linalg.solve_triangular(factor, (points - loc).T, upper=False)
            return rows.square().sum(0)

        edge = distance(draws).quantile(1 - size)
        return _cut(good, draws, lambda u: distance(u) <= edge, covector[:, None])
    if kind == "mode" and modes is not None:
        lost = max(1, len(modes) // 3)
        weights = torch.ones(len(modes))
        weights[torch.randperm(len(modes))[:lost]] = size
        return _cut(good, draws, lambda u: weights[torch.cdist(u, modes).argmin(-1)], None)
    return None


def _cut(
    good: Good, draws: Tensor, factor: Callable[[Tensor], Tensor], directions: Tensor | None
) -> Fault:
    mass = factor(draws).double().mean().item()
    weigh = lambda points: factor(points).to(points)  # noqa: E731
    nowhere = torch.empty(draws.shape[1], 0)
    return Fault(Reweighted(good, weigh, mass), nowhere if directions is None else directions)


def _uncorrelated(good: Good, size: float, loc: Tensor, covariance: Tensor) -> Fault | None:
    sds = covariance.diagonal().sqrt()
    off = covariance - covariance.diagonal().diag()
    if (off / torch.outer(sds, sds)).abs().max() < LEAST_CORRELATION:
        return None
    before, after = (torch.linalg.cholesky(c) for c in (covariance, covariance - size * off))
    matrix = torch.linalg.solve_triangular(before, after, upper=False, left=False)
    # Directions with the largest change of the variance.
    relative = torch.linalg.solve_triangular(before, after, upper=False)
    extremes = torch.linalg.eigh(relative @ relative.T).eigenvectors[:, [0, -1]]
    directions = torch.linalg.solve_triangular(before.T, extremes, upper=True)
    return Fault(Affine(good, loc, matrix, torch.zeros_like(loc)), directions)


class Broken(TorchDistribution):
    """A :class:`Good` distribution as a Pyro distribution, with or without a density."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector
    has_rsample = False

    def __init__(
        self, broken: Good, dim: int, has_density: bool, shape: tuple[int, ...] = ()
    ) -> None:
        self.broken, self.has_density = broken, has_density
        super().__init__(torch.Size(shape), torch.Size((dim,)), validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Broken:
        return Broken(self.broken, self.event_shape[0], self.has_density, batch_shape)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        shape = self._extended_shape(sample_shape)
        return self.broken.sample(shape[:-1].numel()).reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        if not self.has_density:
            raise IntractableDensityError("this guide has draws and no density")
        return self.broken.log_prob(value.reshape(-1, value.shape[-1])).reshape(value.shape[:-1])


class BrokenGuide(AutoDraws):
    """A Pyro autoguide whose latent vector has a given distribution."""

    def __init__(self, model: Callable[..., Any], broken: Good, has_density: bool) -> None:
        super().__init__(model)
        self.broken, self.has_density = broken, has_density

    def get_posterior(self, *args: Any, **kwargs: Any) -> Broken:
        return Broken(self.broken, self.latent_dim, self.has_density)
