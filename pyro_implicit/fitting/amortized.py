# SPDX-License-Identifier: Apache-2.0
"""What ``fit`` does with latents of single rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pyro.infer.autoguide import AutoGuide, AutoNormal
from pyro.poutine.util import site_is_subsample

from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.fitting.losses import default_loss
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides import AutoAmortized, AutoSemiImplicit
from pyro_implicit.guides.names import own_names
from pyro_implicit.guides.row_data import trace_model

__all__ = ["Amortize", "fit_amortized", "refuse_amortizing"]

Amortize = Literal["auto"] | Mapping[str, Callable[..., Any]]

PARTICLES, INIT_SCALE = 8, 0.05


def refuse_amortizing(guide: Any, refine: Any) -> None:
    """Check that nothing else is asked for at the same time.

    :raises ValueError: for a given guide, or chains.
    """
    if not isinstance(guide, str):
        raise ValueError(
            "amortize= makes a guide, but another was given. Cure: guide='auto', or leave it out"
        )
    if refine is True:
        raise ValueError(
            "refine moves the draws of all latents, and with amortize= some belong to rows that "
            "come and go. Cure: refine=False"
        )


def fit_amortized(stages: Stages, amortize: Amortize) -> Fit:
    """Train encoders of the local latents, and a guide of the others beside.

    That is an :class:`AutoSemiImplicit` of at most 100 latents, and else an ``AutoNormal``.

    :param amortize: ``"auto"``, or encoders by site.
    """
    batch = () if stages.batches is None else stages.batches.probed[0]
    everything = (*stages.args, *batch)

    def rest(hidden: Callable[..., Any]) -> AutoGuide:
        nodes = trace_model(hidden, everything, stages.kwargs).iter_stochastic_nodes()
        latents = [site for _, site in nodes if not site_is_subsample(site)]
        if sum(site["value"].numel() for site in latents) <= MAX_DENSE_DIM:
            return AutoSemiImplicit(hidden, frame=None, init_scale=INIT_SCALE)
        return AutoNormal(hidden, init_scale=INIT_SCALE)

    guide = own_names(AutoAmortized(stages.model, amortize, rest))
    particles = min(stages.num_particles, PARTICLES)
    loss = default_loss(guide, particles, *everything, model_kwargs=stages.kwargs)
    return stages.train_alone("amortised", guide, loss)
