# SPDX-License-Identifier: Apache-2.0
"""The automatic fit of models of which many latent variables can be integrated out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.marginal import Marginal, MarginalModel
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import joint_draws, mean_field_guide
from pyro_implicit.fitting.policy import FitPolicy, IntegrationPolicy
from pyro_implicit.fitting.refinement import Plan, chains_within, teach_moments
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.runtime.clock import TimeLimit

__all__ = ["fit_marginal"]


def fit_marginal(
    stages: Stages, marginal: Marginal, refine: Any, fit_rest: Callable[..., Fit]
) -> bool:
    """Fit the remaining variables, then draw the integrated ones given each of their draws.

    :param marginal: their density.
    :param refine: that of ``fit``.
    :param fit_rest: fits a target of few latent variables, by modes, weights and chains.
    :returns: whether the draws pass their check; otherwise nothing has changed.
    """
    result, policy = stages.result, stages.policy.integration
    names = ", ".join(marginal.names[:3]) + ", ..." * (len(marginal.names) > 3)
    with result.stage("marginal") as line:
        model = MarginalModel(marginal)
        number = f"{marginal.num_integrated:,} latent variables ({names}) {marginal.how} out"
        line.outcome = f"{number}, {marginal.dim} remain"
        rest = Target(model, *stages.args, model_kwargs=stages.kwargs)
        value, score = _seconds(marginal, False), _seconds(marginal, True)
        settings, plan = _within_budget(stages.policy, marginal.dim, value, score)
    limit = TimeLimit(stages.limit.left(policy.time_share))
    if math.isinf(stages.limit.end):
        limit = stages.limit
    inner = replace(stages, model=model, policy=settings, limit=limit)
    inner.result.target = rest
    found = fit_rest(inner, rest, plan, refine)
    stages.guides += inner.guides
    result.stages += found.stages
    if math.isfinite(limit.end) and not (found.correction or found.refined or found.interrupted):
        # The chains of all variables may fit into the time that is left.
        result.stages[-1].outcome += "; dropped: nothing corrects this guide in time"
        return False
    with result.stage("draws") as last:
        draws, fault = joint_draws(found, marginal, _affordable(policy, marginal, value))
        last.outcome = f"{draws.num_draws:,} draws of all latent variables"
    if fault > stages.policy.marginal.max_fault:
        last.outcome = f"dropped: their log-density is off by {fault:.2g} nats"
        return False
    # Chains of all variables may have come first.
    result.refined = result.correction = result.modes = result.symmetries = None
    result.bounds, result.losses = {}, []
    result.marginal, result.draws = found, draws
    result.num_modes, result.interrupted = found.num_modes, found.interrupted
    _add_guide(stages, draws)
    return True


def _seconds(marginal: Marginal, with_score: bool) -> float:
    points = nearby(marginal.init_loc, SEARCH.num_draws)
    return estimated_seconds(lambda: marginal.evaluate(points, with_score)) / len(points)


def _affordable(policy: IntegrationPolicy, marginal: Marginal, seconds: float) -> int:
    stored = policy.num_stored / marginal.target.latent_dim
    most = min(policy.num_draws, stored, policy.draw_seconds / seconds)
    return max(policy.least_draws, 2 ** int(math.log2(most)))


def _within_budget(
    policy: FitPolicy, dim: int, value: float, score: float
) -> tuple[FitPolicy, Plan]:
    """Return settings and a plan for a density that takes ``value`` and ``score`` seconds."""
    limits, budget = policy.integration, policy.budget
    of_path = (2 * dim + 1) * score + (SEARCH.num_draws + len(SEARCH.step_sizes)) * value
    starts = int(limits.search_seconds / (limits.usual_steps * of_path))
    weighed = int(max(limits.least_weighed, limits.weigh_seconds / value))
    choice = replace(policy.choice, num_weighed=min(policy.choice.num_weighed, weighed))
    correction = replace(policy.correction, num_weighed=min(policy.correction.num_weighed, weighed))
    chains = chains_within(lambda number: number * score, budget)
    plan = Plan(budget.most_iterations, chains, max(1, min(SEARCH.num_starts, starts)))
    schedule = policy.schedule
    if budget.least_steps * policy.training.few_particles * score > budget.training_seconds:
        schedule = replace(schedule, max_gap=math.inf)  # a training is too expensive
        correction = replace(correction, num_matched=limits.num_matched)
    return replace(policy, choice=choice, correction=correction, schedule=schedule), plan


def _add_guide(stages: Stages, draws: StoredDraws) -> None:
    if stages.result.target.sampled:  # no automatic guide has discrete sites
        stages.result.guide, stages.result.chosen = draws, "marginal"
        return
    middle = {name: value.median(0).values for name, value in draws.samples.items()}
    guide = mean_field_guide(stages.model, stages.result.target, middle)
    guide(*stages.args, **stages.kwargs)
    stages.guides.append(guide)
    stages.result.guide, stages.result.chosen = guide, "mean-field"
    teach_moments(stages, draws.samples)
