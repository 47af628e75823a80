# SPDX-License-Identifier: Apache-2.0
"""Distributions without a density, for the ``pyro.sample`` statements of a guide."""

from __future__ import annotations

from pyro_implicit.distributions.implicit import (
    Draw,
    Implicit,
    IntractableDensityError,
    TransformedDraw,
    draw_through,
    find_implicit,
)
from pyro_implicit.distributions.mixture import Mixture
from pyro_implicit.distributions.semi_implicit import SemiImplicit

__all__ = [
    "Draw",
    "Implicit",
    "IntractableDensityError",
    "Mixture",
    "SemiImplicit",
    "TransformedDraw",
    "find_implicit",
    "draw_through",
]
