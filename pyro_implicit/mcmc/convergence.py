# SPDX-License-Identifier: Apache-2.0
"""The stopping decision of chains with all data, from the drift of their draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.policy import StoppingPolicy
from pyro_implicit.mcmc.stopping import Drift

__all__ = ["Convergence"]


@dataclass
class Convergence:
    """Whether draws have settled, as of the last check. Checks become ever more rare.

    :param next_check: draws of each chain at the next check.
    :param drift: of the draws; None before the first check.
    :param settled: how the chains settled, while they go on because draws are few and cheap.
    """

    next_check: int
    drift: Drift | None = None
    settled: str | None = None

    def schedule(self, seen: int, limits: StoppingPolicy) -> bool:
        """Return whether chains with so many draws are due for a check; schedule the next one."""
        if seen < self.next_check:
            return False
        self.next_check = math.ceil(limits.between_checks * seen)
        return True

    def look(
        self, history: History, limits: StoppingPolicy, is_stiff: bool, may_be_steady: bool
    ) -> Drift:
        """Compute the drift of the draws, and how the chains have settled.

        :param is_stiff: whether trajectories fail. Then there are places that the chains seldom
            enter, and rare events hardly show as drift: the chains must be much longer than their
            memory.
        :param may_be_steady: whether named quantities may be steady before all chains converge.
        """
        self.drift = found = history.drift(limits)
        self.settled = None  # later evidence counts against earlier
        if may_be_steady and found.is_steady(limits) and not is_stiff:
            self.settled = "steady"
        if found.is_settled(limits) and not (is_stiff and found.r_hat > limits.strict_r_hat):
            self.settled = "converged"
        return found

    def may_end(
        self,
        spent: int,
        warmup_gradients: int,
        num_chains: int,
        limits: StoppingPolicy,
        is_extended: bool = False,
    ) -> bool:
        """Return whether the chains may end before their budget does.

        Draws are cheap compared with the warm-up. So chains that have converged go on until they
        have ``enough`` effective draws, by R-hat, or have spent a share of the warm-up's gradients.
        An extended budget ends as soon as the chains are usable, with a strict R-hat.

        :param spent: gradients after the warm-up.
        """
        assert self.drift is not None
        r_hat = self.drift.r_hat
        if is_extended and self.drift.is_usable(limits) and r_hat <= limits.strict_r_hat:
            return True
        if self.settled != "converged":
            return self.settled == "steady"
        is_spent = spent >= limits.least_share * warmup_gradients
        return is_spent or (r_hat**2 - 1) * limits.enough <= num_chains

    def needed(self, spent: int, limits: StoppingPolicy) -> float:
        """Return the gradients after which R-hat would be that of converged chains.

        :param spent: gradients of the draws so far.
        """
        assert self.drift is not None
        return (self.drift.r_hat**2 - 1) / (limits.max_r_hat**2 - 1) * spent
