# SPDX-License-Identifier: Apache-2.0
"""Settings of the reference runs of the large models.

The first run has NumPyro's defaults (``USER``). If it does not pass the checks, the reference is
another run, with ``SETTINGS``.
"""

from __future__ import annotations

__all__ = ["GIBBS", "MAX_COLUMNS", "MAX_VALUES", "SETTINGS", "USER"]

USER = "--samples 1000 --diagonal --sequential --optimise"
# Files of at most 100 kB: 36 columns of 1,500 draws.
MAX_COLUMNS, MAX_VALUES = 36, 54_000
SETTINGS: dict[str, str] = {}
GIBBS: dict[str, tuple[int, int]] = {}
