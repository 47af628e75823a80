# SPDX-License-Identifier: Apache-2.0
"""``fit`` for hierarchical models with many groups: local latent variables are integrated out."""

from __future__ import annotations

import functools
import math
from contextlib import suppress

import torch
from torch import Tensor

from pyro_implicit.density.groups import Groups
from pyro_implicit.density.marginal_target import MarginalTarget
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.modes import Modes
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.passes import OnePass, PassStages, count_modes, pilot_modes
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.auto_hierarchical import AutoHierarchical
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc.minibatch_chains import check_scaling
from pyro_implicit.ops.quadrature import NormalRule, normal_rule
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.processes import common_seed, num_processes

__all__ = ["fit_hierarchy"]


def fit_hierarchy(stages: Stages) -> Fit:
    """Infer the global variables from the marginal likelihood of all groups.

    The stages are: **search**, for the modes of a few hundred groups; **marginal**, Newton steps by
    passes over all groups; **correct**, importance weights of the Gaussian at the mode; and
    **refine**, chains if the weights are uneven and all groups are cheap enough.

    :raises ValueError: without minibatches, with a checkpoint, or for a model with parameters.
    """
    _refuse_unsupported(stages)
    with seeded(common_seed()):  # all processes decide alike
        return _fit(stages)


def _fit(stages: Stages) -> Fit:
    result, policy = stages.result, stages.policy.hierarchy
    assert stages.batches is not None
    groups = Groups(stages.model, stages.first_batch, stages.args, stages.kwargs)
    check_scaling(groups.target, stages.batches, num_processes())
    if names := model_parameters(groups.target):
        raise ValueError(
            f"amortize='conditional' does not train parameters of the model ({', '.join(names)}). "
            "Cure: latent variables with priors instead, or amortize='auto'"
        )
    with result.stage("search") as line:
        pilot = _pilot(groups, stages)
        modes = pilot_modes(pilot, stages, policy)
        rule, shift = _choose_rule(pilot, modes, stages)
        number = len(normal_rule(groups.num_latents, rule, modes.loc)[1])
        line.outcome = f"{count_modes(modes)} of {pilot.num_units} groups; {number} nodes, "
        line.outcome += f"error {shift:.1g} sd"
        if not shift <= policy.max_shift:
            warn_user(
                f"the integrals over the latents of groups are inexact: with {number} nodes "
                f"the posterior may be off by {shift:.2g} standard deviations. "
                "Cure: other coordinates of the latents of groups, in which their conditional "
                "posteriors are closer to normal"
            )
    target = MarginalTarget(groups, OnePass(stages.batches), rule)
    passes = PassStages(stages, target, policy, "the global variables")
    with result.stage("marginal") as line:
        modes = passes.climb_all(modes)
        result.num_modes = len(modes.loc)
        line.outcome = f"{target.num_passes} passes over {target.num_units} groups{passes.note}"
        passes.warn_of_missing(groups.plate, groups.full_size)
    draws, log_weights = passes.weigh(modes)
    if log_weights is not None and not policy.accepts(log_weights):
        refined = passes.refine(draws, log_weights)
        draws = draws if refined is None else target.unconstrain(refined.get_samples())
    draws = draws[torch.randperm(len(draws))]  # evenly spaced Sobol points share their digits
    values = target.constrain(draws)
    result.guide, result.chosen = AutoHierarchical(stages.model, StoredDraws(values)), "conditional"
    return result


def _refuse_unsupported(stages: Stages) -> None:
    if stages.batches is None:
        raise ValueError(
            "amortize='conditional' passes over minibatches of groups. Cure: batches=loader, or "
            "batches=[(x,)] for all groups at once"
        )
    if stages.options.get("checkpoint") is not None:
        raise ValueError(
            "amortize='conditional' takes passes instead of steps, and writes no checkpoints. "
            "Cure: no checkpoint="
        )


def _pilot(groups: Groups, stages: Stages) -> MarginalTarget:
    """Return the posterior of a few hundred groups, those of the first minibatches."""
    assert stages.batches is not None
    least = math.ceil(stages.policy.hierarchy.num_pilot / num_processes())
    found: list[tuple] = []
    count = 0
    for batch in OnePass(stages.batches):
        found.append(_few(groups, batch, least - count))
        count += groups.on(found[-1]).size
        if count >= least:
            break
    return MarginalTarget(groups, found, has_all=False)


def _few(groups: Groups, batch: tuple, number: int) -> tuple:
    """Return the first groups of a minibatch whose tensors have groups as first dimension."""
    size = groups.on(batch).size
    if size <= number:
        return batch
    few = tuple(
        part[:number] if isinstance(part, Tensor) and part.dim() and len(part) == size else part
        for part in batch
    )
    with suppress(*IMPOSSIBLE):  # another dimension of some tensor may be that of the groups
        if groups.on(few).size == number:
            return few
    return batch


def _choose_rule(pilot: MarginalTarget, modes: Modes, stages: Stages) -> tuple[NormalRule, float]:
    r"""Return the smallest quadrature that suffices, or the best one, and its estimated error.

    The error is :math:`|F^\top (g - g')|` of the scores g, g' of two rules, where
    :math:`F F^\top` is the covariance of the posterior. It grows as the root of the number of
    groups.
    """
    policy = stages.policy.hierarchy
    at, root, groups = modes.loc[:1], modes.scale_tril[0], pilot.groups_of_batch

    @functools.cache
    def score(rule: NormalRule) -> Tensor:
        trial = pilot.with_rule(rule)
        found = (trial.score(at)[1] @ root).squeeze(0)
        return math.sqrt(max(1.0, groups.full_size / trial.num_units)) * found

    best, least = NormalRule(policy.num_nodes[-1]), math.inf
    for rule, others in policy.rules(groups.num_latents):
        errors = torch.stack([score(other) - score(rule) for other in others])
        shift = errors.square().sum(-1).mean().sqrt().item()
        if shift <= policy.max_shift:
            return rule, shift
        if shift < least:
            best, least = others[-1], shift
    return best, least
