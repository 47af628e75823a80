# SPDX-License-Identifier: Apache-2.0
"""``fit`` for networks: an ensemble, and chains that start from its members."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.fitting.held_out_rows import (
    HeldOutRows,
    describe_score,
    is_worse,
    split_rows,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.fitting.training import default_loss
from pyro_implicit.guides import AutoEnsemble, init_to_shuffled
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.refined import Refined
from pyro_implicit.nn import FunctionValues, NetworkModel, start_values
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["fit_network"]


def fit_network(stages: Stages, target: Target, must_refine: bool) -> Fit:
    """Train an ensemble of networks, then run a chain from each member.

    The chains are those of :func:`~pyro_implicit.mcmc.kernels.mclmc.step`. They are tracked by
    predictions at training inputs, because single weights have no meaning. The ensemble and the
    first chains do not see the held-out rows, by which they are compared; the chains that follow
    see all rows.

    :param must_refine: whether chains run even if the budget allows few gradients or the held-out
        rows speak against them.
    """
    policy, model = stages.policy.network, stages.model
    assert isinstance(model, NetworkModel)
    cost = target.seconds(policy.num_members)
    # A limit of time that the user sets replaces the budget.
    is_timed = math.isfinite(stages.limit.end)
    left = stages.limit.left(1 - policy.training_share)
    seconds = left if is_timed else policy.chain_seconds
    has_chains = must_refine or seconds >= policy.least_gradients * cost
    # Without chains there is nothing to compare, and the ensemble needs all rows.
    rows = split_rows(model, stages.args, stages.kwargs, policy) if has_chains else None
    whole = stages.trained, stages.args, stages.kwargs
    if rows is not None:
        stages.trained, stages.args, stages.kwargs = rows.model, (rows.x, rows.y), {}
    try:
        _train_ensemble(stages, model)
    finally:
        stages.trained, stages.args, stages.kwargs = whole
    if rows is not None:
        _score(stages, rows, stages.result.guide.get_samples())
    seconds = stages.limit.left() if is_timed else policy.chain_seconds
    gradients = int(seconds / cost)
    if gradients < policy.least_gradients and not must_refine:
        stages.result.stages[-1].outcome += (
            f"; no chains, because the time left allows {gradients} gradients of each, fewer than "
            f"{policy.least_gradients}"
        )
        return stages.result
    gradients = max(2, min(gradients, policy.most_gradients))
    return _run_chains(stages, target, gradients, rows, must_refine)


def _train_ensemble(stages: Stages, model: NetworkModel) -> None:
    policy = stages.policy.network
    start = init_to_shuffled(start_values(model))
    guide = own_names(AutoEnsemble(model, policy.num_members, start))
    loss = default_loss(guide, policy.num_members, *stages.args, model_kwargs=stages.kwargs)
    steps = stages.steps_for(guide, loss, policy.training_seconds)
    stages.train_alone("ensemble", guide, loss, policy.training_share, num_steps=steps)


def _score(stages: Stages, rows: HeldOutRows, posterior: Any) -> None:
    """Add scores of the held-out rows to the result and to its last line."""
    line, held_out = stages.result.stages[-1], stages.result.held_out
    held_out[line.name] = rows.score(posterior, stages.policy.network.num_scored)
    line.outcome += f"; {describe_score(held_out[line.name])}"


def _run_chains(
    stages: Stages, target: Target, gradients: int, rows: HeldOutRows | None, must_refine: bool
) -> Fit:
    """Run chains on the training rows, score them, and go on from their ends with all rows."""
    result, policy = stages.result, stages.policy.network
    starts, trial = result.guide.get_samples(), round(policy.trial_share * gradients)
    if rows is not None:
        part = Target(rows.model, rows.x, rows.y)
        found = _walk(stages, "mclmc, held out", part, starts, trial, policy.trial_share)
        if found is None:
            return result
        _score(stages, rows, found)
        scores = list(result.held_out.values())
        if is_worse(scores[-1], scores[0], policy.num_errors) and not must_refine:
            result.stages[
                -1
            ].outcome += "; significantly worse than the ensemble, which stays the result"
            return result
        result.refined = found
        if result.interrupted:
            return result
        starts = {name: value[:, -1] for name, value in found.samples.items()}
        gradients -= trial
    result.refined = _walk(stages, "mclmc", target, starts, gradients) or result.refined
    return result


def _walk(
    stages: Stages,
    name: str,
    target: Target,
    starts: dict[str, Tensor],
    gradients: int,
    time_share: float = 1.0,
) -> Refined | None:
    """Run a chain from each start; return None, after a warning, if that fails."""
    result, left = stages.result, stages.limit.left(time_share)
    inputs = next((one for one in target.args if isinstance(one, Tensor)), None)
    with result.attempt(name) as line:
        refined = refine_target(
            Sampler(target, starts),
            stages.policy.network.num_members,
            max(1, gradients),
            max_seconds=left if math.isfinite(left) else None,
            kernel="mclmc",
            quantities=None if inputs is None else FunctionValues(target.model, inputs),
            compile=stages.options["compile"],
            progress=stages.options["progress"],
        )
        result.interrupted = refined.stopped == "interrupted"
        line.outcome = (
            f"{refined.num_chains} chains x {refined.num_gradients} gradients; of the predictions: "
            f"{refined.drift or 'too few draws to estimate their errors'}"
        )
        return refined
    warn_user(f"fit did not move the members of its ensemble: {first_line(line.error)}")
    return None
