# SPDX-License-Identifier: Apache-2.0
"""``fit`` with minibatches, and with latent variables of single rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_value
from pyro.poutine.util import site_is_subsample

from pyro_implicit.density.initialisation import FlatPriorStart, without_sequential_plates
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.arguments import Amortize, num_processes, refuse_unfit_guide
from pyro_implicit.fitting.refinement import between
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.fitting.training import default_loss
from pyro_implicit.guides import AutoAmortized, AutoSemiImplicit
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.row_data import trace_model
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine
from pyro_implicit.mcmc.minibatch_chains import check_scaling
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["fit_amortized", "fit_batches", "refine_batches"]


def fit_batches(
    stages: Stages,
    guide: Any,
    loss: Trace_ELBO | None,
    amortize: Amortize | None = None,
    time_share: float = 1.0,
) -> Fit:
    """Train a guide on minibatches.

    For ``"auto"`` the guide is an :class:`AutoSemiImplicit` with at most 100 latent variables, and
    otherwise an ``AutoNormal`` with small scales, see :func:`between`.

    :param guide: a guide, or ``"auto"``.
    :param loss: the loss of a given guide.
    :param amortize: encoders of the latent variables of single rows.
    :param time_share: the share of the remaining time.
    """
    assert stages.batches is not None
    first, policy = stages.batches.probed[0], stages.policy.training
    target = Target.of_minibatches(
        stages.model,
        *stages.args,
        batch=first,
        allow_local=amortize is not None or _knows_rows(guide),
        model_kwargs=stages.kwargs,
    )
    check_scaling(target, stages.batches, num_processes())
    if amortize is not None:
        return fit_amortized(stages, amortize)
    is_wide = target.latent_dim > MAX_DENSE_DIM
    few = policy.network_particles if is_wide else policy.few_particles
    particles = min(stages.num_particles, few)
    if not isinstance(guide, str):
        everything = (*stages.args, *first)
        refuse_unfit_guide(stages.model, guide, everything, stages.kwargs)
        loss = loss or default_loss(guide, particles, *everything, model_kwargs=stages.kwargs)
        return stages.train_alone("guide", guide, loss, time_share)
    scale = policy.minibatch_init_scale
    if not is_wide:
        guide = own_names(AutoSemiImplicit(stages.model, frame=None, init_scale=scale))
        return stages.train_alone(
            "semi-implicit", guide, default_loss(guide, particles), time_share
        )
    start = FlatPriorStart(init_to_value(values=between(target, stages.policy.start)))
    model = without_sequential_plates(stages.model)
    guide = own_names(AutoNormal(model, init_loc_fn=start, init_scale=scale))
    loss = ImplicitELBO(particles, nonfinite="skip")
    return stages.train_alone("mean-field", guide, loss, time_share)


def _knows_rows(guide: Any) -> bool:
    return isinstance(guide, AutoAmortized) or not isinstance(guide, (str, AutoGuide))


def refine_batches(stages: Stages, epochs: int) -> Fit:
    """Move draws of the guide by stochastic gradient Hamiltonian Monte Carlo.

    :param epochs: the number of passes over the data.
    """
    assert stages.batches is not None
    result, left = stages.result, stages.limit.left()
    with result.attempt("refine") as line:
        refined: Any = refine(
            stages.model,
            result.guide,
            *stages.args,
            kernel="sghmc",
            batches=stages.batches.batches,
            max_epochs=epochs,
            max_seconds=left if math.isfinite(left) else None,
            progress=stages.options["progress"],
            model_kwargs=stages.kwargs,
        )
        result.refined = refined
        choice = refined.choice
        line.outcome = (
            f"{refined.num_gradients} gradients, step size bounded by {choice.limit}, "
            f"{choice.relaxations:.2g} relaxation times"
        )
        result.interrupted = refined.stopped == "interrupted"
    if line.error is not None:
        warn_user(f"fit did not refine its draws: {first_line(line.error)}")
    return result


def fit_amortized(stages: Stages, amortize: Amortize) -> Fit:
    """Train encoders of the latent variables of rows, together with a guide of the others.

    The latter is an :class:`AutoSemiImplicit` with at most 100 latent variables, and otherwise an
    ``AutoNormal``.

    :param amortize: ``"auto"``, or encoders by site.
    """
    batch = () if stages.batches is None else stages.batches.probed[0]
    everything, policy = (*stages.args, *batch), stages.policy.training
    scale = policy.minibatch_init_scale

    def rest(hidden: Callable[..., Any]) -> AutoGuide:
        nodes = trace_model(hidden, everything, stages.kwargs).iter_stochastic_nodes()
        latents = [site for _, site in nodes if not site_is_subsample(site)]
        if sum(site["value"].numel() for site in latents) <= MAX_DENSE_DIM:
            return AutoSemiImplicit(hidden, frame=None, init_scale=scale)
        return AutoNormal(hidden, init_scale=scale)

    guide = own_names(AutoAmortized(stages.model, amortize, rest))
    particles = min(stages.num_particles, policy.few_particles)
    loss = default_loss(guide, particles, *everything, model_kwargs=stages.kwargs)
    return stages.train_alone("amortised", guide, loss)
