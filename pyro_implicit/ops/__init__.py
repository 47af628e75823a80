# SPDX-License-Identifier: Apache-2.0
"""The mathematics: pure functions on tensors, of any device and floating dtype."""

from __future__ import annotations

from pyro_implicit.ops.jacobian import batch_jacobian, jacobian_products
from pyro_implicit.ops.krylov import lanczos, log_quadratic_and_solve, smallest_eigenpair
from pyro_implicit.ops.logdet import (
    covariance_log_det,
    linearised_log_density,
    smallest_singular_log_det,
    stochastic_log_det,
)

__all__ = [
    "batch_jacobian",
    "covariance_log_det",
    "jacobian_products",
    "lanczos",
    "linearised_log_density",
    "log_quadratic_and_solve",
    "smallest_eigenpair",
    "smallest_singular_log_det",
    "stochastic_log_det",
]
