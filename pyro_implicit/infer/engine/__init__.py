# SPDX-License-Identifier: Apache-2.0
"""What the ELBOs are made of: sites, traces, priors, further draws, networks of their own."""

from __future__ import annotations

__all__: list[str] = []
