# SPDX-License-Identifier: Apache-2.0
"""Guides broken in known ways and sizes, and the verdicts of ``diagnose`` on them."""
