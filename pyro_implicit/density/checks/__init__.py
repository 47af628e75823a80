# SPDX-License-Identifier: Apache-2.0
"""Checks of a model, in the order in which :class:`~pyro_implicit.density.Target` makes them.

1. The first run: :func:`explain` names the argument to blame for an error of the model.
2. Subsampling: all data are needed, or minibatches without latent variables of single rows.
3. ``latents``: continuous, with elements, unconstrained coordinates and a density.
4. ``observations``: of a type and a shape that the distribution takes, neither NaN nor impossible.
5. Missing data: a warning if the model observes nothing.
6. Discrete latent variables: one enumerated run.
7. Supports of latent variables that change with others.

Numerical checks, for results that are not finite, are in ``numerics``.
"""

from __future__ import annotations

from pyro_implicit.density.checks.latents import refuse_moving_supports, refuse_unfit_sites
from pyro_implicit.density.checks.observations import (
    explain,
    refuse_missing_data,
    warn_of_missing_data,
)

__all__ = [
    "explain",
    "refuse_missing_data",
    "refuse_moving_supports",
    "refuse_unfit_sites",
    "warn_of_missing_data",
]
