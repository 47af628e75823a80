# SPDX-License-Identifier: Apache-2.0
"""Numbers that decide something in model comparison, checks and sensitivity analysis."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DECISIONS", "DecisionPolicy"]


@dataclass(frozen=True)
class DecisionPolicy:
    """Settings of model comparison, checks and sensitivity analysis."""

    #: Draws of a posterior at which log-likelihoods are computed, about; a limit of time.
    num_draws: int = 4000

    #: The same for chains and resampled draws of models that run vectorised, if all
    #: log-likelihoods are at most ``MAX_ENTRIES``.
    most_draws: int = 20_000

    #: Draws for the surrogate of subsampled LOO: the mean density of all observations.
    surrogate_draws: int = 32

    #: Parts of the draws whose difference from all draws shows the bias of importance weights.
    num_parts: int = 8

    #: Groups of independent draws, whose means give the standard errors of bridge sampling.
    num_groups: int = 40

    #: Chains of a leave-one-out posterior, which start from reweighted draws.
    repair_chains: int = 128

    #: Monte Carlo standard error of an observation's elpd, in nats, from which the observation
    #: stays bad after its repair.
    max_elpd_error: float = 0.1

    #: Standard error of a bridge between two weights of an observation, in nats, above which chains
    #: with a weight in between make two bridges of it.
    max_bridge_error: float = 0.02

    #: Halvings of the step from the posterior to that without an observation, at most.
    max_halvings: int = 3

    #: Chains of a log evidence, and kept draws of each chain: half of all draws fit the proposal.
    evidence_chains: int = 256
    evidence_draws: int = 50

    #: Sensitivity from which a quantity counts as sensitive; Kallioinen et al. (2023), section 4.
    sensitive: float = 0.05

    #: Exponents of the curves: binary logarithm of the largest, and their number; ibid., section 5.
    max_log2_exponent: float = 0.32
    num_exponents: int = 9

    #: Data sets of a predictive check.
    num_replicas: int = 1000

    #: Probability of either tail below which a test statistic is named.
    tail: float = 0.005

    #: Probability of the simultaneous band of a PIT-ECDF and of the intervals of a rootogram, and
    #: the points of the PIT-ECDF at most.
    band_mass: float = 0.95
    num_ecdf_points: int = 50

    #: Replicated densities in a picture.
    num_curves: int = 40


DECISIONS = DecisionPolicy()
