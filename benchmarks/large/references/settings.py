# SPDX-License-Identifier: Apache-2.0
"""Settings of the reference runs of the large models.

The first run has NumPyro's defaults (``USER``). If it does not pass the checks, the reference is
another run, with ``SETTINGS``. The times of both exclude the import of NumPyro.
"""

from __future__ import annotations

from benchmarks.large.references.augmented import (
    gp_student,
    horseshoe_poisson,
    log_variance,
    schools,
    student_walk,
    volatility,
)
from benchmarks.large.references.collapsed import cauchy_sparse, local_level

__all__ = ["MAX_COLUMNS", "MAX_VALUES", "MIN_ESS", "SAMPLERS", "SETTINGS", "USER"]

USER = "--samples 1000 --diagonal --sequential --optimise"
# Files of at most 100 kB: 36 columns of 1,500 draws.
MAX_COLUMNS, MAX_VALUES = 36, 54_000
# Of the worst of up to 2,003 columns; most references have more than 1,000 (``checks.jsonl``).
MIN_ESS = 400
SETTINGS = {
    "bayesian_lasso_200": "--noncentred beta --target-accept 0.9 --thin 3 --diagonal --optimise",
    "cox_process_100": "--samples 1500 --optimise",
}
# An exact sampler, its draws of each chain, and the steps between two draws.
SAMPLERS = {
    "cauchy_sparse": (cauchy_sparse, 800, 10),
    "gp_student": (gp_student, 1000, 20),
    "horseshoe_poisson": (horseshoe_poisson, 1000, 25),
    "local_level_2000": (local_level, 1000, 15),
    "schools_lkj_100": (schools, 1000, 20),
    "student_walk_400": (student_walk, 1000, 30),
    "volatility_1000": (volatility, 1000, 10),
    "volatility_2500": (log_variance, 1000, 20),
}
