# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: checks of a guide, comparison with reference draws, calibration, pictures."""

from __future__ import annotations

from pyro_implicit.diagnostics.against_reference import compare
from pyro_implicit.diagnostics.calibration import Calibration, simulation_based_calibration
from pyro_implicit.diagnostics.checks import uncovered_modes
from pyro_implicit.diagnostics.checkup import diagnose
from pyro_implicit.diagnostics.comparison import Comparison, SiteComparison, plot_posteriors
from pyro_implicit.diagnostics.distances import (
    maximum_mean_discrepancy,
    sliced_wasserstein,
    sliced_wasserstein_floor,
    sliced_wasserstein_interval,
    whiten,
)
from pyro_implicit.diagnostics.policy import ComparePolicy, Thresholds, VerdictPolicy
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.guides.posterior_draws import draw

__all__ = [
    "Calibration",
    "ComparePolicy",
    "Comparison",
    "Diagnosis",
    "SiteComparison",
    "Thresholds",
    "VerdictPolicy",
    "compare",
    "diagnose",
    "draw",
    "maximum_mean_discrepancy",
    "plot_posteriors",
    "simulation_based_calibration",
    "sliced_wasserstein",
    "sliced_wasserstein_floor",
    "sliced_wasserstein_interval",
    "uncovered_modes",
    "whiten",
]
