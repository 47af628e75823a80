# SPDX-License-Identifier: Apache-2.0
"""Which latents a model multiplies by functions of others, as seen in what the data say of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.conditional_reparam import (
    ConditionalReparam,
    base_distribution,
    unused_suffix,
)
from pyro_implicit.mcmc.noise_map import NoiseMap
from pyro_implicit.mcmc.pseudo_data import own_hessian, score_of_rest, told
from pyro_implicit.mcmc.scaled_reparam import PRODUCT, ScaledBlock, ScaledReparam

__all__ = ["are_round", "scaled_reparams"]

Powers = dict[str, float]

MOST_SITES = 12
MOST_WATCHED = 16  # elements of a site, of which the law is found
MOST_DENSE = 128
NUM_POINTS, SPREAD = 24, 0.3  # in unconstrained coordinates, of others
EXPLAINED, CONSTANT = 0.8, 0.1
LEAST_POWER = 0.1
LEAST_TOLD = 0.01  # of what the prior says
ROUND, FAR = 0.3, 3.0  # of a variance of 1, at so many standard deviations of others
SMALL_STEP = 1e-2


def scaled_reparams(
    density: Target, middle: Tensor, known: Collection[str] = ()
) -> dict[str, ScaledReparam]:
    """Of latents whose prior is fixed, those of which the data say more the larger others are.

    The second derivatives of the log-density without a latent's own prior are taken at points at
    which others are moved, and their logarithms fitted by a sum over these. Where that explains
    them, and one of them has the power of a factor, the latent is taken for scaled; what the data
    say of others with such a law beside it, an intercept for instance, is taken with it.

    :param density: of the model.
    :param middle: of the posterior, ``(latent_dim,)``.
    :param known: sites that are noise already.
    """
    if density.is_enumerated:
        return {}
    try:
        nodes = density.trace_at(middle).nodes
    except IMPOSSIBLE:
        return {}
    names = [name for name in density.shapes if name not in known and _is_plain(nodes[name])]
    names = sorted(names, key=lambda name: -density.shapes[name].numel())[:MOST_SITES]
    if not names or len(density.shapes) == 1:
        return {}
    found = _blocks(density, _laws(density, middle, names, nodes))
    return {
        name: ScaledReparam(block, density.shapes[name])
        for block in (_block(density, middle, powers, nodes) for powers in found)
        for name in block.shapes
    }


def are_round(noise_map: NoiseMap, middle: Tensor, names: Collection[str]) -> bool:
    """Whether latents are nearly standard normal where others are moved as far as they may be.

    Else their law holds for W at most, and not for h, as where a mean is moved as well.

    :param noise_map: that writes them as noise.
    :param middle: of the posterior, ``(latent_dim,)``, in the latents of ``noise_map.density``.
    :param names: of the latents.
    """
    centre = noise_map.to_points(middle.unsqueeze(0))
    places = noise_map.noise.split(torch.arange(centre.shape[-1], device=centre.device))
    own = torch.cat([places[noise_map.reparams[n].noise_name(n)].flatten() for n in names])
    is_other = torch.ones_like(centre[0], dtype=torch.bool)
    is_other[own] = False
    others = is_other.nonzero().flatten()
    steps = SMALL_STEP * torch.eye(centre.shape[-1]).to(centre)[others]
    ahead, behind = (noise_map.score(centre + one)[1] for one in (steps, -steps))
    bends = (behind - ahead)[torch.arange(len(others)), others] / (2 * SMALL_STEP)
    spread = bends.clamp(min=SPREAD**-2).nan_to_num(SPREAD**-2).rsqrt()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(NUM_POINTS, centre.shape[-1], generator=generator).to(centre)
    points = centre.repeat(NUM_POINTS, 1)
    points[:, others] += FAR * spread * drawn[:, others]
    points[:, own] = drawn[:, own]
    rest = (noise_map.score(points)[1] + points)[:, own].square().mean()
    return bool(rest < ROUND)


def _is_plain(site: dict[str, Any]) -> bool:
    is_other = ConditionalReparam.is_vector, ConditionalReparam.is_log_normal
    return ConditionalReparam.suits_site(site) and not any(one(site["fn"]) for one in is_other)


def _laws(
    density: Target, middle: Tensor, names: list[str], nodes: dict[str, Any]
) -> dict[str, Powers]:
    """By what powers of others the data say more of a site, where such a law holds."""
    generator = torch.Generator().manual_seed(0)
    moves = SPREAD * torch.randn(NUM_POINTS, len(middle), generator=generator).to(middle)
    places = density.split(torch.arange(len(middle), device=middle.device))
    laws = {}
    for name in names:
        place, shape = places[name], density.shapes[name]
        watched = torch.linspace(0, place.numel() - 1, min(place.numel(), MOST_WATCHED)).long()
        others = [one for one in density.shapes if one != name]
        others = [one for one in others if _broadcasts(density.shapes[one], shape)]
        if not others or len(others) > NUM_POINTS * len(watched) // 3:
            continue
        still = moves.clone()
        still[:, place.flatten()] = 0.0
        scale = base_distribution(nodes[name]["fn"]).scale.expand(shape).flatten()[watched]
        columns = place.flatten()[watched]
        told_at = scale.square() * _curvatures(density, middle + still, name, columns)
        moved = [still[:, places[other].expand(shape).flatten()[watched]] for other in others]
        powers = _law(told_at, torch.stack(moved, -1))
        if powers is not None:
            kept = zip(others, powers.tolist(), strict=True)
            laws[name] = {other: power for other, power in kept if abs(power) > LEAST_POWER}
    return laws


def _law(told_at: Tensor, moved: Tensor) -> Tensor | None:
    """The powers by which others scale what the data say, if that explains it.

    :param told_at: ``(num_points, num_elements)``, in units of what the prior says.
    :param moved: ``(num_points, num_elements, num_others)``.
    """
    sound = (told_at.isfinite() & (told_at > 0)).all(0) & (told_at.mean(0) > LEAST_TOLD)
    if not sound.any():
        return None
    told_at, moved = told_at[:, sound], moved[:, sound]
    weight = (told_at / (1 + told_at)).mean(0)
    response = (weight * (told_at.log() - told_at.log().mean(0))).flatten()
    factors = (weight.unsqueeze(-1) * (moved - moved.mean(0))).flatten(0, 1)
    powers = torch.linalg.lstsq(factors, response.unsqueeze(-1)).solution.squeeze(-1)
    rest = (response - factors @ powers).square().mean()
    is_explained = rest < max((1 - EXPLAINED) * response.square().mean(), CONSTANT**2)
    return powers if is_explained else None


def _blocks(density: Target, laws: dict[str, Powers]) -> list[dict[str, Powers]]:
    """Sites that go together: those with a factor, and beside them others of which there is a law.

    A site that scales another stays as it is.
    """

    def factors(name: str) -> set[str]:
        return {other for other, power in laws[name].items() if power > PRODUCT}

    chosen: list[str] = []
    kept: set[str] = set()
    for name in sorted(laws, key=lambda name: not factors(name)):
        is_needed = bool(factors(name)) or bool(chosen)
        if is_needed and name not in kept and not factors(name) & set(chosen):
            chosen.append(name)
            kept |= set(laws[name]) - set(chosen)
    blocks: list[dict[str, Powers]] = [{}]
    size = 0
    for name in chosen:
        powers = {one: power for one, power in laws[name].items() if one not in chosen}
        number = density.shapes[name].numel()
        if size + number <= MOST_DENSE:
            blocks[0][name], size = powers, size + number
        elif factors(name):
            blocks.append({name: powers})
    return [block for block in blocks if any(factors(name) for name in block)]


def _block(
    density: Target, middle: Tensor, powers: dict[str, Powers], nodes: dict[str, Any]
) -> ScaledBlock:
    """With W and h of the middle, in units of the priors."""
    places = density.split(torch.arange(len(middle), device=middle.device))
    shapes = {name: density.shapes[name] for name in powers}
    columns = torch.cat([places[name].flatten() for name in powers])
    moments = [_moments(nodes[name]["fn"], shape) for name, shape in shapes.items()]
    loc, scale = (torch.cat(one) for one in zip(*moments, strict=True))
    is_dense = len(columns) <= MOST_DENSE
    rows, size = (1, len(columns)) if is_dense else (len(columns), 1)
    columns, loc, scale = (one.reshape(rows, size) for one in (columns, loc, scale))
    with torch.enable_grad():
        point = middle.unsqueeze(0).requires_grad_()
        score = score_of_rest(density, point, list(powers))
        curvature = -own_hessian(density, point, score, columns)
    others = scale if curvature.dim() == 4 else scale.unsqueeze(-2)
    curvature = curvature * scale.reshape(*scale.shape, *(1,) * (curvature.dim() - 2)) * others
    value, loc = middle[columns] / scale, loc / scale
    prior = dist.MultivariateNormal(loc, torch.eye(size).to(value))
    said = told(prior, curvature, score[0, columns].detach() * scale, value)
    precision, information = (one[0] if is_dense else one.flatten() for one in said)
    at, known = density.split(middle), {one for own in powers.values() for one in own}
    parents = {one: at[one] for one in known}
    suffix = unused_suffix(density.shapes, nodes)
    return ScaledBlock(powers, parents, shapes, precision, information, loc.flatten(), suffix)


def _moments(fn: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    fn = base_distribution(fn)
    return fn.loc.expand(shape).flatten(), fn.scale.expand(shape).flatten()


def _curvatures(density: Target, points: Tensor, name: str, columns: Tensor) -> Tensor:
    """Minus the second derivatives ``(num_points, num_columns)`` without a site's own prior."""
    with torch.enable_grad():
        points = points.requires_grad_()
        score = score_of_rest(density, points, [name])
        directions = points.new_zeros(len(columns), points.shape[-1])
        directions[torch.arange(len(columns)), columns] = 1.0
        products = density.hessian_products(points, score, directions)
    return -torch.stack([one[:, c] for one, c in zip(products, columns, strict=True)], -1)


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    """Whether one shape broadcasts to another."""
    try:
        return torch.broadcast_shapes(shape, other) == other
    except RuntimeError:
        return False
