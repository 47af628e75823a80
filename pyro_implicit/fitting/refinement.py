# SPDX-License-Identifier: Apache-2.0
"""Stages of ``fit`` after the choice of a guide: importance weights and chains; their budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.checks.numerics import (
    harmful_rounding,
    loses_digits,
    widen_if_rounded,
)
from pyro_implicit.density.cost import TracedScore, nearby, seconds_near
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import MAX_DENSE_DIM, ROUNDING, SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.verdict import CONTINUE, SMALL_ENOUGH, judge_chains
from pyro_implicit.fitting.candidates import (
    exact_log_weights,
    frame_of_draws,
    mean_field_guide,
    set_up,
)
from pyro_implicit.fitting.parameters import first_few, model_parameters, shown_names
from pyro_implicit.fitting.policy import DEFAULT, BudgetPolicy
from pyro_implicit.fitting.result import Fit, Stage
from pyro_implicit.fitting.stages import NO_WEIGHTS, Stages
from pyro_implicit.fitting.starts import best_of_race, between, first_scales
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.affine_frame import normal_moments
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.auto_implicit import has_exact_density
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import AutoConditional, Refined, teach
from pyro_implicit.mcmc.policy import DEFAULT as CHAINS
from pyro_implicit.mcmc.refine import chains_in_time, refine_target
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.mcmc.spaces.conditional_noise import conditional_noise
from pyro_implicit.mcmc.spaces.space import GuideNoise
from pyro_implicit.ops.annealing import NormalMixture
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.messages import first_line, warn_user

__all__ = [
    "ChainPlan",
    "Fallback",
    "Plan",
    "affordable_chains",
    "chains_within",
    "correct",
    "has_failed",
    "large_errors",
    "make_plan",
    "move_draws",
    "patience_of",
    "teach_moments",
    "train_mean_field",
]


class ChainPlan(NamedTuple):
    """``num_chains``, and ``max_gradients`` of each chain."""

    num_chains: int
    max_gradients: int


class Fallback(NamedTuple):
    """A method that may replace chains that have not converged, such as the integration of latents.

    ``exists`` tells whether the model allows it. ``run`` returns whether it has set the result.
    """

    exists: Callable[[], bool]
    run: Callable[[], bool]


class Plan(NamedTuple):
    """Budgets of search and chains, and what replaces them.

    ``search_iterations`` are those of Newton's method in all, 0 for no search. If the ``modes`` are
    known, there is no search. If the chains end before they converge, ``fallback`` follows.
    """

    search_iterations: int
    chains: ChainPlan
    num_starts: int = SEARCH.num_starts
    modes: Modes | None = None
    fallback: Fallback | None = None


def affordable_chains(
    score: Callable[[Tensor], Any],
    point: Tensor,
    one_by_one: bool = False,
    budget: BudgetPolicy = DEFAULT.budget,
) -> ChainPlan:
    """Return the number of chains and gradients that a budget allows.

    The number of chains is halved while that makes a gradient clearly cheaper, to
    ``usual_chains``, and further while chains are too short.

    :param score: a function of points ``(num_chains, dim)``.
    :param point: one point, ``(dim,)``.
    :param one_by_one: whether the model runs once for each chain.
    """
    seconds = seconds_near(score, point, one_by_one, is_recorded=not one_by_one)
    return chains_within(seconds, budget)


def chains_within(seconds: Callable[[int], float], budget: BudgetPolicy) -> ChainPlan:
    """Return :func:`affordable_chains` by the seconds of a gradient of a number of chains."""

    def affordable_gradients(num_chains: int) -> int:
        number = int(budget.chain_seconds / seconds(num_chains))
        return max(1, min(budget.most_gradients, number))

    num_chains = budget.most_chains
    gradients = affordable_gradients(num_chains)
    while num_chains > budget.least_chains:
        if num_chains <= budget.usual_chains and gradients >= budget.usual_gradients:
            break
        if seconds(num_chains // 2) > CHAINS.max_halved_cost * seconds(num_chains):
            break
        num_chains //= 2
        gradients = affordable_gradients(num_chains)
    patient = min(budget.most_gradients, budget.patience * gradients)
    return ChainPlan(num_chains, max(budget.least_gradients, patient))


def make_plan(
    target: Target, budget: BudgetPolicy = DEFAULT.budget, limit: TimeLimit = NO_LIMIT
) -> Plan:
    """Plan search and chains by the operation count of the log-density, and by the time left."""
    point = target.init_loc
    try:
        target.log_prob(nearby(point, 2))  # determines whether the model can be vectorised
        chains = affordable_chains(target.score, point, not target.is_vectorized, budget)
        if target.latent_dim > MAX_DENSE_DIM:
            return Plan(0, chains)
        climb, most = seconds_of_climb(target), SEARCH.num_starts
        if budget.search_seconds < SEARCH.least_iterations * climb:
            climb, most = climb * SEARCH.least_starts / most, SEARCH.least_starts
        iterations = int(budget.search_seconds / climb)
    except Exception:  # an error of the model at its initial point: the search has other points
        chains = ChainPlan(budget.most_chains, budget.most_gradients)
        return Plan(SEARCH.most_iterations, chains)
    if iterations < SEARCH.least_iterations:
        return Plan(0, chains)
    left = limit.left(SEARCH.time_share)  # fewer paths, so that they can be climbed in time
    starts = most * left / (climb * SEARCH.least_iterations)
    return Plan(iterations, chains, max(1, math.floor(min(most, starts))))


def correct(stages: Stages, target: Target) -> float:
    """Judge the importance weights of the chosen guide, and set ``result.correction``.

    :returns: their effective sample size as a share; 1 for a guide without an exact density.
    """
    result, policy = stages.result, stages.policy.correction
    if not has_exact_density(result.guide):
        return 1.0
    efficiency = 0.0
    with result.attempt("correct") as line:
        if result.symmetries and result.num_modes and result.num_modes > 1:
            line.outcome = "skipped: modes may have different numbers of copies"
            return efficiency
        note = _double_near_bounds(stages, target)
        known = None if note else stages.reliability
        found = known or stages.reliability_of(result.guide, target)
        if found is None:
            line.outcome = f"skipped: {NO_WEIGHTS}"
            return efficiency
        line.outcome = f"{note}; {found}" if note else str(found)
        efficiency = found.efficiency
        if policy.accepts(found):
            result.correction = efficiency
    return efficiency


def _double_near_bounds(stages: Stages, target: Target) -> str:
    """Change to double precision if single precision lacks a part of the posterior near a bound.

    :returns: what was done, in words; empty if nothing.
    """
    guide, policy = stages.result.guide, stages.policy.correction
    if target.is_wide or not stages.can_weigh(target, policy.num_weighed):
        return ""

    def draw(number: int) -> Tensor:
        draws, weights = exact_log_weights(
            target.in_double(), guide, policy.num_weighed, wide=policy
        )
        return draws[weights.resample(number)]

    with suppress(Exception), same_streams(target.init_loc.device):  # of mixed dtypes
        points, _ = exact_log_weights(
            target, guide, ROUNDING.num_near, lambda latent: latent[:, 0], wide=policy
        )
        if loses_digits(target, points):
            return widen_if_rounded(target, draw)
    return ""


def train_mean_field(stages: Stages, target: Target) -> Fit:
    """Train a mean-field guide of many latent variables, from which chains start."""
    policy, budget = stages.policy.training, stages.policy.budget
    limits, parameters, note = stages.policy.start, model_parameters(target), ""
    start = between(target, limits)
    lr = policy.mean_field_lr_factor * stages.lr
    scale, rate = first_scales(target, start, lr, limits)
    if target.is_vectorized and not parameters:
        seconds = min(limits.race_seconds, stages.limit.left(limits.race_share))
        start, note = best_of_race(
            target, start, scale, rate, seconds, limits, stages.options["compile"]
        )
        scale, rate = first_scales(target, start, lr, limits)
    guide = mean_field_guide(stages.model, target, start, init_scale=scale)
    particles = min(stages.num_particles, policy.few_particles)
    loss: Trace_ELBO = ImplicitELBO(particles, nonfinite="skip")
    steps = stages.steps_for(guide, loss, budget.training_seconds)
    if target.is_vectorized and not parameters:
        loss = _MeanFieldELBO(target, particles, steps, stages.options["compile"])
    result = stages.train_alone(
        "mean-field",
        guide,
        loss,
        time_share=budget.training_share,
        num_steps=min(policy.mean_field_steps, steps),
        lr_factor=rate / stages.lr,
    )
    result.stages[-1].outcome += note
    if parameters:
        names = first_few(f"`{name}`" for name in shown_names(parameters))
        result.stages[-1].outcome += f"; its ELBO, not the evidence, determines {names}"
    if note := widen_if_rounded(target, Sampler(target, guide).draw):
        result.stages[-1].outcome += f"; {note}"
    return result


class _MeanFieldELBO(Trace_ELBO):
    """The ELBO of an ``AutoNormal`` from the recorded score of a target, without traces."""

    def __init__(
        self, target: Target, num_particles: int, num_calls: int, compile: CompileMode
    ) -> None:
        super().__init__(num_particles)
        self._target, self._score = target, TracedScore(target.score, num_calls, compile)

    def differentiable_loss(self, model: Any, guide: AutoNormal, *args: Any, **kw: Any) -> Tensor:
        """Return the negative ELBO; particles of density zero do not count."""
        with guide._pyro_context:  # the parameter store's values, as in a call
            loc, scale = normal_moments(guide, self._target.shapes)
        points = loc + scale * torch.randn(self.num_particles, len(loc)).to(loc)
        log_prob = self._score.log_prob(points)
        entropy = scale.log().sum() + 0.5 * len(loc) * math.log(2 * math.pi * math.e)
        return -log_prob[log_prob.isfinite()].mean() - entropy


def move_draws(
    stages: Stages,
    chains: ChainPlan,
    optional: bool = False,
    modes: Modes | None = None,
    fallback: Fallback | None = None,
) -> Fit:
    """Move draws of the guide to the posterior by chains.

    :param optional: whether the guide stays the result if ``max_seconds`` leaves chains no time.
    :param modes: those of the search. Several modes are annealed instead, unless they are one in
        the noise of the priors.
    :param fallback: see :class:`Plan`.
    """
    result = stages.result
    if optional and stages.limit.is_over():
        warn_user(_no_time("max_seconds passed before chains could start"))
        return result
    # Annealing would need all copies: modes with equal units have fewer.
    if modes is not None and (len(modes.loc) == 1 or result.symmetries):
        modes = None
    with result.attempt("refine") as line:
        setup = _chain_setup(stages, chains, modes is not None, optional)
        if setup is None:
            line.outcome = "skipped: max_seconds is too short for chains"
            warn_user(_no_time("max_seconds is too short for chains"))
            return result
        if fallback is not None:
            setup = replace(setup, has_alternative=fallback.exists)
        refined: Refined | None = None
        if modes is not None and stages.noise is not None:
            with suppress(Exception):  # annealing may work
                refined, note = _across(stages, chains, modes)
        if refined is None:
            refined, note = _resolved(result.target, partial(refine_target, setup, modes=modes))
        result.refined = refined
        line.outcome = f"{note}{refined.stopped} after {refined.num_gradients} gradients"
        if refined.modes_weighed and modes is None:
            line.outcome += "; annealed, because chains stayed in separate modes"
        if refined.weights is not None:
            line.outcome += f"; {refined.weights}"
        if refined.images:
            line.outcome += f"; {refined.images}"
    if has_failed(line):
        return result
    if optional and refined.stopped == "max_seconds" and _is_stuck(refined):
        result.refined = None
        line.outcome += f"; {refined.drift}: dropped"
        warn_user(_no_time(f"max_seconds ended chains that had hardly moved ({refined.drift})"))
    elif refined.settled:
        _teach_guide(stages, refined)
    elif drifts := large_errors(result, line, refined):
        if fallback is not None and fallback.exists():
            if fallback.run():
                return result
            if modes is None and not stages.limit.is_over():  # chains have patience left
                return move_draws(stages, chains, optional)
        warn_user(
            f"fit's chains stopped at {refined.stopped} before they converged: {drifts}. "
            + _cure(result.target, refined)
        )
    return result


def _across(stages: Stages, chains: ChainPlan, modes: Modes) -> tuple[Refined | None, str]:
    """Run chains from all modes in the noise of the priors.

    The neck of a funnel may have a mode of its own in the latents, from which particles that anneal
    do not spread. In the noise, neck and mouth are often one.

    :returns: the chains, None if modes stay separate; and what was done.
    """
    result, budget = stages.result, stages.policy.budget
    setup = _chain_setup(stages, chains, several=False, optional=True)
    if setup is None:
        return None, ""
    target, number = result.target, setup.num_chains
    weights = 0.5 * modes.elbo.softmax(0) + 0.5 / len(modes.loc)
    labels = torch.multinomial(weights, number, replacement=True)
    normals = NormalMixture.of(weights.log(), modes.loc, modes.scale_tril)
    starts = Sampler(target, target.constrain(normals.sample(labels)))
    limit = TimeLimit(stages.limit.left(budget.training_share))
    setup = replace(setup, sampler=starts, patience=0.0, anneals_apart=False, limit=limit)
    refined, note = _resolved(target, partial(refine_target, setup))
    if refined.stopped == "interrupted":
        return refined, note
    if refined.drift is None or refined.drift.r_hat > CHAINS.stopping.max_usable_r_hat:
        return None, ""
    if not refined.settled:
        more = (budget.patience - 1) * setup.max_gradients
        refined = refined.refine_more(
            stages.limit.seconds(), more, progress=stages.options["progress"]
        )
    result.num_modes, result.modes = 1, modes.loc[:1]
    return refined, f"{note}chains mix between the {len(modes.loc)} modes; "


def has_failed(line: Stage) -> bool:
    """Warn if chains raised an error."""
    if line.error is not None:
        warn_user(f"fit did not refine its draws: {first_line(line.error)}")
    return line.error is not None


def large_errors(result: Fit, line: Stage, refined: Refined) -> str:
    """Note in a result, and in the line of its stage, that chains ended before they converged.

    :returns: their errors if these are too large to trust the draws; otherwise nothing.
    """
    if refined.stopped == "interrupted":
        result.interrupted = True
        return ""
    if refined.settled:
        return ""
    is_small, drifts = False, "too few draws to estimate their errors"
    if refined.drift is not None:
        is_small = judge_chains(refined.drift) == "trust"
        drifts = f"{refined.drift}{SMALL_ENOUGH if is_small else ''}"
    line.outcome += f"; {drifts}"
    return "" if is_small else drifts


def _resolved(target: Target, run: Callable[[], Refined]) -> tuple[Refined, str]:
    """Run chains, in float64 if the dtype ends before their draws do; return what was done, too."""
    refined, note = run(), ""
    if refined.unresolved:
        last = refined.store.take(torch.arange(refined.num_chains))
        if target.widen(last):
            note = f"again in float64, as {refined.unresolved}; "
            refined = run()
    if refined.unresolved:
        warn_user(
            f"{refined.unresolved}, so that the result lacks the mass beyond. Cure: integrate "
            "these latents out, such as by dist.BetaBinomial, or a prior with less mass there"
        )
    return refined, note


def _chain_setup(
    stages: Stages, chains: ChainPlan, several: bool, optional: bool
) -> ChainSetup | None:
    """Return the settings of chains, or of annealing for several modes.

    :returns: None if there is no time for optional chains.
    """
    result, budget = stages.result, stages.policy.budget
    target = result.target
    if several:  # many short chains: the numbers in the modes are those of the weights
        many = replace(budget, usual_chains=budget.most_chains)
        chains = affordable_chains(target.score, target.init_loc, stages.one_by_one, many)
        factor = CHAINS.tempering.num_chains // CHAINS.num_chains
        chains = ChainPlan(factor * chains.num_chains, chains.max_gradients // factor)
    elif (score := _score_of_chains(stages)) is not None:
        point = torch.zeros_like(target.init_loc)
        chains = affordable_chains(score, point, stages.one_by_one, budget)
    number = chains_in_time(target, chains.num_chains, stages.limit)
    if number == 0 and optional:
        return None
    if several or number == 0:
        number = chains.num_chains if several else CHAINS.least_chains
    return ChainSetup(
        Sampler(target, result.guide),
        number,
        chains.max_gradients,
        frame="full" if _is_untrained(stages) else "auto",
        limit=stages.limit,
        patience=patience_of(stages),
        compile=stages.options["compile"],
        anneals_apart=bool(target.sampled) or not stages.one_by_one,
    )


def patience_of(stages: Stages) -> float:
    """Return the seconds of one core after which chains end; a time limit ends them itself."""
    return math.inf if stages.limit.seconds() else stages.policy.budget.patient_seconds


def _is_untrained(stages: Stages) -> bool:
    return stages.result.chosen in ("gaussian", "adaptive") and stages.noise is None


def _teach_guide(stages: Stages, refined: Refined) -> None:
    """Let the guide of the result learn from chains that have settled, if it was not trained."""
    if refined.reparams and not stages.result.target.summed_out:  # the guide runs the plain model
        _teach_conditional(stages, refined)
    elif stages.result.chosen == "mean-field":
        teach_moments(stages, refined.moving())
    elif _is_untrained(stages) and refined.weights is None:
        _match_gaussian(stages, refined)


def _is_stuck(refined: Refined) -> bool:
    most = CHAINS.stopping.unmoved_r_hat
    return refined.drift is not None and not refined.drift.r_hat <= most


def _no_time(what: str) -> str:
    return (
        f"{what}: the result is the guide, whose draws are not those of the posterior. Cure: a "
        "larger max_seconds"
    )


def _score_of_chains(stages: Stages) -> Any:
    target, guide = stages.result.target, stages.result.guide
    if target.sampled:
        return None
    if noise := stages.noise or conditional_noise(target, target.init_loc):
        return noise.plain_score
    if isinstance(guide, AutoImplicit) and has_exact_density(guide):
        return GuideNoise(target, guide).plain_score
    return None


def teach_moments(stages: Stages, draws: dict[str, Tensor]) -> None:
    """Teach the guide of the result the moments of draws."""
    with stages.result.attempt("teach") as line:
        taught = teach(
            stages.result.guide,
            draws,
            *stages.args,
            progress=stages.options["progress"],
            model_kwargs=stages.kwargs,
        )
        line.outcome = str(taught)


def _teach_conditional(stages: Stages, refined: Refined) -> None:
    with stages.result.attempt("teach") as line:
        guide = own_names(AutoConditional(stages.trained, refined.reparams))
        stages.guides.append(guide)
        guide.share(stages.result.target)
        guide.take_moments(refined.moving(), *stages.args, model_kwargs=stages.kwargs)
        # The gain over its initial values, a median of the prior, would tell nothing.
        line.outcome = "a conditional guide with the moments of the draws"
        stages.result.guide, stages.result.chosen = guide, "conditional"


@torch.no_grad()
def _match_gaussian(stages: Stages, refined: Refined) -> None:
    """Give the guide of the result the moments of the draws."""
    result = stages.result
    with result.attempt("teach") as line:
        frame = frame_of_draws(result.target.unconstrain(refined.get_samples()))
        guide = AutoImplicit(stages.model, AutoregressiveGenerator, frame=frame)
        result.guide = set_up(guide, stages.args, stages.kwargs)
        stages.guides.append(guide)
        line.outcome = "a Gaussian with the moments of the draws"


@torch.no_grad()
def _cure(target: Target, refined: Refined) -> str:
    points = target.unconstrain(refined.get_samples())
    if error := harmful_rounding(target, points):
        dtype = str(points.dtype).removeprefix("torch.")
        return (
            f"In {dtype} the log-density has a rounding error of {error:.2g} nats or more at "
            f"{ROUNDING.share:.0%} of the draws. Cure: "
            "torch.set_default_dtype(torch.float64) and data in float64, or data and latents that "
            "are centred and scaled"
        )
    if refined.weights is not None and refined.stopped == "max_seconds":
        return "Cure: a larger max_seconds"
    if refined.weights is not None:  # these cannot continue
        return "Cure: fit(..., max_seconds=...): annealing then continues while errors are large"
    return f"Cure: {CONTINUE}"
