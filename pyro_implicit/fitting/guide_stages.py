# SPDX-License-Identifier: Apache-2.0
"""The stages of ``fit`` that train a guide of at most a hundred latents."""

from __future__ import annotations

import math

import torch

from pyro_implicit.density.mode_search import Modes
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import (
    Candidate,
    frame_of_draws,
    semi_implicit_guide,
    set_weights,
    weigh,
)
from pyro_implicit.fitting.correction import reliability
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.mcmc.conditional_space import conditional_density
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["is_near", "train_exact", "train_semi_implicit"]

NEAR_ENOUGH = 0.01  # nats
FOLDED = 0.5  # nats: two folds are log 2
AT_ONCE = 0.0005  # nats
MOST_SECONDS = 120.0  # of all components


def is_near(candidate: Candidate) -> bool:
    """Whether a candidate needs no other beside it."""
    return candidate.gap < NEAR_ENOUGH


def train_exact(stages: Stages, density: Target, modes: Modes, seconds: float) -> Candidate:
    """The Gaussians as a candidate, and what training makes of them.

    :param seconds: of one core that the training may take, as estimated. If not infinite, chains or
        weights follow, and there is no training where these can right the Gaussians.
    :returns: the trained one, or the Gaussians if that failed.
    """
    guide = stages.exact_guide(modes)
    start = {name: value.clone() for name, value in guide.state_dict().items()}
    with stages.result.attempt("gaussian") as line:
        set_weights(density, guide)
        line.outcome = stages.add(weigh("gaussian", guide, density))
        if stages.candidates[-1].gap < AT_ONCE:
            return stages.candidates[-1]
        if math.isfinite(seconds):
            found = reliability(guide, density)
            if found.suffices:
                stages.reliability = found
                return stages.candidates[-1]
            if len(modes.loc) == 1 and conditional_density(density, modes.loc[0]):
                line.outcome += "; chains have a better space than a trained guide's"
                return stages.candidates[-1]
            if not _can_train_all(stages, guide):
                line.outcome += f"; {len(modes.loc)} trainings would take minutes"
                return stages.candidates[-1]
    is_mixture = isinstance(guide, AutoMixture)
    with stages.result.attempt("mixture" if is_mixture else "injective") as line:
        losses: list[float] = []
        notes = ""
        if isinstance(guide, AutoMixture):
            seconds /= len(guide.components) ** 0.5
            for index, part in enumerate(guide.components):
                more, note = _train_part(stages, density, part, index, len(modes.loc), seconds)
                losses, notes = losses + more, notes + note
            set_weights(density, guide)
        else:
            loss = stages.default_loss(guide)
            losses = stages.train(line.name, guide, loss, stages.steps_for(guide, loss, seconds))
        line.outcome = stages.add(weigh(line.name, guide, density, losses)) + notes
    if line.error is not None:
        guide.load_state_dict(start)
    if not stages.candidates and line.error is not None:
        raise line.error
    return stages.candidates[-1]


def train_semi_implicit(stages: Stages, density: Target, before: Candidate) -> None:
    """A guide of another shape, in the frame of another candidate's draws.

    :param before: that candidate.
    """
    for name in ("semi-implicit", "semi-implicit-again"):
        with stages.result.attempt(name) as line:
            frame = frame_of_draws(before.draws)
            guide = semi_implicit_guide(stages.model, frame, *stages.args, **stages.kwargs)
            stages.guides.append(guide)
            losses = stages.train(name, guide, stages.default_loss(guide))
            found = weigh(name, guide, density, losses)
            line.outcome = stages.add(found)
            # LIVI takes a generator that covers one place twice for one of more entropy.
            promised = -torch.tensor(losses[-100:]).nanmean().item() - found.bound
            if not promised < FOLDED:
                line.outcome += f", {promised:.1f} below what its loss promised: it folds"
                continue
        return


def _can_train_all(stages: Stages, guide: AutoImplicit | AutoMixture) -> bool:
    """Whether there is time for the least training of each component."""
    if not isinstance(guide, AutoMixture):
        return True
    seconds = stages.seconds_of_step(guide.components[0], _loss_of_part(stages))
    return seconds * stages.least_steps * len(guide.components) < MOST_SECONDS


def _loss_of_part(stages: Stages) -> InjectiveELBO:
    """Without coverage: a component is to stay in its mode."""
    return InjectiveELBO(stages.num_particles, nonfinite="skip")


def _train_part(
    stages: Stages,
    density: Target,
    part: AutoImplicit,
    index: int,
    number: int,
    seconds: float,
) -> tuple[list[float], str]:
    """Train a component of a mixture, which stays the Gaussian it was if that is better."""
    start = weigh("start", part, density, num_draws=1)
    loss = _loss_of_part(stages)
    name, note = f"mode-{index}", ""
    try:
        most = math.ceil(stages.num_steps * number**-0.5)
        steps = min(most, stages.steps_for(part, loss, seconds))
        losses = stages.train(name, part, loss, steps, time_share=0.5 / (number - index))
        if not weigh(name, part, density, num_draws=1).falls_short(start):
            return losses, ""
        note = "its bound fell"
    except Exception as error:  # the model's own too, of any kind
        losses, note = [], first_line(error)
    start.restore()
    return losses, f"; {name} stays a Gaussian ({note})"
