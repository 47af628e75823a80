# SPDX-License-Identifier: Apache-2.0
"""Coordinates in which chains walk: bijections that turn one target into another."""

from __future__ import annotations

__all__: list[str] = []
