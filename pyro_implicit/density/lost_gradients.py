# SPDX-License-Identifier: Apache-2.0
"""Gradients that a model cuts on the way from its latents to its log-density."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["warn_of_lost_gradients"]

STEPS = (1e-2, 2.5e-3)  # of central differences, in unconstrained space
AWAY = 0.1  # from the start, where priors may have kinks
NUM_POINTS, MOST_GROUPS = 4, 6
AGREE, DIFFER = 0.005, 0.05
ROUNDING = 100.0  # times the resolution of the dtype
RESOLVED = 0.02  # of a step may be lost to the resolution of the points


@torch.no_grad()
def warn_of_lost_gradients(density: Target) -> None:
    """Compare the gradient of a log-density with its slopes, as differences give them.

    It says nothing where differences of two widths do not agree with each other (jumps, kinks,
    rounding, models that are random beyond their latents), nor unless the gradient is wrong at half
    of a few points near ``init_loc``. The caller's random stream is left alone.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))  # x.detach() would warn
    >>> warn_of_lost_gradients(Target(model))

    :param density: of the model.
    :warns UserWarning: naming sites and cure.
    """
    groups = _groups(density)
    start, random = density.init_loc, torch.Generator().manual_seed(0)
    shape = (len(groups), NUM_POINTS, density.latent_dim)
    away, toward = torch.randn((2, *shape), generator=random, dtype=torch.float64).to(start)
    points = (start + AWAY * away).flatten(0, 1)
    is_moved = torch.stack([is_moved for _, is_moved in groups]).unsqueeze(1)
    toward = torch.where(is_moved.to(start.device), toward, 0.0).flatten(0, 1)
    ends = [points + sign * step * toward for step in STEPS for sign in (1, -1)]
    try:
        value, score = density.score(points)
        up, down, *inside = density.log_prob(torch.cat(ends)).chunk(4)
    except Exception:  # the model's own, at these points: there are others to say it
        return
    claimed = (score * toward).sum(-1)
    wide, narrow = (up - down) / (2 * STEPS[0]), (inside[0] - inside[1]) / (2 * STEPS[1])
    size = wide.abs().maximum(claimed.abs())
    rounding = ROUNDING * torch.finfo(value.dtype).eps * (1 + value.abs()) / STEPS[1]
    spacing = torch.finfo(points.dtype).eps * torch.where(toward != 0, points, 0.0).abs().amax(-1)
    is_smooth = ((wide - narrow).abs() < AGREE * size) & (spacing < RESOLVED * STEPS[1])
    is_wrong = is_smooth & ((wide - claimed).abs() > DIFFER * size + rounding)
    counts = (one.reshape(shape[:2]).sum(-1).tolist() for one in (is_wrong, is_smooth))
    lost: list[str] = []
    for (names, _), num_wrong, num_smooth in zip(groups, *counts, strict=True):
        if num_wrong >= max(2, num_smooth / 2):
            lost += names
    if lost:
        shown = ", ".join(f"'{name}'" for name in lost[:3]) + ", ..." * (len(lost) > 3)
        warn_user(
            "the gradient of the model's log-density is not its slope, but leaves out what the "
            f"log-density owes to {shown}. Trainings and Stein's identities go wrong by it, and "
            "chains are slow. Cure: compute with torch all the way from the latents to the "
            "likelihood, without torch.no_grad, .detach(), .item(), float() or NumPy"
        )


def _groups(density: Target) -> list[tuple[list[str], Tensor]]:
    """Sites that are moved together: their names, and where they stand, ``(latent_dim,)``."""
    places = density.split(torch.arange(density.latent_dim))
    groups = []
    for part in np.array_split(list(places), min(MOST_GROUPS, len(places))):
        names = part.tolist()
        is_moved = torch.zeros(density.latent_dim, dtype=torch.bool)
        is_moved[torch.cat([places[name].flatten() for name in names])] = True
        groups.append((names, is_moved))
    return groups
