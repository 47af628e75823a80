# SPDX-License-Identifier: Apache-2.0
"""Parts of the ELBOs: steps, traces, implicit sites, priors, recordings. Private to ``infer``."""

from __future__ import annotations

__all__: list[str] = []
