# SPDX-License-Identifier: Apache-2.0
"""Generators: networks that turn noise into values."""

from __future__ import annotations

from .gated import GatedMLP
from .mlp import MLP

__all__ = ["MLP", "GatedMLP"]
