# SPDX-License-Identifier: Apache-2.0
"""Distributions without a density, for the ``pyro.sample`` statements of a guide."""

from __future__ import annotations

from pyro_implicit.distributions.implicit import Implicit, IntractableDensityError
from pyro_implicit.distributions.mixture import Mixture
from pyro_implicit.distributions.semi_implicit import SemiImplicit
from pyro_implicit.distributions.unwrap import UnwrappedDraw, find_implicit, unwrap_draw

__all__ = [
    "Implicit",
    "IntractableDensityError",
    "Mixture",
    "SemiImplicit",
    "UnwrappedDraw",
    "find_implicit",
    "unwrap_draw",
]
