# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of ``fit`` and ``refine``."""
