# SPDX-License-Identifier: Apache-2.0
"""Chains that learn nothing from each other, for posteriors whose modes differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyro_implicit.mcmc.chains import WindowedChains

__all__ = ["SeparateChains"]


@dataclass(kw_only=True)
class SeparateChains(WindowedChains):
    """Chains with all data in the coordinates of their space, without a common frame.

    Modes of a network have different scales, so a frame of all chains suits none of them. Each
    chain learns its step size from its own positions, during a fixed share of the budget.
    """

    def _hurries(self) -> bool:
        """Never: the share of the warm-up is fixed."""
        return False

    def _end_window(self, hurry: bool) -> None:
        """Tune the chains; sample once the warm-up has had its share."""
        share = self.gradients / self.max_gradients
        if self.max_seconds is not None:
            share = max(share, self.seconds / max(self.max_seconds, 1e-9))
        share /= self.policy.mclmc.warmup_share
        is_long = self._window == self.policy.warmup.least_windows
        positions = torch.stack(self._positions) if is_long else None
        self.adaptation = self.adaptation.at(share, positions)
        self._positions, self._log_densities, self._failed = [], [], []
        self._window = min(self._window + 1, self.policy.warmup.least_windows)
        if share >= 1:
            self.adaptation = self.adaptation.frozen()
            self.phase, self.warmup_gradients = "sampling", self.gradients
