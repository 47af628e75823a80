# SPDX-License-Identifier: Apache-2.0
"""The stages of ``fit`` that come after its guides: weights, chains, and what chains start from."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import Tensor, nn

from pyro_implicit.density.checks.numerics import finite_log_prob, rounding_error
from pyro_implicit.density.initialisation import FlatPriorStart, without_sequential_plates
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.correction import reliability
from pyro_implicit.fitting.plan import TRAINING_SECONDS, ChainPlan, affordable_chains
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.guides.names import own_names
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import AutoConditional, Refined, refine, teach
from pyro_implicit.mcmc.chain_density import NoiseDensity
from pyro_implicit.mcmc.conditional_space import conditional_density
from pyro_implicit.nn import start_values
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["between", "correct", "move_draws", "train_mean_field"]

ROUGH_STEPS, ROUGH_PARTICLES, ROUGH_SPREAD = 1000, 8, 0.3
HASTE = 5.0  # times the learning rate
NEARER = (1.0, 0.5, 0.2, 0.05, 0.0)  # of the way from the origin to a start
MAX_ROUNDING, NUM_LOOKED_AT = 0.5, 64  # nats, beyond which chains go astray; draws
HOPELESS = 10.0  # nats a latent, which another start is better


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
    if walked := conditional_density(density, density.init_loc):
        return walked.score
    if isinstance(guide, AutoImplicit) and has_exact_density(guide):
        return NoiseDensity(density, guide).score
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
