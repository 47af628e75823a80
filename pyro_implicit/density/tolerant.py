# SPDX-License-Identifier: Apache-2.0
"""A log-density that is not a number where the model raises an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.density.latent_density import LatentDensity

__all__ = ["TolerantDensity"]

T = TypeVar("T", Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])


class TolerantDensity:
    """A :class:`LatentDensity` that gives NaN at points where the model raises an error.

    A covariance without a Cholesky factor at one of fifty points, say, ends a whole batch: here the
    batch is halved until the point is found.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     torch.linalg.cholesky(x.reshape(1, 1))
    >>> TolerantDensity(LatentDensity(model)).log_prob(torch.tensor([[1.0], [-1.0], [2.0]]))
    tensor([-1.4189,     nan, -2.9189])

    :param density: of the model.
    """

    def __init__(self, density: LatentDensity) -> None:
        self.density = density
        self.error: Exception | None = None
        """The last error that the model raised."""

    def try_out(self, points: Tensor) -> None:
        """Let the density learn how the model runs, at the first point where it does.

        :param points: ``(num_points, latent_dim)``.
        """
        for point in points:
            try:
                self.density.trace_at(point)
            except Exception as error:
                self.error = error
                continue
            self.log_prob(point.unsqueeze(0))
            return

    def log_prob(self, points: Tensor) -> Tensor:
        """As :meth:`LatentDensity.log_prob`."""
        return self._map(self.density.log_prob, points, lambda u: u[..., 0])

    def derivatives(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`LatentDensity.derivatives`."""
        return self._map(
            self.density.derivatives,
            points,
            lambda u: (u[..., 0], u, u.unsqueeze(-1) + u.unsqueeze(-2)),
        )

    def _map(self, evaluate: Callable[[Tensor], T], points: Tensor, like: Callable) -> T:
        if len(points) == 0:
            return like(points)
        try:
            return evaluate(points)
        except Exception as error:  # the model's own, of any kind
            self.error = error
            if len(points) == 1:
                return like(torch.full_like(points, math.nan))
        half = (len(points) + 1) // 2
        parts = [self._map(evaluate, part, like) for part in points.split(half)]
        return pytree.tree_map(lambda *tensors: torch.cat(tensors), *parts)
