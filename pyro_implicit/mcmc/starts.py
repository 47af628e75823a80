# SPDX-License-Identifier: Apache-2.0
"""Starts of chains at which the density is finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.guides.sampler import NOWHERE, Sampler
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Starts", "finite_starts"]


class Starts(NamedTuple):
    """Where chains start, ``(num_chains, d)``, and how many starts were replaced because the
    density was not finite there."""

    points: Tensor
    replaced: int


def finite_starts(
    score: Any, points: Tensor, sampler: Sampler, blamed: Callable[[], str]
) -> Starts:
    """Replace starts at which the density or its gradient is not finite by others of them.

    :param sampler: the source of the points.
    :param blamed: which sites keep the density from being finite at all of them, and the cure.
    :raises ValueError: if it is finite at none.
    """
    log_prob, gradient = score(torch.where(points.isfinite(), points, torch.zeros_like(points)))
    finite = points.isfinite().all(-1) & log_prob.isfinite() & gradient.isfinite().all(-1)
    lost = int((~finite).sum())
    if lost == len(points):
        raise ValueError(
            f"{NOWHERE} {lost} {sampler.source}: {blamed()}; or train the guide first, or start "
            "from draws of the prior"
        )
    if lost:
        warn_user(
            f"the model's log-density is not finite at {lost} of {len(points)} {sampler.source}: "
            "these chains start from others of the draws",
        )
        good = finite.nonzero().squeeze(-1)
        points = points.clone()
        points[~finite] = points[good[torch.randint(len(good), (lost,), device=good.device)]]
    return Starts(points, lost)
