# SPDX-License-Identifier: Apache-2.0
"""The frame in which a guide's draws have mean 0 and covariance I, or at least unit sds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CollapsedError", "Whitened", "whiten_draws"]

MAX_FULL_DIM = 300
MAX_SORTED = 2000  # draws, enough for a quantile
# Units in the last place of the largest draw that are no spread; those of moments in higher
# precision.
ROUNDING, FEW = 10, 3
FAR = 1e4  # times the sd of the others is that of all: rarer than 1 in 100 of Cauchy draws


class CollapsedError(ValueError):
    """Draws span no volume."""


class Whitened(NamedTuple):
    """Draws ``white @ frame + loc`` of mean 0 and covariance I.

    ``white`` ``(num_draws, latent_dim)`` are the draws in the frame; ``loc`` ``(latent_dim,)`` and
    ``frame`` ``(latent_dim, latent_dim)`` lead back; ``axes``, unit columns ``(latent_dim,
    latent_dim)``, are the original coordinates as directions in the frame. Of more than 300 latents
    each coordinate has its own scale: ``frame`` ``(latent_dim,)`` multiplies it, ``axes`` is None,
    and correlations are left as they are.
    """

    white: Tensor
    loc: Tensor
    frame: Tensor
    axes: Tensor | None

    def first(self, num_draws: int) -> Whitened:
        """The first draws, in the frame of all."""
        return self._replace(white=self.white[:num_draws])

    def unwhiten(self, white: Tensor) -> Tensor:
        """Points of the frame in the original coordinates, both ``(num_points, latent_dim)``."""
        return self.loc + (white * self.frame if self.axes is None else white @ self.frame)

    def scores(self, scores: Tensor) -> Tensor:
        """Gradients by the original coordinates as gradients by those of the frame."""
        return scores * self.frame if self.axes is None else scores @ self.frame.mT


def whiten_draws(draws: Tensor) -> Whitened:
    """Draws in the frame of their own mean and covariance, above 300 latents of their sds alone.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> whitened = whiten_draws(torch.randn(100, 2) @ torch.tensor([[3.0, 1.0], [0.0, 2.0]]))
    >>> whitened.white.mT.cov().round(decimals=3).abs()
    tensor([[1., 0.],
            [0., 1.]])

    :param draws: finite, ``(num_draws, latent_dim)``.
    :raises CollapsedError: for draws that lie on a hyperplane, or do so up to rounding, or some of
        which lie so far out that beside them the others do.
    """
    _refuse_far(draws)
    resolution, dtype = torch.finfo(draws.dtype).eps, draws.dtype
    is_full = draws.shape[-1] <= MAX_FULL_DIM
    wide = draws.double() if is_full else draws
    # In units in which no square overflows.
    unit = wide.abs().amax(0).clamp(min=torch.finfo(dtype).tiny)
    mean, spread = (wide / unit).mean(0), (wide / unit).std(0)
    loc, scale = (mean * unit).to(dtype), (spread * unit).to(dtype)
    # In single precision the spread of equal draws is what rounding leaves of it, not 0.
    if not (spread > (ROUNDING if wide.dtype == dtype else FEW) * resolution).all():
        raise CollapsedError(_message(draws))
    standard = (wide / unit - mean) / spread
    if not is_full:
        return Whitened(standard, loc, scale, None)
    factor, info = torch.linalg.cholesky_ex(standard.mT @ standard / (len(draws) - 1))
    if info or not (factor.diagonal().square() > ROUNDING * resolution).all():
        raise CollapsedError(_message(draws))
    white = torch.linalg.solve_triangular(factor.mT, standard, upper=True, left=False).to(dtype)
    axes = factor.mT.to(dtype)
    return Whitened(white, loc, axes * scale, axes)


def _refuse_far(draws: Tensor) -> None:
    """A single draw makes the frame, if it is at 1e30."""
    shares = torch.tensor([0.05, 0.5, 0.95]).to(draws)
    low, middle, high = torch.quantile(draws[:MAX_SORTED], shares, dim=0)
    spread = (high - low) / 3.29
    distance = ((draws - middle) / spread.clamp(min=torch.finfo(draws.dtype).tiny)).abs()
    distance = torch.where(spread > 0, distance, 0.0)
    farthest = distance.max().item()
    limit = FAR * len(draws) ** 0.5
    if farthest > limit:
        number = int((distance.amax(-1) > limit).sum())
        raise CollapsedError(
            f"{number} of {len(draws)} draws lie up to {farthest:.0e} sds of the others away from "
            "them. Cure: fit again with a smaller learning rate, or without whatever throws them"
        )


def _message(draws: Tensor) -> str:
    is_single = draws.dtype == torch.float32
    return (
        f"{len(draws)} draws of {draws.shape[-1]} latents lie on a hyperplane"
        f"{', as far as float32 can tell' * is_single}: the guide has collapsed, or there are "
        "fewer draws than latents. Cure: more draws (num_samples), or fit again from a wider start"
        f"{', or float64 where latents are all but collinear' * is_single}"
    )
