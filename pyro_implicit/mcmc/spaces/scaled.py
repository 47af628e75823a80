# SPDX-License-Identifier: Apache-2.0
"""Latents that the model multiplies by functions of others, written as noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.policy import SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_reparam import SUFFIX, ConditionalReparam
from pyro_implicit.ops.matrices import (
    LinearTerm,
    from_standard,
    from_symmetric_root,
    to_standard,
    to_symmetric_root,
)
from pyro_implicit.runtime.sites import site_parts

__all__ = ["ScaledBlock", "ScaledReparam", "Series"]


class Series(NamedTuple):
    """The information on the last latent of a block, whose D is one number d.

    ``vectors`` V ``(n, rank)`` and ``values`` ``(rank,)`` are the eigenbasis of W, and ``linear``
    is h. ``locs`` is :math:`V^\\top l`, and ``coupling``, ``(rank, num_others)``, is
    :math:`V^\\top W` for the other latents. Without vectors, the latent is in the coordinates of V.
    """

    vectors: Tensor | None
    values: Tensor
    linear: LinearTerm
    locs: Tensor
    coupling: Tensor


@dataclass(frozen=True, eq=False)
class ScaledBlock:
    r"""The noise of latents that were written in non-centred form, given parents and data.

    In :math:`\mu + \tau z` the prior of z is that of noise already, but the information of the data
    on z grows with :math:`\tau`. With W and h of :class:`~pyro_implicit.mcmc.ConditionalReparam` at
    a middle point, they are modelled elsewhere as

    .. math::
        D W D \text{ and } D R h, \quad \log D = \tfrac12 \sum_k b_k (u_k - u_{k,0}),

    where the u are logarithms of such factors: the unconstrained coordinates of positive latents. A
    factor of the latent has :math:`b = 2`, a scale of the data's noise :math:`b = -2`; h grows with
    the first power of a factor and the second power of a noise scale, whose part of D is R. With
    :math:`C^\top C = I + D W D`, the noise of a latent :math:`z = l + s \epsilon` is

    .. math:: \epsilon = C^{-1} (x + C^{-\top} (D R h - D W D s^{-1} l))

    given the remaining noise x, which is standard normal for all values of the factors if the data
    are linear in z and have normal noise. The density is exact in any case.

    :math:`I + D W D` is factored at each point, or W is taken as diagonal. A long latent whose D is
    one number d, as a time series with one step scale, is not part of that matrix: the eigenvectors
    of its W are those of :math:`I + d^2 W` for all d. Products with them integrate this latent out,
    and draw it given the others.

    :param powers: b, by the name of the latent and of the other latent.
    :param rests: the part of b in R, by the same names.
    :param middle: unconstrained values of the other latents, whose shapes broadcast with the
        latent's.
    :param shapes: shapes of the latents.
    :param precision: W in units of the priors' scales, ``(n, n)`` for the n elements of all
        latents without the series, or ``(n,)`` if diagonal.
    :param information: h in these units, ``(n,)``.
    :param locs: locations l of the priors in these units, ``(n,)``.
    :param suffix: suffix of the names of noise.
    :param series: the last of the latents, if its D is one number.
    """

    powers: Mapping[str, Mapping[str, float]]
    rests: Mapping[str, Mapping[str, float]]
    middle: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    precision: Tensor
    information: Tensor
    locs: Tensor
    suffix: str = SUFFIX
    series: Series | None = None

    def to_noise(self, parts: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Map the remaining noise to the priors' noise.

        :param parts: unconstrained values by site, ``(num_points, *shape)``; the block's sites are
            called ``"{name}{suffix}"``.
        :returns: noise, and the log-determinant of each element, by the same names.
        """
        values, log_det = self._map(parts, back=False)
        return self._split(values), self._split(log_det)

    def to_points(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map the priors' noise to the remaining noise."""
        return self._split(self._map(parts, back=True)[0])

    @property
    def num_changes(self) -> int:
        """Length of the vector of :meth:`changed`."""
        return sum(2 + 2 * len(self._others(name)) for name in self.shapes)

    def changed(self, law: Tensor) -> ScaledBlock:
        """Return the block of another law of the information.

        :param law: for each latent the logarithms of factors of D and R, followed by the change of
            both powers of each other latent, ``(num_changes,)``.
        """
        powers: dict[str, Any] = {}
        rests: dict[str, Any] = {}
        sizes, linear_of, rest = [], [], iter(law)
        for name, shape in self.shapes.items():
            size, own = next(rest).exp(), next(rest).exp()
            sizes.append(size.expand(shape.numel()))
            linear_of.append((size * own).expand(shape.numel()))
            others = self._others(name)
            powers[name] = {one: self.powers[name].get(one, 0.0) + next(rest) for one in others}
            rests[name] = {one: self.rests[name].get(one, 0.0) + next(rest) for one in others}
        size, linear_by = torch.cat(sizes), torch.cat(linear_of)
        count = len(self.locs)
        first, series = size[:count], self.series
        is_diagonal = self.precision.dim() == 1
        precision = self.precision * first * (first if is_diagonal else first.unsqueeze(-1))
        if series is not None:
            series = series._replace(
                values=series.values * sizes[-1][0].square(),
                linear=LinearTerm(*(one * linear_of[-1][0] for one in series.linear)),
                coupling=series.coupling * sizes[-1][0] * first,
            )
        information = self.information * linear_by[:count]
        return replace(
            self,
            powers=powers,
            rests=rests,
            precision=precision,
            information=information,
            series=series,
        )

    def fitted(self, parts: Mapping[str, Tensor], law: Tensor, policy: SpacePolicy) -> Tensor:
        r"""Fit the law to draws of the posterior, so that their noise is standard normal.

        The likelihood of the draws is maximised. The second derivatives at the middle, from which
        the block is made, are misleading if the likelihood is far from normal: that of a logistic
        regression with separable data is a wall, which says less of large coefficients.

        :param parts: unconstrained values by site as in :meth:`to_noise`, but with the priors'
            noise of the block's sites.
        :param law: where the fit begins, see :meth:`changed`.
        :param policy: the limits.
        """
        whole, series = self, self.series
        if (
            series is not None and (vectors := series.vectors) is not None
        ):  # in the coordinates of its eigenvectors, without the rest
            last = list(self.shapes)[-1]
            given = parts[f"{last}{self.suffix}"]
            given = given.reshape(len(given), -1) @ vectors
            parts = {**parts, f"{last}{self.suffix}": given}
            linear_of = LinearTerm(series.linear.inner, vectors.new_zeros(()))
            whole = replace(
                self,
                shapes={**self.shapes, last: given.shape[1:]},
                series=series._replace(vectors=None, linear=linear_of),
            )
        names = [f"{name}{self.suffix}" for name in self.shapes]

        def loss(law: Tensor) -> Tensor:
            block = whole.changed(law)
            points = block.to_points(parts)
            _, log_dets = block.to_noise({**parts, **points})
            each = (0.5 * points[name].square() + log_dets[name] for name in names)
            return torch.stack([one.sum() / len(one) for one in each]).sum()

        with torch.enable_grad():
            found = law.clone().requires_grad_()
            optimizer = torch.optim.LBFGS(
                [found],
                max_iter=policy.law_iterations,
                tolerance_change=policy.least_gain,
                line_search_fn="strong_wolfe",
            )

            def closure() -> Tensor:
                optimizer.zero_grad()
                value = loss(found)
                value.backward()
                return value

            optimizer.step(closure)
        return found.detach() if found.isfinite().all() else law

    def _others(self, name: str) -> list[str]:
        return sorted(self.powers[name].keys() | self.rests[name].keys())

    def _map(self, parts: Mapping[str, Tensor], back: bool) -> tuple[Tensor, Tensor]:
        given = [parts[f"{name}{self.suffix}"] for name in self.shapes]
        values = torch.cat([one.reshape(len(one), -1) for one in given], -1)
        scale, rest = self._scales(parts, values)
        if self.series is not None:
            return self._map_with_series(self.series, values, scale, rest, back)
        linear = self._linear_term(scale, rest)
        if self.precision.dim() == 1:
            stretch = (1 + self.precision * scale.square()).sqrt()
            pull = linear / stretch
            found = stretch * values - pull if back else (values + pull) / stretch
            return found, -stretch.log()
        return _map_by_factor(values, scale, self.precision, linear, back)

    def _map_with_series(
        self, series: Series, values: Tensor, scale: Tensor, rest: Tensor, back: bool
    ) -> tuple[Tensor, Tensor]:
        count, coupling = len(self.locs), series.coupling
        own_scale, own_rest = scale[:, count : count + 1], rest[:, count : count + 1]
        gains = own_scale.square() * series.values
        at_none = own_rest * series.linear.inner - own_scale * series.values * series.locs

        def told_given(at_others: Tensor) -> LinearTerm:
            inner = own_scale * (at_none - at_others @ coupling.mT)
            return LinearTerm(inner, own_scale * own_rest * series.linear.outer)

        others, own = values[:, :count], values[:, count:]
        moved, log_det = others, torch.zeros_like(others)
        scale, rest = scale[:, :count], rest[:, :count]
        if count:
            by_series = series.locs + told_given(scale * self.locs).inner / (1 + gains)
            linear = self._linear_term(scale, rest) - scale * (own_scale * by_series @ coupling)
            # The difference of two large matrices.
            precise = coupling.double()
            shares = (own_scale.square() / (1 + gains)).double().unsqueeze(-2)
            precision = self.precision.double() - precise.mT * shares @ precise
            found = _map_by_factor(
                others.double(), scale.double(), precision, linear.double(), back
            )
            moved, log_det = (one.to(values) for one in found)
        told_of_own = told_given(scale * (self.locs + (others if back else moved)))
        if back:
            own = to_symmetric_root(own, series.vectors, gains, told_of_own)
            return torch.cat([moved, own], -1), values
        own, total = from_symmetric_root(own, series.vectors, gains, told_of_own)
        shared = (total / own.shape[-1]).unsqueeze(-1).expand_as(own)
        return torch.cat([moved, own], -1), torch.cat([log_det, shared], -1)

    def _scales(self, parts: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.cat(
                [self._log(powers[name], parts, name, like) for name in self.shapes], -1
            ).exp()
            for powers in (self.powers, self.rests)
        )

    def _log(
        self, powers: Mapping[str, float], parts: Mapping[str, Tensor], name: str, like: Tensor
    ) -> Tensor:
        shape = self.shapes[name]
        total = like.new_zeros(len(like), *shape)
        for other, power in powers.items():
            moved = parts[other] - self.middle[other]
            lacking = (1,) * (len(shape) + 1 - moved.dim())
            total = total + power / 2 * moved.reshape(len(like), *lacking, *moved.shape[1:])
        return total.reshape(len(like), -1)

    def _linear_term(self, scale: Tensor, rest: Tensor) -> Tensor:
        """Return the information on the noise, ``(num_points, n)``."""
        at_locs = scale * self.locs
        known = at_locs * self.precision if self.precision.dim() == 1 else at_locs @ self.precision
        return scale * (rest * self.information - known)

    def _split(self, values: Tensor) -> dict[str, Tensor]:
        parts = site_parts(values, self.shapes)
        return {f"{name}{self.suffix}": part for name, part in parts.items()}


def _map_by_factor(
    values: Tensor, scale: Tensor, precision: Tensor, linear: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    precision = identity + precision * (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    if back:
        return to_standard(values, precision, linear), values
    return from_standard(values, precision, linear)


class ScaledReparam(ConditionalReparam):
    """One latent of a :class:`ScaledBlock`.

    ``poutine.reparam`` only applies the non-centred form, because factors may not be known yet when
    the latent is sampled. :class:`~pyro_implicit.mcmc.spaces.conditional_noise.NoiseMap` does the
    rest.

    :param block: the block of the latent.
    :param shape: the shape of the latent.
    """

    def __init__(self, block: ScaledBlock, shape: torch.Size) -> None:
        nothing = block.locs.new_zeros(shape)
        super().__init__(precision=nothing, information=nothing, suffix=block.suffix)
        self.block = block
