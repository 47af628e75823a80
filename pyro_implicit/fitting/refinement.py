# SPDX-License-Identifier: Apache-2.0
"""The stages of ``fit`` that come after its guides: weights, chains, and what chains start from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import Tensor, nn

from pyro_implicit.density.checks.numerics import finite_log_prob, rounding_error
from pyro_implicit.density.cost import nearby, seconds_near
from pyro_implicit.density.initialisation import FlatPriorStart, without_sequential_plates
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import reliability
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import LEAST_ITERATIONS, Stages
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.guides.names import own_names
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import AutoConditional, Refined, refine, teach
from pyro_implicit.mcmc.spaces.space import GuideNoise, conditional_noise
from pyro_implicit.nn import start_values
from pyro_implicit.runtime.user_warnings import first_line

__all__ = [
    "ChainPlan",
    "Plan",
    "affordable_chains",
    "between",
    "correct",
    "make_plan",
    "move_draws",
    "train_mean_field",
]

ROUGH_STEPS, ROUGH_PARTICLES, ROUGH_SPREAD = 1000, 8, 0.3
HASTE = 5.0  # times the learning rate
NEARER = (1.0, 0.5, 0.2, 0.05, 0.0)  # of the way from the origin to a start
MAX_ROUNDING, NUM_LOOKED_AT = 0.5, 64  # nats, beyond which chains go astray; draws
HOPELESS = 10.0  # nats a latent, which another start is better


SEARCH_SECONDS, MOST_ITERATIONS = 20.0, 1600
TRAINING_SECONDS = 10.0
CHAIN_SECONDS, LEAST_CHAINS, MOST_CHAINS = 40.0, 32, 256
LEAST_GRADIENTS, LONG_ENOUGH, MOST_GRADIENTS = 800, 1200, 4000
WORTH = 0.7  # of the gradients of the fewest chains
PATIENCE = 2  # times as long, for chains that have not settled


class ChainPlan(NamedTuple):
    """How many chains, and ``max_gradients`` of each."""

    num_chains: int
    max_gradients: int


class Plan(NamedTuple):
    """``search_iterations`` of Newton's in all, 0 for none, and the chains."""

    search_iterations: int
    chains: ChainPlan


def affordable_chains(
    score: Callable[[Tensor], Any], point: Tensor, one_by_one: bool = False
) -> ChainPlan:
    """Chains that can be had: fewer of them where they would else be too short, and fewer make a
    gradient cheaper, as they hardly do in a Python loop. Most settle long before the gradients that
    those that do not are given.

    :param score: of points ``(num_chains, dim)``.
    :param point: one of them, ``(dim,)``.
    :param one_by_one: whether the model runs once for each chain.
    """

    def affordable_gradients(num_chains: int) -> int:
        seconds = seconds_near(score, point, num_chains, one_by_one)
        return max(1, min(MOST_GRADIENTS, int(CHAIN_SECONDS / seconds)))

    num_chains, gradients = MOST_CHAINS, affordable_gradients(MOST_CHAINS)
    if gradients < LONG_ENOUGH:
        wanted = min(LONG_ENOUGH, WORTH * affordable_gradients(LEAST_CHAINS))
        while gradients < wanted and num_chains > LEAST_CHAINS:
            num_chains //= 2
            gradients = affordable_gradients(num_chains)
    return ChainPlan(num_chains, max(LEAST_GRADIENTS, min(MOST_GRADIENTS, PATIENCE * gradients)))


def make_plan(density: Target) -> Plan:
    """The plan for a model that sees all its data.

    :param density: of the model; it is evaluated a few times at its start.
    """
    point = density.init_loc
    try:
        density.log_prob(nearby(point, 2))  # how the model can be run is found out here
        chains = affordable_chains(density.score, point, not density.is_vectorized)
        if density.latent_dim > MAX_DENSE_DIM:
            return Plan(0, chains)
        iterations = min(MOST_ITERATIONS, int(SEARCH_SECONDS / seconds_of_climb(density)))
    except Exception:  # the model's own, at its start: the search has others
        return Plan(MOST_ITERATIONS, ChainPlan(MOST_CHAINS, MOST_GRADIENTS))
    return Plan(iterations if iterations >= LEAST_ITERATIONS else 0, chains)


def correct(stages: Stages, density: Target) -> float:
    """See whether importance weights can right the draws of the chosen guide.

    :returns: their effective share, 1 of a guide that has none. ``result.correction`` is set if
        they can, reliably.
    """
    result = stages.result
    if not has_exact_density(result.guide):
        return 1.0
    efficiency = 0.0
    with result.attempt("correct") as line:
        found = stages.reliability or reliability(result.guide, density)
        line.outcome = str(found)
        efficiency = found.efficiency
        if found.suffices:
            result.correction = efficiency
    return efficiency


def train_mean_field(stages: Stages, density: Target) -> Fit:
    """A rough guide of many latents, for chains to start from.

    It has no frame, so latents may have to go many times the unit that ``lr`` is made for.
    """
    start = FlatPriorStart(init_to_value(values=between(density)))
    model = without_sequential_plates(stages.model)
    guide = own_names(AutoNormal(model, init_loc_fn=start))
    loss = ImplicitELBO(min(stages.num_particles, ROUGH_PARTICLES), nonfinite="skip")
    steps = min(ROUGH_STEPS, stages.steps_for(guide, loss, TRAINING_SECONDS))
    options = {"time_share": 0.3, "num_steps": steps, "haste": HASTE}
    return stages.train_alone("mean-field", guide, loss, **options)


def between(density: Target) -> dict[str, Tensor]:
    """A start between the prior's medians and one of its draws: weights of a network that are all
    the same stay so, and those of its prior are far too large. What the weights were before they
    became latents is better still, where the model is a module that knows them. A start out of
    which no training would come (the median of ``InverseGamma(0.001, 0.001)`` is 1e35 or so) is
    moved towards the origin of unconstrained space.
    """
    drawn = density.sample_prior(1)
    step = ROUGH_SPREAD * (drawn[0] - density.init_loc) if len(drawn) else 0.0
    starts = torch.tensor(NEARER).to(density.init_loc).unsqueeze(-1) * (density.init_loc + step)
    heights = finite_log_prob(density, starts)
    is_near_best = heights > heights.max() - HOPELESS * density.latent_dim
    values = density.constrain(starts[int(is_near_best.to(torch.uint8).argmax())])
    if isinstance(density.model, nn.Module):
        known = start_values(density.model)
        values |= {name: known[name] for name in values.keys() & known.keys()}
    return values


def move_draws(stages: Stages, chains: ChainPlan) -> Fit:
    """Move draws of the guide to the posterior, by many short chains."""
    result, left = stages.result, stages.limit.left()
    with result.attempt("refine") as line:
        score = _score_of_chains(result)
        if score is not None:
            point = torch.zeros_like(result.density.init_loc)
            chains = affordable_chains(score, point, stages.one_by_one)
        refined = result.refined = refine(
            stages.trained,
            result.guide,
            *stages.args,
            progress=stages.files["progress"],
            compile=stages.files["compile"],
            num_chains=chains.num_chains,
            max_gradients=chains.max_gradients,
            max_seconds=left if math.isfinite(left) else None,
            model_kwargs=stages.kwargs,
        )
        line.outcome = f"{refined.stopped} after {refined.num_gradients} gradients"
    if line.error is not None:
        stages.warn(f"fit did not refine its draws: {first_line(line.error)}")
    elif refined.stopped == "interrupted":
        result.interrupted = True
    elif not refined.settled:
        drifts = _drifts(refined)
        line.outcome += f"; {drifts}"
        stages.warn(
            f"fit's chains stopped at {refined.stopped} before they had settled: {drifts}. "
            + _cure(result.density, refined)
        )
    elif refined.reparams:
        _teach_conditional(stages, refined)
    elif result.chosen == "mean-field":
        _teach(stages, refined)
    return result


def _score_of_chains(result: Fit) -> Any:
    """What chains will walk on if not on the latents, to see what a gradient costs."""
    density, guide = result.density, result.guide
    if walked := conditional_noise(density, density.init_loc):
        return walked.score
    if isinstance(guide, AutoImplicit) and has_exact_density(guide):
        return GuideNoise(density, guide).score
    return None


def _teach(stages: Stages, refined: Refined) -> None:
    """Leave what the chains found in the rough guide: of a Gaussian, that is their moments."""
    with stages.result.attempt("teach") as line:
        taught = teach(
            stages.result.guide,
            refined.moving(),
            *stages.args,
            progress=stages.files["progress"],
            model_kwargs=stages.kwargs,
        )
        line.outcome = str(taught)


def _teach_conditional(stages: Stages, refined: Refined) -> None:
    """Leave a guide over the noise on which the chains walked, with the moments of their noise."""
    with stages.result.attempt("teach") as line:
        guide = own_names(AutoConditional(stages.trained, refined.reparams))
        stages.guides.append(guide)
        taught = guide.take_moments(refined.moving(), *stages.args, model_kwargs=stages.kwargs)
        line.outcome = f"conditional: {taught}"
        stages.result.guide, stages.result.chosen = guide, "conditional"


@torch.no_grad()
def _cure(density: Target, refined: Refined) -> str:
    """Of chains that have not settled."""
    draws = refined.get_samples()
    points = density.unconstrain(
        {name: draws[name][:: max(1, len(draws[name]) // NUM_LOOKED_AT)] for name in density.shapes}
    )
    error = rounding_error(density, points).median().item()
    if error > MAX_ROUNDING:
        dtype = str(points.dtype).removeprefix("torch.")
        return (
            f"In {dtype} the log-density is uncertain by {error:.2g} nats where they are. Cure: "
            "float64, or data and latents that are centred and scaled"
        )
    return (
        "Cure: refine(model, result.guide, ...) with more max_gradients, or a reparameterised model"
    )


def _drifts(refined: Refined) -> str:
    found = refined.drift
    if found is None:
        return "too few draws to tell how far they drift"
    return f"means may drift by {found.mean:.2f} sd, sds by {found.sd:.0%}, R-hat {found.r_hat:.2f}"
