# SPDX-License-Identifier: Apache-2.0
"""Latents that the model multiplies by functions of others, written as noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_implicit.mcmc.conditional_reparam import SUFFIX, ConditionalReparam
from pyro_implicit.ops.conditional_normal import from_standard, to_standard
from pyro_implicit.ops.site_parts import site_parts

__all__ = ["PRODUCT", "ScaledBlock", "ScaledReparam"]

PRODUCT = 1.5
"""The least power of a factor of the latents; smaller ones are those of the data's noise."""


@dataclass(frozen=True, eq=False)
class ScaledBlock:
    r"""What parents and data leave open of latents that were written as noise by hand.

    In :math:`\mu + \tau z` the prior of z is that of noise already, but the more :math:`\tau` makes
    of it, the more the data say of it. With W and h those of
    :class:`~pyro_implicit.mcmc.ConditionalReparam` at a middle, they are taken to be elsewhere

    .. math::
        D W D \text{ and } D R h, \quad \log D = \tfrac12 \sum_k b_k (u_k - u_{k,0}),

    where the u are logarithms of such factors: the unconstrained coordinates of positive latents. A
    factor of the latent has :math:`b = 2`, a scale of the data's noise :math:`b = -2`; h grows with
    the first power of the one, and the second of the other, whose part of D is R. With
    :math:`C^\top C = I + D W D`, the noise of a latent :math:`z = l + s \epsilon` is

    .. math:: \epsilon = C^{-1} (x + C^{-\top} (D R h - D W D s^{-1} l))

    of what is left, x: a standard normal, whatever the factors are, where the data are linear in z
    and their noise is normal. The density is exact in any case.

    :param powers: b, by the name of the latent and that of the other latent.
    :param middle: the unconstrained values of the others, whose shapes broadcast with the latent's.
    :param shapes: of the latents.
    :param precision: W in units of the priors' scales, ``(n, n)`` for the n elements of all
        latents, or ``(n,)`` if diagonal.
    :param information: h in these units, ``(n,)``.
    :param locs: of the priors, l, in these units, ``(n,)``.
    :param suffix: what makes the name of a latent's noise.
    """

    powers: Mapping[str, Mapping[str, float]]
    middle: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    precision: Tensor
    information: Tensor
    locs: Tensor
    suffix: str = SUFFIX

    def to_noise(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The priors' noise of what is left.

        :param parts: unconstrained, by site, ``(num_points, *shape)``; those of the block are
            called ``"{name}{suffix}"``.
        :returns: noise, and the log-determinant of each element, by the same names.
        """
        values, log_det = self._map(parts, back=False)
        return self._split(values), self._split(log_det)

    def to_points(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is left of noise, in the same way."""
        return self._split(self._map(parts, back=True)[0])

    def _map(self, parts: Mapping[str, Tensor], back: bool) -> tuple[Tensor, Tensor]:
        given = [parts[f"{name}{self.suffix}"] for name in self.shapes]
        values = torch.cat([one.reshape(len(one), -1) for one in given], -1)
        scale, told = self._scales(parts, len(values))
        if self.precision.dim() == 1:
            stretch = (1 + self.precision * scale.square()).sqrt()
            pull = told / stretch
            found = stretch * values - pull if back else (values + pull) / stretch
            return found, -stretch.log()
        identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
        precision = identity + self.precision * (scale.unsqueeze(-1) * scale.unsqueeze(-2))
        if back:
            return to_standard(values, precision, told), values
        return from_standard(values, precision, told)

    def _scales(self, parts: Mapping[str, Tensor], num_points: int) -> tuple[Tensor, Tensor]:
        """D and what the data say of the noise, ``(num_points, n)``."""
        log_scales, log_rests = [], []
        for name, shape in self.shapes.items():
            log_scale = log_rest = self.information.new_zeros(num_points, *shape)
            for other, power in self.powers[name].items():
                moved = parts[other] - self.middle[other]
                lacking = (1,) * (len(shape) + 1 - moved.dim())
                moved = power / 2 * moved.reshape(num_points, *lacking, *moved.shape[1:])
                log_scale = log_scale + moved
                log_rest = log_rest + (moved if power < PRODUCT else 0 * moved)
            log_scales.append(log_scale.reshape(num_points, -1))
            log_rests.append(log_rest.reshape(num_points, -1))
        scale = torch.cat(log_scales, -1).exp()
        at_locs = scale * self.locs
        known = at_locs * self.precision if self.precision.dim() == 1 else at_locs @ self.precision
        return scale, scale * (torch.cat(log_rests, -1).exp() * self.information - known)

    def _split(self, values: Tensor) -> dict[str, Tensor]:
        parts = site_parts(values, self.shapes)
        return {f"{name}{self.suffix}": part for name, part in parts.items()}


class ScaledReparam(ConditionalReparam):
    """One latent of a :class:`ScaledBlock`.

    For ``poutine.reparam`` this is the non-centred form alone: factors may not be known yet where
    the latent is sampled. :class:`~pyro_implicit.mcmc.noise_map.NoiseMap` does the rest.

    :param block: to which the latent belongs.
    :param shape: of the latent.
    """

    def __init__(self, block: ScaledBlock, shape: torch.Size) -> None:
        nothing = block.information.new_zeros(shape)
        super().__init__(precision=nothing, information=nothing, suffix=block.suffix)
        self.block = block
