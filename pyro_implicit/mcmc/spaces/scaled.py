# SPDX-License-Identifier: Apache-2.0
"""Latents that the model multiplies by functions of others, written as noise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.policy import DEFAULT, SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_reparam import (
    SUFFIX,
    ConditionalReparam,
    base_distribution,
    own_hessians,
    score_of_rest,
    told,
    unused_suffix,
)
from pyro_implicit.ops.low_rank_normal import (
    LinearTerm,
    eigenbasis,
    from_symmetric_root,
    to_symmetric_root,
)
from pyro_implicit.ops.matrices import from_standard, to_standard
from pyro_implicit.runtime.sites import site_parts

__all__ = ["ScaledBlock", "ScaledReparam", "scaled_reparams"]


class Series(NamedTuple):
    """The information on the last latent of a block, whose D is one number d.

    ``vectors`` V ``(n, rank)`` and ``values`` ``(rank,)`` are the eigenbasis of W, and ``told`` is
    h. ``locs`` is :math:`V^\\top l`, and ``coupling`` is :math:`V^\\top W` for the other latents,
    ``(rank, num_others)``.
    """

    vectors: Tensor
    values: Tensor
    told: LinearTerm
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
    :param middle: unconstrained values of the other latents, whose shapes broadcast with the
        latent's.
    :param shapes: shapes of the latents.
    :param precision: W in units of the priors' scales, ``(n, n)`` for the n elements of all
        latents without the series, or ``(n,)`` if diagonal.
    :param information: h in these units, ``(n,)``.
    :param locs: locations l of the priors in these units, ``(n,)``.
    :param suffix: suffix of the names of noise.
    :param factor_power: power above which a latent is a factor.
    :param series: the last of the latents, if its D is one number.
    """

    powers: Mapping[str, Mapping[str, float]]
    middle: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    precision: Tensor
    information: Tensor
    locs: Tensor
    suffix: str = SUFFIX
    factor_power: float = DEFAULT.space.factor_power
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

    def _map(self, parts: Mapping[str, Tensor], back: bool) -> tuple[Tensor, Tensor]:
        """Return mapped values and the log-determinant of each element."""
        given = [parts[f"{name}{self.suffix}"] for name in self.shapes]
        values = torch.cat([one.reshape(len(one), -1) for one in given], -1)
        scale, rest = self._scales(parts, values)
        if self.series is not None:
            return self._map_with_series(self.series, values, scale, rest, back)
        told = self._told(scale, rest)
        if self.precision.dim() == 1:
            stretch = (1 + self.precision * scale.square()).sqrt()
            pull = told / stretch
            found = stretch * values - pull if back else (values + pull) / stretch
            return found, -stretch.log()
        return _map_by_factor(values, scale, self.precision, told, back)

    def _map_with_series(
        self, series: Series, values: Tensor, scale: Tensor, rest: Tensor, back: bool
    ) -> tuple[Tensor, Tensor]:
        count, coupling = len(self.locs), series.coupling
        own_scale, own_rest = scale[:, count : count + 1], rest[:, count : count + 1]
        gains = own_scale.square() * series.values
        at_none = own_rest * series.told.inner - own_scale * series.values * series.locs

        def told_given(at_others: Tensor) -> LinearTerm:
            inner = own_scale * (at_none - at_others @ coupling.mT)
            return LinearTerm(inner, own_scale * own_rest * series.told.outer)

        others, own = values[:, :count], values[:, count:]
        moved, log_det = others, torch.zeros_like(others)
        scale, rest = scale[:, :count], rest[:, :count]
        if count:
            by_series = series.locs + told_given(scale * self.locs).inner / (1 + gains)
            told = self._told(scale, rest) - scale * (own_scale * by_series @ coupling)
            # The difference of two large matrices.
            precise = coupling.double()
            shares = (own_scale.square() / (1 + gains)).double().unsqueeze(-2)
            precision = self.precision.double() - precise.mT * shares @ precise
            found = _map_by_factor(others.double(), scale.double(), precision, told.double(), back)
            moved, log_det = (one.to(values) for one in found)
        told_of_own = told_given(scale * (self.locs + (others if back else moved)))
        if back:
            own = to_symmetric_root(own, series.vectors, gains, told_of_own)
            return torch.cat([moved, own], -1), values
        own, total = from_symmetric_root(own, series.vectors, gains, told_of_own)
        shared = (total / own.shape[-1]).unsqueeze(-1).expand_as(own)
        return torch.cat([moved, own], -1), torch.cat([log_det, shared], -1)

    def _scales(self, parts: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return D and R, ``(num_points, n)``."""
        log_scales, log_rests = [], []
        for name, shape in self.shapes.items():
            log_scale = log_rest = like.new_zeros(len(like), *shape)
            for other, power in self.powers[name].items():
                moved = parts[other] - self.middle[other]
                lacking = (1,) * (len(shape) + 1 - moved.dim())
                moved = power / 2 * moved.reshape(len(like), *lacking, *moved.shape[1:])
                log_scale = log_scale + moved
                log_rest = log_rest + (moved if power < self.factor_power else 0 * moved)
            log_scales.append(log_scale.reshape(len(like), -1))
            log_rests.append(log_rest.reshape(len(like), -1))
        return torch.cat(log_scales, -1).exp(), torch.cat(log_rests, -1).exp()

    def _told(self, scale: Tensor, rest: Tensor) -> Tensor:
        """Return the information on the noise, ``(num_points, n)``."""
        at_locs = scale * self.locs
        known = at_locs * self.precision if self.precision.dim() == 1 else at_locs @ self.precision
        return scale * (rest * self.information - known)

    def _split(self, values: Tensor) -> dict[str, Tensor]:
        parts = site_parts(values, self.shapes)
        return {f"{name}{self.suffix}": part for name, part in parts.items()}


def _map_by_factor(
    values: Tensor, scale: Tensor, precision: Tensor, told: Tensor, back: bool
) -> tuple[Tensor, Tensor]:
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    precision = identity + precision * (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    if back:
        return to_standard(values, precision, told), values
    return from_standard(values, precision, told)


class ScaledReparam(ConditionalReparam):
    """One latent of a :class:`ScaledBlock`.

    ``poutine.reparam`` only applies the non-centred form, because factors may not be known yet when
    the latent is sampled. :class:`~pyro_implicit.mcmc.spaces.space.NoiseMap` does the rest.

    :param block: the block of the latent.
    :param shape: the shape of the latent.
    """

    def __init__(self, block: ScaledBlock, shape: torch.Size) -> None:
        nothing = block.locs.new_zeros(shape)
        super().__init__(precision=nothing, information=nothing, suffix=block.suffix)
        self.block = block


Powers = dict[str, float]


def scaled_reparams(
    target: Target,
    middle: Tensor,
    known: Collection[str] = (),
    policy: SpacePolicy = DEFAULT.space,
) -> dict[str, ScaledReparam]:
    """Find latents with a fixed prior of which the data say more the larger other latents are.

    The second derivatives of the log-density without a latent's own prior are computed at points
    at which other latents are moved. Their logarithms are fitted by a linear function of the other
    latents. A latent is scaled if the fit is good and one of the others has the power of a factor.
    Latents with such a law but without a factor, for instance an intercept, join its block.

    :param target: the posterior.
    :param middle: the middle of the posterior, ``(latent_dim,)``.
    :param known: sites that are noise already.
    :param policy: limits of the analysis.
    """
    if target.is_enumerated:
        return {}
    try:
        nodes = target.trace_at(middle).nodes
    except IMPOSSIBLE:
        return {}
    names = [name for name in target.shapes if name not in known and _is_plain(nodes[name])]
    names = sorted(names, key=lambda name: -target.shapes[name].numel())[: policy.max_sites]
    if not names or len(target.shapes) == 1:
        return {}
    found = _blocks(target, _laws(target, middle, names, nodes, policy), policy)
    return {
        name: ScaledReparam(block, target.shapes[name])
        for block in (_block(target, middle, powers, nodes, policy) for powers in found)
        for name in block.shapes
    }


def _is_plain(site: dict[str, Any]) -> bool:
    is_other = ConditionalReparam.is_vector, ConditionalReparam.is_log_normal
    return ConditionalReparam.suits_site(site) and not any(one(site["fn"]) for one in is_other)


def _laws(
    target: Target, middle: Tensor, names: list[str], nodes: dict[str, Any], policy: SpacePolicy
) -> dict[str, Powers]:
    """Fit the powers of other latents by which the information on each site grows."""
    generator = torch.Generator().manual_seed(0)
    moves = policy.point_spread * torch.randn(
        policy.num_points, len(middle), generator=generator
    ).to(middle)
    places = target.split(torch.arange(len(middle), device=middle.device))
    laws = {}
    for name in names:
        place, shape = places[name], target.shapes[name]
        watched = torch.linspace(
            0, place.numel() - 1, min(place.numel(), policy.max_watched)
        ).long()
        others = [one for one in target.shapes if one != name]
        others = [one for one in others if _broadcasts(target.shapes[one], shape)]
        if not others or len(others) > policy.num_points * len(watched) // 3:
            continue
        still = moves.clone()
        still[:, place.flatten()] = 0.0
        scale = base_distribution(nodes[name]["fn"]).scale.expand(shape).flatten()[watched]
        columns = place.flatten()[watched]
        told_at = scale.square() * _curvatures(target, middle + still, name, columns)
        moved = [still[:, places[other].expand(shape).flatten()[watched]] for other in others]
        powers = _law(told_at, torch.stack(moved, -1), policy)
        if powers is not None:
            kept = zip(others, powers.tolist(), strict=True)
            laws[name] = {other: power for other, power in kept if abs(power) > policy.least_power}
    return laws


def _law(told_at: Tensor, moved: Tensor, policy: SpacePolicy) -> Tensor | None:
    """Fit powers to information ``(num_points, num_elements)``, in units of the prior's, and moves
    of others ``(num_points, num_elements, num_others)``; None for a poor fit."""
    sound = (told_at.isfinite() & (told_at > 0)).all(0) & (told_at.mean(0) > policy.least_told)
    if not sound.any():
        return None
    told_at, moved = told_at[:, sound], moved[:, sound]
    weight = (told_at / (1 + told_at)).mean(0)
    response = (weight * (told_at.log() - told_at.log().mean(0))).flatten()
    factors = (weight.unsqueeze(-1) * (moved - moved.mean(0))).flatten(0, 1)
    powers = torch.linalg.lstsq(factors, response.unsqueeze(-1)).solution.squeeze(-1)
    rest = (response - factors @ powers).square().mean()
    is_explained = rest < max((1 - policy.explained) * response.square().mean(), policy.constant**2)
    return powers if is_explained else None


def _blocks(
    target: Target, laws: dict[str, Powers], policy: SpacePolicy
) -> list[dict[str, Powers]]:
    """Group sites with a factor, and sites with a law next to them; a factor stays as it is."""

    def factors(name: str) -> set[str]:
        return {other for other, power in laws[name].items() if power > policy.factor_power}

    chosen: list[str] = []
    kept: set[str] = set()
    for name in sorted(laws, key=lambda name: not factors(name)):
        is_needed = bool(factors(name)) or bool(chosen)
        if is_needed and name not in kept and not factors(name) & set(chosen):
            chosen.append(name)
            kept |= set(laws[name]) - set(chosen)
    blocks: list[dict[str, Powers]] = [{}]
    sizes = {name: target.shapes[name].numel() for name in chosen}
    given = {
        name: {one: power for one, power in laws[name].items() if one not in chosen}
        for name in chosen
    }
    long = [name for name in chosen if factors(name) and _has_one_scale(target, given[name])]
    long = [name for name in long if sizes[name] <= policy.max_series]
    series = max(long, key=lambda name: sizes[name], default=None)
    size = 0
    for name in chosen:
        if name == series:
            continue
        if size + sizes[name] <= policy.max_dense:
            blocks[0][name], size = given[name], size + sizes[name]
        elif factors(name):
            blocks.append({name: given[name]})
    if series is not None:  # the last of its block
        blocks[0][series] = given[series]
    return [block for block in blocks if any(factors(name) for name in block)]


def _has_one_scale(target: Target, powers: Powers) -> bool:
    return all(target.shapes[other].numel() == 1 for other in powers)


def _block(
    target: Target,
    middle: Tensor,
    powers: dict[str, Powers],
    nodes: dict[str, Any],
    policy: SpacePolicy,
) -> ScaledBlock:
    shapes = {name: target.shapes[name] for name in powers}
    at, known = target.split(middle), {one for own in powers.values() for one in own}
    parents = {one: at[one] for one in known}
    suffix = unused_suffix(target.shapes, nodes)
    last = list(powers)[-1]
    count = sum(shape.numel() for name, shape in shapes.items() if name != last)
    is_long = count <= policy.max_dense and shapes[last].numel() <= policy.max_series
    if is_long and _has_one_scale(target, powers[last]):
        expansion = _expansion(target, middle, shapes, nodes, policy)
        precision, information, locs, series = _with_series(*expansion, count, policy, middle)
    else:
        precision, information, locs = _whole(target, middle, shapes, nodes, policy)
        series = None
    common = precision, information, locs, suffix, policy.factor_power
    return ScaledBlock(powers, parents, shapes, *common, series)


def _whole(
    target: Target,
    middle: Tensor,
    shapes: Mapping[str, torch.Size],
    nodes: dict[str, Any],
    policy: SpacePolicy,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, h and l of a block without a series."""
    columns, loc, scale = _prior(target, shapes, nodes)
    is_dense = len(columns) <= policy.max_dense
    rows, size = (1, len(columns)) if is_dense else (len(columns), 1)
    columns, loc, scale = (one.reshape(rows, size) for one in (columns, loc, scale))
    with torch.enable_grad():
        point = middle.unsqueeze(0).requires_grad_()
        score = score_of_rest(target, point, list(shapes))
        curvature = -own_hessians(target, point, score, [columns], policy)[0]
    others = scale if curvature.dim() == 4 else scale.unsqueeze(-2)
    curvature = curvature * scale.reshape(*scale.shape, *(1,) * (curvature.dim() - 2)) * others
    value, loc = middle[columns] / scale, loc / scale
    prior = dist.MultivariateNormal(loc, torch.eye(size).to(value))
    said = told(prior, curvature, score[0, columns].detach() * scale, value)
    precision, information = (one[0] if is_dense else one.flatten() for one in said)
    return precision, information, loc.flatten()


def _expansion(
    target: Target,
    middle: Tensor,
    shapes: Mapping[str, torch.Size],
    nodes: dict[str, Any],
    policy: SpacePolicy,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, h and l at the mode of the latents given the others, in double precision."""
    columns, loc, scale = _prior(target, shapes, nodes)
    loc, scale = (loc / scale).double(), scale.double()
    identity = torch.eye(len(columns)).to(loc)
    point = middle.clone()
    for _ in range(policy.newton_steps):
        with torch.enable_grad():
            at = point.unsqueeze(0).requires_grad_()
            score = score_of_rest(target, at, list(shapes))
            rows = []
            for some in columns.split(policy.columns_at_once):
                directions = point.new_zeros(len(some), len(point))
                directions[torch.arange(len(some)), some] = 1.0
                rows += [one[0, columns] for one in target.hessian_products(at, score, directions)]
        precision = -torch.stack(rows).double() * scale * scale.unsqueeze(-1)
        factor, failed = torch.linalg.cholesky_ex(precision + identity)
        if failed:
            vectors, values = eigenbasis(precision, least=0.0)
            precision = (vectors * values) @ vectors.mT
            factor = torch.linalg.cholesky(precision + identity)
        value = point[columns].double() / scale
        information = score[0, columns].detach().double() * scale + precision @ value
        mode = torch.cholesky_solve((information + loc).unsqueeze(-1), factor).squeeze(-1)
        if (factor.mT @ (mode - value)).square().mean() < policy.newton_error**2:
            break
        point[columns] = (mode * scale).to(point)
    return precision, information, loc


def _with_series(
    precision: Tensor,
    information: Tensor,
    locs: Tensor,
    count: int,
    policy: SpacePolicy,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Series]:
    """Return W, h and l of the first latents, and the series of the rest."""
    vectors, values = eigenbasis(precision[count:, count:], policy.least_told)
    inner = vectors.mT @ information[count:]
    told_of = LinearTerm(inner, information[count:] - vectors @ inner)
    coupling = vectors.mT @ precision[count:, :count]
    series = Series(vectors, values, told_of, vectors.mT @ locs[count:], coupling)
    found = precision[:count, :count], information[:count], locs[:count], series
    return pytree.tree_map(lambda one: one.to(like), found)


def _prior(
    target: Target, shapes: Mapping[str, torch.Size], nodes: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return places in the latent vector, locations and scales of the priors, ``(n,)``."""
    places = target.split(torch.arange(target.latent_dim, device=target.init_loc.device))
    moments = [_moments(nodes[name]["fn"], shape) for name, shape in shapes.items()]
    loc, scale = (torch.cat(one) for one in zip(*moments, strict=True))
    return torch.cat([places[name].flatten() for name in shapes]), loc, scale


def _moments(fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    fn = base_distribution(fn)
    return fn.loc.expand(shape).flatten(), fn.scale.expand(shape).flatten()


def _curvatures(target: Target, points: Tensor, name: str, columns: Tensor) -> Tensor:
    """Return negative second derivatives ``(num_points, num_columns)`` without a site's prior."""
    with torch.enable_grad():
        points = points.requires_grad_()
        score = score_of_rest(target, points, [name])
        directions = points.new_zeros(len(columns), points.shape[-1])
        directions[torch.arange(len(columns)), columns] = 1.0
        products = target.hessian_products(points, score, directions)
    return -torch.stack([one[:, c] for one, c in zip(products, columns, strict=True)], -1)


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, other) == other
    except RuntimeError:
        return False
