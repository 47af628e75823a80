# SPDX-License-Identifier: Apache-2.0
"""Find latents that the model multiplies by functions of others, and the laws of their scales."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.policy import DEFAULT, SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_reparam import (
    SUFFIX,
    ConditionalReparam,
    base_distribution,
    data_information,
    own_hessians,
    score_of_rest,
)
from pyro_implicit.mcmc.spaces.scaled import ScaledBlock, ScaledReparam, Series
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.ops.matrices import LinearTerm, eigenbasis
from pyro_implicit.runtime.trees import map_tree

__all__ = ["scaled_reparams"]


Powers = dict[str, float]
ScaleOf = Callable[[Tensor], Tensor]
"""Maps points ``(num_points, latent_dim)`` to scales of a prior, ``(num_points, n)``."""


def scaled_reparams(
    target: Target,
    middle: Tensor,
    known: Collection[str] = (),
    policy: SpacePolicy = DEFAULT.space,
    written: Mapping[str, tuple[str, ScaleOf]] = MappingProxyType({}),
    suffix: str = SUFFIX,
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
    :param written: by the name of a noise in non-centred form, which is scaled like other latents,
        the site of the model and the function that maps points to the scales of its prior.
    :param suffix: suffix of the names of noise.
    """
    if target.summed_out:
        return {}
    try:
        nodes = target.trace_at(middle).nodes
    except IMPOSSIBLE:
        return {}
    names = [name for name in target.shapes if name in written or name not in known]
    names = [name for name in names if _is_plain(nodes[name])]
    names = sorted(names, key=lambda name: -target.shapes[name].numel())[: policy.max_sites]
    if not names or len(target.shapes) == 1:
        return {}
    scales = {name: scale for name, (_, scale) in written.items()}
    sites = {name: site for name, (site, _) in written.items()}
    analysis = _Analysis(target, middle, nodes, scales, policy)
    found = _blocks(target, _laws(analysis, names), policy)
    try:
        blocks = [_block(analysis, laws, suffix, sites) for laws in found]
    except torch.linalg.LinAlgError:  # derivatives that are not finite
        return {}
    return {
        name: ScaledReparam(block, shape)
        for block in blocks
        for name, shape in block.shapes.items()
    }


class _Analysis(NamedTuple):
    target: Target
    middle: Tensor
    nodes: dict[str, Any]
    written: Mapping[str, ScaleOf]
    policy: SpacePolicy

    def others(self, name: str) -> list[str]:
        """Return the latents that may scale a site."""
        shapes = self.target.shapes
        return [one for one in shapes if one != name and _broadcasts(shapes[one], shapes[name])]

    def moved(self, moves: Tensor, name: str, others: Iterable[str]) -> list[Tensor]:
        """Return the moves of other latents for each element, ``(num_points, numel)``."""
        parts, shape, found = self.target.split(moves), self.target.shapes[name], []
        for other in others:
            lacking = (1,) * (len(shape) - len(self.target.shapes[other]))
            part = parts[other].reshape(len(moves), *lacking, *self.target.shapes[other])
            found.append(part.expand(len(moves), *shape).reshape(len(moves), -1))
        return found

    def held(self, moves: Tensor, factors: Mapping[str, Powers]) -> Tensor:
        """Return points at which others have moved, and products with factors have not."""
        points = self.middle + moves
        places = self.target.places
        for name, powers in factors.items():
            moved = self.moved(moves, name, powers)
            log_scale: Any = sum(
                power / 2 * one for power, one in zip(powers.values(), moved, strict=True)
            )
            place = places[name].flatten()
            points[:, place] = self.middle[place] * torch.as_tensor(-log_scale).exp()
        return points

    def scale_law(self, name: str, moves: Tensor) -> Powers:
        """Return the powers by which the variance of a site of the model grows, if exact."""
        log_scale = self.written[name](self.middle + moves).log()
        log_scale = 2 * (log_scale - log_scale.mean(0))
        others = self.others(name)
        moved = torch.stack(self.moved(moves, name, others), -1)
        moved = (moved - moved.mean(0)).flatten(0, 1)
        if not log_scale.isfinite().all():
            return {}
        powers = torch.linalg.lstsq(moved, log_scale.reshape(-1, 1)).solution.squeeze(-1)
        return {
            one: power
            for one, power in zip(others, powers.tolist(), strict=True)
            if abs(power) > self.policy.least_power
        }

    def law(self, name: str, moves: Tensor, factors: Mapping[str, Powers]) -> Powers | None:
        """Fit the law of a site; None for a poor fit.

        :param factors: latents that count as factors, with their own laws.
        """
        policy = self.policy
        others = [one for one in self.others(name) if one not in factors]
        shape = self.target.shapes[name]
        size = shape.numel()
        watched = torch.linspace(0, size - 1, min(size, policy.max_watched)).long()
        if not others or len(others) > policy.num_points * len(watched) // 3:
            return None
        place = self.target.places[name].flatten()
        moves = moves.index_fill(1, place, 0.0)
        points = self.held(moves, factors)
        scale = base_distribution(self.nodes[name]["fn"]).scale.expand(shape).flatten()[watched]
        told_at = scale.square() * _curvatures(self, points, name, place[watched])
        moved = [one[:, watched] for one in self.moved(moves, name, others)]
        powers = _law(told_at, torch.stack(moved, -1), policy)
        if powers is None:
            return None
        kept = zip(others, powers.tolist(), strict=True)
        return {other: power for other, power in kept if abs(power) > policy.least_power}

    def score_of_rest(self, points: Tensor, names: Iterable[str]) -> Tensor:
        """Differentiate the log-density without the priors of some sites."""
        names = list(names)
        # The family's density, in units of the normal's.
        factors = [f"{name}_factor" for name in names if name in self.written]
        return score_of_rest(self.target, points, names + factors)

    def prior(self, shapes: Mapping[str, torch.Size]) -> tuple[Tensor, Tensor, Tensor]:
        """Return places in the latent vector, locations and scales of the priors, ``(n,)``."""
        places = self.target.places
        moments = [_moments(self.nodes[name]["fn"], shape) for name, shape in shapes.items()]
        loc, scale = (torch.cat(one) for one in zip(*moments, strict=True))
        return torch.cat([places[name].flatten() for name in shapes]), loc, scale


def _is_plain(site: dict[str, Any]) -> bool:
    is_other = ConditionalReparam.is_vector, ConditionalReparam.is_bounded
    return ConditionalReparam.suits_site(site) and not any(one(site["fn"]) for one in is_other)


class _Law(NamedTuple):
    """Powers b by the other latent, and their part that does not stem from factors."""

    powers: Powers
    rests: Powers

    @property
    def factors(self) -> set[str]:
        return {name for name, power in self.powers.items() if power != self.rests.get(name, 0.0)}

    def without(self, names: Collection[str]) -> _Law:
        return _Law(*({name: own[name] for name in own if name not in names} for own in self))


def _laws(analysis: _Analysis, names: list[str]) -> dict[str, _Law]:
    """Fit the powers of other latents by which the information on each site grows.

    Latents are divided by what their factors have grown by, so that what the data see stays, and
    with it what they say: a logistic regression says less of a coefficient the larger it is.
    """
    policy, middle = analysis.policy, analysis.middle
    generator = torch.Generator().manual_seed(0)
    moves = policy.point_spread * torch.randn(
        policy.num_points, len(middle), generator=generator, device="cpu"
    ).to(middle)
    known = {name: analysis.scale_law(name, moves) for name in names if name in analysis.written}
    factors = dict(known)
    found: dict[str, Powers] = {}
    for _ in range(policy.law_rounds):
        fits = ((name, analysis.law(name, moves, factors)) for name in names)
        found = {name: powers for name, powers in fits if powers is not None}
        grown = {
            name: known.get(name, {one: power for one, power in powers.items() if power > 1})
            for name, powers in found.items()
        }
        # A factor moves; latents without a factor, for instance a level, stay as well.
        used = {one for own in grown.values() for one in own}
        grown = {name: own for name, own in grown.items() if name in known or name not in used}
        if [(name, *own) for name, own in grown.items()] == [
            (name, *own) for name, own in factors.items()
        ]:
            break
        factors = grown
    own_powers, rests = {}, {}
    for name, powers in found.items():
        large = {one: power for one, power in powers.items() if power > policy.factor_power}
        own_powers[name] = own = known.get(name, large)
        lacking = {one: powers.get(one, 0.0) - own.get(one, 0.0) for one in powers.keys() | own}
        rests[name] = {
            one: power for one, power in lacking.items() if abs(power) > policy.least_power
        }
    rests = _pooled(rests, policy)
    laws = {}
    for name, own in own_powers.items():
        others = own.keys() | rests[name]
        powers = {one: own.get(one, 0.0) + rests[name].get(one, 0.0) for one in others}
        laws[name] = _Law(powers, rests[name])
    return laws


def _pooled(rests: dict[str, Powers], policy: SpacePolicy) -> dict[str, Powers]:
    """Average the powers of a latent if those of all sites nearly agree, as of one noise scale.

    The noise of a level, with its series integrated out, is the difference of two large matrices,
    which must grow together.
    """
    pooled = {name: dict(own) for name, own in rests.items()}
    for one in {one for own in rests.values() for one in own}:
        powers = [own[one] for own in rests.values() if one in own]
        if max(powers) - min(powers) <= policy.equal_powers:
            for own in pooled.values():
                if one in own:
                    own[one] = fmean(powers)
    return pooled


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


def _blocks(target: Target, laws: dict[str, _Law], policy: SpacePolicy) -> list[dict[str, _Law]]:
    """Group sites with a factor, and sites with a law next to them; a factor stays as it is."""

    chosen: list[str] = []
    kept: set[str] = set()
    for name in sorted(laws, key=lambda name: not laws[name].factors):
        is_needed = bool(laws[name].factors) or bool(chosen)
        if is_needed and name not in kept and not laws[name].factors & set(chosen):
            chosen.append(name)
            kept |= set(laws[name].powers) - set(chosen)
    given = {name: laws[name].without(chosen) for name in chosen}
    blocks: list[dict[str, _Law]] = [{}]
    sizes = {name: target.shapes[name].numel() for name in chosen}
    long = [name for name in chosen if given[name].factors and _has_one_scale(target, given[name])]
    long = [name for name in long if sizes[name] <= policy.max_series]
    series = max(long, key=lambda name: sizes[name], default=None)
    size = 0
    for name in chosen:
        if name == series:
            continue
        if size + sizes[name] <= policy.max_dense:
            blocks[0][name], size = given[name], size + sizes[name]
        elif given[name].factors:
            blocks.append({name: given[name]})
    if series is not None:  # the last of its block
        blocks[0][series] = given[series]
    return [block for block in blocks if any(one.factors for one in block.values())]


def _has_one_scale(target: Target, law: _Law) -> bool:
    return all(target.shapes[one].numel() == 1 for own in law for one in own)


def _block(
    analysis: _Analysis, laws: dict[str, _Law], suffix: str, names: Mapping[str, str]
) -> ScaledBlock:
    target, policy = analysis.target, analysis.policy
    shapes = {name: target.shapes[name] for name in laws}
    at = target.split(analysis.middle)
    parents = {one: at[one] for law in laws.values() for own in law for one in own}
    last = list(laws)[-1]
    count = sum(shape.numel() for name, shape in shapes.items() if name != last)
    is_long = count <= policy.max_dense and shapes[last].numel() <= policy.max_series
    series = None
    if is_long and laws[last].factors and _has_one_scale(target, laws[last]):
        precision, information, locs, series = _with_series(analysis, shapes, count)
    else:
        precision, information, locs = _whole(analysis, shapes)
    named = {names.get(name, name): law for name, law in laws.items()}
    return ScaledBlock(
        {name: law.powers for name, law in named.items()},
        {name: law.rests for name, law in named.items()},
        parents,
        {names.get(name, name): shape for name, shape in shapes.items()},
        precision,
        information,
        locs,
        suffix,
        series,
    )


def _whole(analysis: _Analysis, shapes: Mapping[str, torch.Size]) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, h and l of a block without a series."""
    _, middle, _, _, policy = analysis
    columns, loc, scale = analysis.prior(shapes)
    is_dense = len(columns) <= policy.max_dense
    rows, size = (1, len(columns)) if is_dense else (len(columns), 1)
    columns, loc, scale = (one.reshape(rows, size) for one in (columns, loc, scale))
    with torch.enable_grad():
        score_of = functools.partial(analysis.score_of_rest, names=shapes)
        score, hessians = own_hessians(score_of, middle.unsqueeze(0), [columns], policy)
        curvature = -hessians[0][0]
    others = scale if curvature.dim() == 4 else scale.unsqueeze(-2)
    curvature = curvature * scale.reshape(*scale.shape, *(1,) * (curvature.dim() - 2)) * others
    value, loc = middle[columns] / scale, loc / scale
    prior = dist.MultivariateNormal(loc, torch.eye(size).to(value))
    found = data_information(prior, curvature, score[0, columns] * scale, value)
    precision, information = (one[0] if is_dense else one.flatten() for one in found)
    return precision, information, loc.flatten()


def _expansion(
    analysis: _Analysis, shapes: Mapping[str, torch.Size]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, h and l at the mode of the latents given the others, in double precision."""
    _, middle, _, _, policy = analysis
    columns, loc, scale = analysis.prior(shapes)
    loc, scale = (loc / scale).double(), scale.double()
    identity = torch.eye(len(columns)).to(loc)
    point = middle.clone()
    for _ in range(policy.newton_steps):
        with torch.enable_grad():
            at = point.unsqueeze(0).requires_grad_()
            score = analysis.score_of_rest(at, shapes)
            rows = []
            for some in columns.split(policy.columns_at_once):
                directions = one_hot(some, len(point)).to(point)
                rows += [one[0, columns] for one in hessian_products(score, at, directions)]
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
    analysis: _Analysis, shapes: Mapping[str, torch.Size], count: int
) -> tuple[Tensor, Tensor, Tensor, Series]:
    """Return W, h and l of the first latents, and the series of the rest."""
    precision, information, locs = _expansion(analysis, shapes)
    vectors, values = eigenbasis(precision[count:, count:], analysis.policy.least_told)
    inner = vectors.mT @ information[count:]
    linear_of = LinearTerm(inner, information[count:] - vectors @ inner)
    coupling = vectors.mT @ precision[count:, :count]
    series = Series(vectors, values, linear_of, vectors.mT @ locs[count:], coupling)
    found = precision[:count, :count], information[:count], locs[:count], series
    return map_tree(lambda one: one.to(analysis.middle), found)


def _moments(fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    fn = base_distribution(fn)
    return fn.loc.expand(shape).flatten(), fn.scale.expand(shape).flatten()


def _curvatures(analysis: _Analysis, points: Tensor, name: str, columns: Tensor) -> Tensor:
    """Return negative second derivatives ``(num_points, num_columns)`` without a site's prior."""
    with torch.enable_grad():
        points = points.requires_grad_()
        score = analysis.score_of_rest(points, [name])
        directions = one_hot(columns, points.shape[-1]).to(points)
        products = hessian_products(score, points, directions)
    return -torch.stack([one[:, c] for one, c in zip(products, columns, strict=True)], -1)


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, other) == other
    except RuntimeError:
        return False
