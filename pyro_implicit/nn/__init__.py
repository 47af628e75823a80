# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks."""

from __future__ import annotations

from pyro_implicit.nn.bayesian import start_values, to_bayesian_

__all__ = ["start_values", "to_bayesian_"]
