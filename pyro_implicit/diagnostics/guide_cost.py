# SPDX-License-Identifier: Apache-2.0
"""What the density of an implicit guide costs, counted before it is asked for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from pyro_implicit.density.cost import estimated_seconds
from pyro_implicit.density.target import Target
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides.posterior_draws import trace_guide
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.infer.bound import weighted_draws
from pyro_implicit.runtime.random_stream import same_streams

__all__ = ["seconds_of_weights"]

FEW_DRAWS, FEW_STEPS, MORE_STEPS = 2, 1, 3


def seconds_of_weights(density: Target, guide: Callable[..., Any], chunk_size: int) -> float:
    """Seconds of one core that an importance weight takes, of a guide with implicit sites.

    The density of a semi-implicit site takes Gauss-Newton steps for each draw, which in thousands
    of latents are far dearer than the model. Counted at a few draws and steps, it is 0 of guides
    that have a density at hand, or none at all.

    :param density: of the model.
    :param guide: of it.
    :param chunk_size: draws at a time.
    """
    model, args, kwargs = density.model, density.args, density.kwargs
    if isinstance(guide, StoredDraws):
        return 0.0
    defaults = inspect.signature(weighted_draws).parameters
    num_steps = defaults["num_steps"].default * defaults["num_starts"].default

    def seconds(steps: int) -> float:
        return estimated_seconds(
            lambda: weighted_draws(
                model,
                guide,
                *args,
                num_samples=FEW_DRAWS,
                num_steps=steps,
                num_starts=1,
                model_kwargs=kwargs,
            ),
            chunk_size / FEW_DRAWS,
        )

    with same_streams(density.init_loc.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of all draws are shown
        try:
            sites = trace_guide(guide, args, kwargs).iter_stochastic_nodes()
            if all(find_implicit(site["fn"]) is None for _, site in sites):
                return 0.0
            few = seconds(FEW_STEPS)
            step = (seconds(MORE_STEPS) - few) / (MORE_STEPS - FEW_STEPS)
        except Exception:  # of which the verdict is going to tell
            return 0.0
    return (few + (num_steps - FEW_STEPS) * max(0.0, step)) / chunk_size
