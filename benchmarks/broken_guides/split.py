# SPDX-License-Identifier: Apache-2.0
"""The posteriors for the development of ``diagnose``, and those that are only scored.

Written before the first result. For posteriors in ``SCORE`` only the totals of a finished version
are read; errors may be fixed.
"""

from __future__ import annotations

__all__ = ["LOOK", "SCORE"]

LOOK = (
    "target:x_shape",
    "target:multimodal",
    "target:funnel",
    "eight_schools-eight_schools_noncentered",
    "sblrc-blr",
    "zoo:ordinal",
    "zoo:heteroscedastic",
    "zoo:logistic_breast_cancer",
)

SCORE = (
    "target:banana",
    "target:x_shape_gap",
    "target:gmm40",
    "arK-arK",
    "mesquite-logmesquite",
    "zoo:student_robust",
    "zoo:poisson_exposure",
    "zoo:zero_inflated_poisson",
    "zoo:softmax_wine",
)
