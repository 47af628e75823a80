# SPDX-License-Identifier: Apache-2.0
"""The automatic fit of models of which latent variables can be integrated or summed out.

Discrete latent variables that cannot be summed out are sampled by chains.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from pyro_implicit.density.marginal import Marginal, MarginalModel
from pyro_implicit.density.marginal_discrete import DiscreteMarginal, find_owners
from pyro_implicit.density.policy import DISCRETE, RUNS, SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import joint_draws, mean_field_guide
from pyro_implicit.fitting.parameters import first_few, model_parameters, shown_names
from pyro_implicit.fitting.policy import FitPolicy
from pyro_implicit.fitting.refinement import (
    Plan,
    affordable_chains,
    chains_within,
    move_draws,
    teach_moments,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc.kernels.window_gibbs import dependence, terms_given
from pyro_implicit.runtime.clock import TimeLimit

__all__ = ["fit_discrete", "fit_marginal"]


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
        value, score = marginal.seconds(False), marginal.seconds(True)
        settings, plan = _within_budget(stages.policy, marginal.dim, value, score)
    limit = TimeLimit(stages.limit.left(policy.time_share))
    if math.isinf(stages.limit.end):
        limit = stages.limit
    inner = stages.begin_again(rest, limit, model=model, policy=settings)
    found = fit_rest(inner, rest, plan, refine)
    stages.guides += inner.guides
    result.stages += found.stages
    if math.isfinite(limit.end) and not (found.correction or found.refined or found.interrupted):
        # The chains of all variables may fit into the time that is left.
        result.stages[-1].outcome += "; dropped: nothing corrects this guide in time"
        return False
    with result.stage("draws") as last:
        draws, fault = joint_draws(
            found, marginal, policy.affordable_draws(marginal.target.latent_dim, value)
        )
        last.outcome = f"{draws.num_draws:,} draws of all latent variables"
    if fault > stages.policy.marginal.max_fault:
        last.outcome = f"dropped: their log-density is off by {fault:.2g} nats"
        return False
    # Chains of all variables may have come first.
    result.refined = result.correction = result.modes = result.symmetries = None
    result.bounds, result.losses = {}, []
    result.marginal, result.draws = found, draws
    result.num_modes, result.interrupted = found.num_modes, found.interrupted
    result.unsettled = found.unsettled
    _add_guide(stages, draws)
    return True


def _within_budget(
    policy: FitPolicy, dim: int, value: float, score: float
) -> tuple[FitPolicy, Plan]:
    """Return settings and a plan for a density that takes ``value`` and ``score`` seconds."""
    limits, budget = policy.integration, policy.budget
    of_path = (2 * dim + 1) * score + (SEARCH.num_draws + len(SEARCH.step_sizes)) * value
    starts = int(limits.step_seconds / of_path)
    weighed = int(max(limits.least_weighed, limits.weigh_seconds / value))
    choice = replace(policy.choice, num_weighed=min(policy.choice.num_weighed, weighed))
    correction = replace(
        policy.correction,
        num_weighed=min(policy.correction.num_weighed, weighed),
        num_rounds=limits.num_rounds,
        num_adapted=min(policy.correction.num_adapted, weighed),
    )
    chains = chains_within(lambda number: number * score, budget)
    plan = Plan(SEARCH.most_iterations, chains, max(1, min(SEARCH.num_starts, starts)))
    schedule = policy.schedule
    if budget.least_steps * policy.training.few_particles * score > budget.training_seconds:
        schedule = replace(schedule, max_gap=math.inf)  # a training is too expensive
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


def fit_discrete(
    stages: Stages, target: Target, refine: Literal["auto"] | bool, fit_rest: Callable[..., Fit]
) -> Fit:
    """Sum over discrete elements whose terms form trees, or sample by chains.

    The chains of all latent variables start at draws of the prior, which are then the guide of the
    result. If elements share terms, short chains are tried first: where they mix, they are cheaper
    than sums over pairs of values.

    :param target: of which some discrete latent variables have coordinates.
    :param fit_rest: see :func:`fit_marginal`.
    :raises ValueError: without chains, or for a model with parameters.
    """
    names = ", ".join(f"'{name}'" for name in target.sampled)
    if refine is False:
        raise ValueError(
            f"refine=False excludes chains, which alone sample the discrete latents {names}: no "
            "automatic guide has them. Cure: refine='auto', or a guide of your own"
        )
    if parameters := model_parameters(target):
        raise ValueError(_why_not_learnt(target, list(parameters)))
    marginal = _find_marginal(target, stages)
    if marginal is not None and marginal.has_pairs and _short_chains_converge(stages, target):
        return stages.result
    if marginal is not None and fit_marginal(stages, marginal, refine, fit_rest):
        return stages.result
    return _by_chains(stages, target)


def _why_not_learnt(target: Target, parameters: list[str]) -> str:
    """Return the message about parameters of a model whose discrete latents are sampled."""
    learnt = first_few(shown_names(parameters))
    fault = f"the parameters {learnt} (pyro.param) cannot be learnt together with "
    names = [f"'{name}'" for name in target.not_enumerable or target.sampled]
    fault += f"the discrete latents {', '.join(names)}"
    cure = "a prior, by pyro.sample, in place of pyro.param"
    if target.not_enumerable:
        return f"{fault}, which Pyro cannot enumerate. Cure: {cure}"
    if target.unsummed:
        return f"{fault}, as the sum over their values fails ({target.unsummed}). Cure: {cure}"
    return (
        f'{fault} by guide="auto": without continuous latents it samples them. Cure: an empty '
        "guide and one particle, fit(model, lambda *args, **kwargs: None, ..., num_particles=1), "
        "with which they are summed out and the parameters are learnt (pyro.infer.infer_discrete "
        f"then draws them); or, to sample them, {cure}"
    )


def _short_chains_converge(stages: Stages, target: Target) -> bool:
    limits, result = stages.policy.integration, stages.result
    seconds = min(limits.chain_seconds, stages.limit.left(1 - limits.time_share))
    if seconds <= 0:
        return False
    trial = stages.begin_again(target, TimeLimit(seconds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _by_chains(trial, target)
    if not (found.interrupted or getattr(found.refined, "settled", False)):
        return False
    result.guide, result.chosen, result.refined = found.guide, found.chosen, found.refined
    result.stages, result.interrupted = [*result.stages, *found.stages], found.interrupted
    return True


def _by_chains(stages: Stages, target: Target) -> Fit:
    names = ", ".join(f"'{name}'" for name in target.sampled)
    result, budget = stages.result, stages.policy.budget
    with result.stage("discrete") as line:
        why = f", as the sum over their values fails ({target.unsummed})" if target.unsummed else ""
        line.outcome = f"{target.discrete_dim} elements of {names} are sampled{why}"
        # Determines whether the model can be vectorised.
        stages.one_by_one = not target.is_vectorized
        chains = affordable_chains(target.score, target.init_loc, stages.one_by_one, budget)
        draws = target.constrain(target.sample_prior(chains.num_chains))
        result.guide, result.chosen = StoredDraws(draws), "prior"
    return move_draws(stages, chains)


@torch.no_grad()
def _find_marginal(target: Target, stages: Stages) -> DiscreteMarginal | None:
    """Return the density without the discrete elements if their terms form trees."""
    if target.discrete_dim == target.latent_dim or not target.is_vectorized:
        return None
    elements = target.elements
    assert elements is not None
    if not elements.low.isfinite().all():
        return None
    points = target.sample_prior(RUNS.num_points)
    split = target.latent_dim - target.discrete_dim
    continuous, values = points[:, :split], points[:, split:]
    terms = terms_given(target.terms, continuous)
    depends = dependence(values, terms, elements)
    for reach in (DISCRETE.longest_stride**0.5, DISCRETE.longest_stride):
        # Small moves change nothing where the density is 0.
        far = (values + reach).minimum(elements.high)
        depends |= dependence(values, terms, elements, far)
    owners = find_owners(depends)
    if owners is None:
        return None
    for exact in (target.in_double(), target):  # double precision does not suit all models
        found = DiscreteMarginal(target, exact, owners, stages.policy.marginal)
        if found.evaluate(continuous, False)[0].isfinite().any():
            return found
    return None
