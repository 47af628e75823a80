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

    #: Groups of independent draws, whose means give the standard errors of bridge sampling.
    num_groups: int = 40

    #: Chains of a leave-one-out posterior, which start from reweighted draws.
    repair_chains: int = 128

    #: Monte Carlo standard error of an observation's elpd, in nats, from which the observation
    #: stays bad after its repair.
    max_elpd_error: float = 0.1

    #: Halvings of the step from the posterior to that without an observation, at most.
    max_halvings: int = 3

    #: Chains of a log evidence, and kept draws of each chain: half of all draws fit the proposal.
    evidence_chains: int = 256
    evidence_draws: int = 50


DECISIONS = DecisionPolicy()
