# SPDX-License-Identifier: Apache-2.0
"""Which guides know their density exactly: asked of what they are made of, not of their type."""

from __future__ import annotations

from typing import Any

import torch

from pyro_implicit.guides.auto_implicit import AutoImplicit
from pyro_implicit.guides.auto_mixture import AutoMixture

__all__ = ["has_exact_density", "why_inexact"]


def why_inexact(guide: AutoImplicit) -> str:
    """Why a guide has no exact density at its own draws, with the cure; empty where it has one.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoImplicit(model)
    >>> _ = guide()
    >>> why_inexact(guide).split(".")[0]
    'GatedMLP may give one value to several noises'

    :param guide: that was called once.
    """
    try:
        guide.get_transform()
    except NotImplementedError as error:
        return str(error)
    return ""


@torch.no_grad()
def has_exact_density(guide: Any) -> bool:
    """Whether it is an injective :class:`AutoImplicit`, or a mixture of such that know the density
    at each other's draws too, by their generators' ``inverse``.

    :param guide: that was called once.
    """
    if isinstance(guide, AutoMixture):
        q = guide.get_posterior()
        try:
            q.log_prob(guide.log_weights.new_zeros(q.event_shape))
        except NotImplementedError:
            return False
        return True
    return isinstance(guide, AutoImplicit) and not why_inexact(guide)
