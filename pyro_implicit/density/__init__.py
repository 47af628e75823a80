# SPDX-License-Identifier: Apache-2.0
"""The posterior as a function on R^d: log-density, derivatives, modes, checks of the model."""

from __future__ import annotations

from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.supports import SupportReparam
from pyro_implicit.density.target import Target

__all__ = [
    "Modes",
    "SubsampledError",
    "SupportReparam",
    "Target",
    "find_modes",
]
