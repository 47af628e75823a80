# SPDX-License-Identifier: Apache-2.0
"""From a posterior to a decision: leave-one-out cross-validation, checks, sensitivity."""

from __future__ import annotations

from pyro_implicit.decisions.leave_one_out import LeaveOneOut
from pyro_implicit.decisions.power_scaling import PowerScaling, Sensitivity
from pyro_implicit.decisions.predictive_checks import (
    Band,
    PredictiveCheck,
    SiteCheck,
    Statistic,
)

__all__ = [
    "Band",
    "LeaveOneOut",
    "PowerScaling",
    "PredictiveCheck",
    "Sensitivity",
    "SiteCheck",
    "Statistic",
]
