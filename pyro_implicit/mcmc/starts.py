# SPDX-License-Identifier: Apache-2.0
"""Where a guide lets chains start."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Guide", "Starts", "check_sites", "finite_starts", "latent_draws", "wrong_shape"]

CLAMPED = 1e-3  # how far a draw may be from what its unconstrained vector says, by its size
NOWHERE = "the model's log-density or its gradient is finite at none of"

Guide = Callable[..., Any] | Mapping[str, Tensor]


class Starts(NamedTuple):
    """Where chains start, ``(num_chains, d)``, and how many starts were replaced because the
    density was not finite there."""

    points: Tensor
    replaced: int


@torch.no_grad()
def latent_draws(
    density: Target, guide: Guide, num_draws: int, args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """Draws of a guide, or given ones, as vectors ``(num_draws, latent_dim)``.

    Given draws are taken in turn: of fewer draws than are wanted each starts several chains.

    :raises ValueError: for a guide, or draws, of another model, or if all are outside of the
        latents' supports or on the boundary.
    """
    if isinstance(guide, Mapping):
        draws = dict(guide)
    else:
        draws = draw(guide, num_draws, *args, **kwargs)
    check_sites(density, draws, guide)
    extra = sorted(set(draws) - set(density.shapes))
    if extra:
        who, have = _who(guide)
        warn_user(f"{who} {have} {extra}, which the model does not sample: left out")
    like = density.init_loc
    draws = {name: draws[name].detach().to(like) for name in density.shapes}
    vectors = _unconstrained(density, draws)
    if not vectors.isfinite().all(-1).any():
        raise ValueError(
            f"{NOWHERE} {len(vectors)} {_whose(guide)}: {_outside(density, draws, vectors)}. Cure: "
            "finite draws inside of the latents' supports"
        )
    return vectors[torch.arange(num_draws, device=like.device) % len(vectors)]


def finite_starts(score: Any, points: Tensor, guide: Guide, blamed: Callable[[], str]) -> Starts:
    """Replace starts at which the density or its gradient is not finite by others of them.

    :param guide: whose draws these are.
    :param blamed: which sites keep the density from being finite at all of them, and the cure.
    :raises ValueError: if it is finite at none.
    """
    log_prob, gradient = score(torch.where(points.isfinite(), points, torch.zeros_like(points)))
    finite = points.isfinite().all(-1) & log_prob.isfinite() & gradient.isfinite().all(-1)
    lost = int((~finite).sum())
    who = _whose(guide)
    if lost == len(points):
        raise ValueError(
            f"{NOWHERE} {lost} {who}: {blamed()}; or train the guide first, or start from draws of "
            "the prior"
        )
    if lost:
        warn_user(
            f"the model's log-density is not finite at {lost} of {len(points)} {who}: "
            "these chains start from others of the draws",
        )
        good = finite.nonzero().squeeze(-1)
        points = points.clone()
        points[~finite] = points[good[torch.randint(len(good), (lost,), device=good.device)]]
    return Starts(points, lost)


def wrong_shape(
    guide: Guide, name: str, shape: tuple[int | str, ...], wanted: tuple[int, ...]
) -> ValueError:
    """The error for draws that are not of the model.

    :param guide: that made them, or the draws themselves.
    :param name: of the site.
    :param shape: of the draws, their number first.
    :param wanted: the shape of the model's site.
    """
    if not isinstance(guide, Mapping):
        return ValueError(
            f"{_who(guide)[0]} has draws of shape {shape} at site '{name}', but the model wants "
            f"{('num_draws', *wanted)}. Cure: a guide of this model, called with the same data"
        )
    cure = "draws of this model, with the same data"
    if shape == wanted:
        cure = ".unsqueeze(0), if it is a single draw"
    elif shape == (0, *wanted):
        cure = "at least one draw"
    return ValueError(
        f"the given draws of site '{name}' have shape {shape}, but the model wants "
        f"{('num_draws', *wanted)}. Cure: {cure}"
    )


def check_sites(density: Target, draws: Mapping[str, Tensor], guide: Guide) -> None:
    """Check that draws are of a model's latents, as many of each.

    :param guide: that made them, or the draws themselves.
    :raises ValueError: naming a site.
    """
    who, have = _who(guide)
    missing = sorted(set(density.shapes) - set(draws))
    extra = sorted(set(draws) - set(density.shapes))
    if missing:
        raise ValueError(
            f"{who} {have} no draws of {missing}, which the model samples"
            + (f", but {have} {extra}, which it does not" if extra else "")
            + f". Cure: {'draws' if isinstance(guide, Mapping) else 'a guide'} of this model, with "
            "every latent site"
        )
    expected = density.constrain(density.init_loc.unsqueeze(0))
    for name in density.shapes:
        shape, wanted = tuple(draws[name].shape), tuple(expected[name].shape[1:])
        if len(shape) == 0 or shape[1:] != wanted or shape[0] == 0:
            raise wrong_shape(guide, name, shape, wanted)
    counts = {name: len(draws[name]) for name in density.shapes}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} of '{name}'" for name, count in counts.items())
        raise ValueError(
            f"{who} {have} different numbers of draws by site: {found}. Cure: as many of each, of "
            "which those of one number belong together"
        )


def _who(guide: Guide) -> tuple[str, str]:
    """What made the draws, and its verb."""
    if isinstance(guide, Mapping):
        return "the given draws", "have"
    return f"the guide {getattr(guide, '__name__', type(guide).__name__)}", "has"


def _whose(guide: Guide) -> str:
    return "given draws" if isinstance(guide, Mapping) else f"draws of {_who(guide)[0]}"


def _unconstrained(density: Target, draws: dict[str, Tensor]) -> Tensor:
    """Vectors, NaN where a draw is outside of a support: some transforms clamp what is."""
    vectors = density.unconstrain(draws)
    back = density.constrain(vectors)
    moved = []
    for name, part in density.split(vectors).items():
        far = (back[name] - draws[name]).abs() > CLAMPED * (1 + draws[name].abs())
        width = part[0].numel()
        moved.append(far.reshape(len(far), -1).any(-1, keepdim=True).expand(-1, width))
    return vectors.masked_fill(torch.cat(moved, -1) & vectors.isfinite(), math.nan)


def _outside(density: Target, draws: dict[str, Tensor], vectors: Tensor) -> str:
    """Where the draws of sites lie, if not inside of their supports."""
    clauses = []
    for name, part in density.split(vectors).items():
        lost = ~part.isfinite().reshape(len(part), -1).all(-1)
        if not lost.any():
            continue
        value = draws[name][lost]
        where = "outside of its support"
        if not value.isfinite().all():
            where = "not finite"
        elif not part.isnan().any():
            where = "on the boundary of its support"
        if value.isfinite().all() and value.unique().numel() == 1:
            where = f"{value.flatten()[0].item():.3g}, {where}"
        clauses.append(f"those of '{name}' are {where} ({int(lost.sum())} of them)")
    return "; ".join(clauses)
