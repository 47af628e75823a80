# SPDX-License-Identifier: Apache-2.0
"""``fit`` for networks: an ensemble, and chains that start from its members."""

from __future__ import annotations

import math

from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.fitting.training import default_loss
from pyro_implicit.guides import AutoEnsemble, init_to_shuffled
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.nn import FunctionValues, NetworkModel, start_values
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["fit_network"]


def fit_network(stages: Stages, target: Target, must_refine: bool) -> Fit:
    """Train an ensemble of networks, then run a chain from each member.

    The chains are those of :func:`~pyro_implicit.mcmc.kernels.mclmc.step`. They are tracked by
    predictions at training inputs, because single weights have no meaning.

    :param must_refine: whether chains run even if the budget allows few gradients.
    """
    policy, result, model = stages.policy.network, stages.result, stages.model
    assert isinstance(model, NetworkModel)
    start = init_to_shuffled(start_values(model))
    guide = own_names(AutoEnsemble(model, policy.num_members, start))
    loss = default_loss(guide, policy.num_members, *stages.args, model_kwargs=stages.kwargs)
    steps = stages.steps_for(guide, loss, policy.training_seconds)
    stages.train_alone("ensemble", guide, loss, policy.training_share, num_steps=steps)
    seconds = min(policy.chain_seconds, stages.limit.left())
    gradients = int(seconds / target.seconds(policy.num_members))
    if gradients < policy.least_gradients and not must_refine:
        return result
    return _run_chains(stages, target, min(gradients, policy.most_gradients))


def _run_chains(stages: Stages, target: Target, gradients: int) -> Fit:
    result, left = stages.result, stages.limit.left()
    inputs = next((one for one in stages.args if isinstance(one, Tensor)), None)
    quantities = None if inputs is None else FunctionValues(stages.model, inputs)
    with result.attempt("mclmc") as line:
        refined = result.refined = refine_target(
            Sampler(target, result.guide.get_samples()),
            stages.policy.network.num_members,
            max(1, gradients),
            max_seconds=left if math.isfinite(left) else None,
            kernel="mclmc",
            quantities=quantities,
            compile=stages.options["compile"],
            progress=stages.options["progress"],
        )
        result.interrupted = refined.stopped == "interrupted"
        line.outcome = (
            f"{refined.num_chains} chains x {refined.num_gradients} gradients; of the predictions: "
            f"{refined.drift or 'too few draws to estimate their errors'}"
        )
    if line.error is not None:
        warn_user(f"fit did not move the members of its ensemble: {first_line(line.error)}")
    return result
