# SPDX-License-Identifier: Apache-2.0
"""Settings of the ELBOs and bounds that users do not set."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ELBOS", "ElboPolicy"]


@dataclass(frozen=True)
class ElboPolicy:
    """Limits and rates within the methods."""

    #: Weight of the past in the moving averages of scores, per step (:class:`Landing`).
    landing_decay: float = 0.95


ELBOS = ElboPolicy()
