# SPDX-License-Identifier: Apache-2.0
"""Numbers that the priors, models and predictions of networks depend on."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS_PER_INPUT",
    "COVERAGE_LEVELS",
    "DRAWS_AT_ONCE",
    "FAN_IN_GAIN",
    "FAR_FROM_UNIT",
    "INITIAL_NOISE",
    "LEAST_NOISE",
    "NOISE_PRECISION",
    "ROWS_AT_ONCE",
    "TARGETS_PER_DRAW",
]

#: Standard deviation of the prior ``"fan_in"`` times the root of the fan-in. With 1, draws of the
#: prior are so unsure of labels that a MAP estimate underfits (benchmarks/networks/digits.py).
FAN_IN_GAIN = 3.0
#: Least standard deviation of heteroscedastic noise, in units of the targets: softplus underflows.
LEAST_NOISE = 1e-6
#: Initial standard deviation of ``noise="learn"``, for targets of unit scale.
INITIAL_NOISE = 0.5
#: Ratio of the targets' root mean square to one, or its inverse, above which the model warns.
FAR_FROM_UNIT = 30.0
#: Probabilities of the central intervals whose coverage ``evaluate`` reports.
COVERAGE_LEVELS = (0.5, 0.9, 0.95)
#: Posterior draws that are made together, and the fewest in one vectorised run.
DRAWS_AT_ONCE = 8
#: Activations of a network per number of its input, for the memory of a vectorised run; typical
#: of convolutional networks.
ACTIVATIONS_PER_INPUT = 32
#: Concentration and rate of the gamma prior of the noise's precision in scikit-learn estimators,
#: for targets of unit scale: standard deviations between 0.18 and 1.4 in 90 % of prior draws.
NOISE_PRECISION = (1.0, 0.1)
#: Targets for each posterior draw whose quantiles are an interval of a distribution without cdf.
TARGETS_PER_DRAW = 20
#: Rows of one minibatch when scikit-learn estimators predict; bounds memory.
ROWS_AT_ONCE = 1000
