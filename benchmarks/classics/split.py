# SPDX-License-Identifier: Apache-2.0
"""The models for the development of ``fit``, and those that are only scored.

Written before the first run of this collection. Earlier versions of the models in ``LOOK`` were
used in the development of ``fit``; those in ``SCORE`` had never been fitted. For models in
``SCORE`` only the totals of a finished version are read; crashes may be fixed, without tuning on
these models.
"""

from __future__ import annotations

__all__ = ["LOOK", "SCORE"]

LOOK = ("dyes", "salm", "magnesium", "stacks", "leukfr", "mice", "stagnant", "cervix")

SCORE = ("rats", "pump", "seeds", "surgical", "dogs", "beetles", "dugongs")
