# SPDX-License-Identifier: Apache-2.0
"""Results in the formats of other libraries."""

from __future__ import annotations

from pyro_implicit.export.arviz import ArvizExport

__all__ = ["ArvizExport"]
