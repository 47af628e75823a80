# SPDX-License-Identifier: Apache-2.0
"""Distributions without a tractable density, for the ``pyro.sample`` statements of guides."""

from __future__ import annotations

from pyro_implicit.distributions.implicit import (
    Draw,
    Implicit,
    IntractableDensityError,
    Mixture,
    SemiImplicit,
    TransformedDraw,
    draw_through,
    find_implicit,
)

__all__ = [
    "Draw",
    "Implicit",
    "IntractableDensityError",
    "Mixture",
    "SemiImplicit",
    "TransformedDraw",
    "draw_through",
    "find_implicit",
]
