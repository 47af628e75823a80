# SPDX-License-Identifier: Apache-2.0
"""Which posteriors may be looked at while ``diagnose`` is changed, and which are only scored.

Written before the first result. Of a posterior in ``SCORE`` only the totals of a finished version
are read; what raises an error may be mended.
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
