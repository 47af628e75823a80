# SPDX-License-Identifier: Apache-2.0
"""The model as a function of its latents: its log-density, its starts and its modes."""

from __future__ import annotations

from pyro_implicit.density.engine import SubsampledError
from pyro_implicit.density.modes import Modes, find_modes
from pyro_implicit.density.target import Target
from pyro_implicit.density.traced_score import TracedScore

__all__ = ["Target", "Modes", "SubsampledError", "TracedScore", "find_modes"]
