# SPDX-License-Identifier: Apache-2.0
"""Numbers that the generators' architectures and initial values depend on; none has a unit."""

from __future__ import annotations

__all__ = ["CONTEXT_FACTOR", "MAX_SKEW", "MAX_TAIL", "NEAR_ZERO"]

#: Bound of the skew of :class:`AutoregressiveGenerator`. At it one side of h is 400 times steeper
#: than the other. With ``MAX_TAIL``, ``|h(8)| < 1e5``: float32 squares that without overflow.
MAX_SKEW = 3.0
#: Bound of its tail parameter: at it the tails exceed a Cauchy distribution's up to z = 3.
MAX_TAIL = 1.5
#: Factor on the initial weights of the last layers: a network starts near its affine part.
NEAR_ZERO = 0.01
#: Factor on the initial weights of a linear map of the context.
CONTEXT_FACTOR = 0.1
