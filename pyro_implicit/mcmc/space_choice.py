# SPDX-License-Identifier: Apache-2.0
"""In which space chains begin: by short walks, where nothing was said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.checks.numerics import blame
from pyro_implicit.density.cost import estimated_seconds
from pyro_implicit.density.target import Target
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.exactness import why_inexact
from pyro_implicit.guides.sampler import NOWHERE, Sampler
from pyro_implicit.mcmc.chain_density import ChainDensity, NoiseDensity
from pyro_implicit.mcmc.chains import MAX_FAILED, Chains
from pyro_implicit.mcmc.chees import ChEES
from pyro_implicit.mcmc.conditional_space import ConditionalDensity, middle_of
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.frame import FrameKind, estimate_frame
from pyro_implicit.mcmc.nuts import count_folds
from pyro_implicit.mcmc.stopping import Tracked, tracked
from pyro_implicit.ops.ensemble_hmc import ChainState
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["Plan", "Starts", "density_of", "finite_starts", "start_chains"]


PROBE = 24  # transitions, the first third of which do not count
EASY = 8.0  # gradients of a transition, in noise that is nearly normal
FASTER = 1.2
LONGEST = 16  # leapfrogs of a transition
LEAST_BUDGET = 4 * LONGEST * PROBE  # of which two walks take half at most
FOLD_DRAWS = 64
NAMES = {"noise": "the guide's noise", "conditional": "the latents' own noise"}


def start_chains(density: Target, plan: Plan) -> tuple[ChainDensity, Chains]:
    """Chains at draws of the guide, in the space that suits them.

    With ``frame="auto"`` chains walk on the latents' own noise, if priors of latents depend on
    other latents. Else an injective guide's chains begin in its noise. They stay there if the
    generator does not fold and the walk is easy: few gradients a transition, and none that fails.
    Where it is not, and the budget allows it, the latents are tried for as many transitions from
    the same guide, and the chains are taken there if the slowest latent, or its square, is moved
    further in the same time: by the squared distance of a transition over the variance, the larger
    of both walks, and by what a gradient costs, counted in operations. Noise in which the
    log-density is not finite is left alone.

    :returns: what they walk on, and the chains, the probes' gradients counted.
    """
    if plan.frame != "auto":
        space = plan.frame if plan.frame in ("noise", "conditional") else "latent"
        walked = density_of(density, plan, space)
        return walked, _begin(walked, plan)
    latent = density_of(density, plan, "latent")
    notes = []
    for space in ("conditional", "noise"):
        with suppress(ValueError):
            walked = density_of(density, plan, space)
            chains, note = _begin_if_sound(walked, plan)
            if chains is not None and space == "noise":
                return _the_better(walked, chains, latent, plan)
            if chains is not None:
                return walked, chains
            notes.append(note)
    others = _begin(latent, plan)
    others.space_note = "; ".join(notes)
    return latent, others


def _the_better(
    noise: ChainDensity, chains: Chains, latent: ChainDensity, plan: Plan
) -> tuple[ChainDensity, Chains]:
    if plan.max_gradients < LEAST_BUDGET:
        return noise, chains
    walk = _Walk(chains, noise)
    if walk.is_easy:
        return noise, chains
    others = _begin(latent, plan)
    other = _Walk(others, latent)
    gain = _cost(noise, chains) / _cost(latent, others)
    gain *= other.speed(walk) / max(walk.speed(other), 1e-12)
    chains.gradients = others.gradients = chains.gradients + others.gradients
    said = f"{gain:.1f} times as fast as in its noise"
    if gain > FASTER and other.failed <= walk.failed + MAX_FAILED:
        others.space_note = f"in the latents chains move {said}"
        return latent, others
    chains.space_note = f"in the latents they would move {said}"
    return noise, chains


def _begin_if_sound(walked: ChainDensity, plan: Plan) -> tuple[Chains | None, str]:
    """Chains, or why there are none."""
    name = NAMES[walked.space]
    if isinstance(walked, NoiseDensity):
        shape = min(plan.num_chains, FOLD_DRAWS), walked.density.latent_dim
        if count_folds(walked.guide, torch.randn(shape).to(walked.density.init_loc)):
            return None, "the guide's generator folds its noise"
    chains, note = None, f"the log-density is finite nowhere in {name}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ValueError):
            chains = _begin(walked, plan)
    if chains is not None and chains.replaced_starts > 0.1 * plan.num_chains:
        chains, note = None, f"the log-density is seldom finite in {name}"
    for one in caught:
        if chains is not None or "not finite at" not in str(one.message):
            warn_user(one.message, one.category)
    return chains, note


class _Walk:
    """What a short walk of chains, the beginning of their warm-up, says of their space."""

    def __init__(self, chains: Chains, density: ChainDensity) -> None:
        began, jumps, counted = chains.transitions, [], 0
        usual = chains.kernel.max_leapfrogs
        chains.kernel.max_leapfrogs = min(usual, LONGEST)
        self._centre = density.to_latent(_points(chains)).median(0).values
        values, failed = self._values(chains, density), []
        while chains.transitions < began + PROBE:
            before, gradients = values, chains.gradients
            chains.advance(density, _nothing, hurry=False)
            values = self._values(chains, density)
            if chains.transitions > began + PROBE // 3:
                jumps.append((values - before).square().mean(0))
                counted += chains.gradients - gradients
                failed.append(chains.last_failed)
        chains.kernel.max_leapfrogs = usual
        self._jump = torch.stack(jumps).mean(0)
        self._spread = values.var(0)
        self.gradients = counted / len(jumps)
        self.failed = sum(failed) / len(failed)

    @property
    def is_easy(self) -> bool:
        """Whether the space needs no comparison."""
        return self.gradients <= EASY and self.failed <= MAX_FAILED

    def speed(self, other: _Walk) -> float:
        """Of the slowest quantity."""
        spread = torch.maximum(self._spread, other._spread)
        moves = self._jump / (2 * torch.where(spread > 0, spread, torch.ones_like(spread)))
        return moves.min().item() / self.gradients

    def _values(self, chains: Chains, density: ChainDensity) -> Tensor:
        """Latents and squares of their distances from the middle, ``(num_chains, 2 d)``."""
        offset = density.to_latent(_points(chains)) - self._centre
        return torch.cat([offset, offset.square()], -1)


def _cost(density: ChainDensity, chains: Chains) -> float:
    return estimated_seconds(lambda: density.score(_points(chains)))


def _points(chains: Chains) -> Tensor:
    return chains.frame.to_points(chains.state.position)


def _nothing(latent: Tensor, log_density: Tensor) -> Tracked:
    return tracked([], log_density)


def _begin(density: ChainDensity, plan: Plan) -> Chains:
    """Chains at draws of the guide, in the frame of more of its draws."""
    sampler, num_chains = plan.sampler, plan.num_chains
    latent_dim = density.density.latent_dim
    num_draws = num_chains
    if not isinstance(sampler.guide, Mapping) and plan.kind == "full":
        num_draws = max(num_chains, 10 * latent_dim)
    if isinstance(density, NoiseDensity):
        points = torch.randn(num_draws, latent_dim).to(density.density.init_loc)
        # A guide of another model is told by its draws, which are not needed otherwise.
        sampler.draw(1)
    else:
        points = density.to_points(sampler.draw(num_draws))
    points_of_chains = points[:num_chains]
    starts = finite_starts(
        density.score,
        points_of_chains,
        sampler,
        lambda: blame(density.density, density.to_latent(points_of_chains)),
    )
    is_sound = starts.replaced == 0 and bool(points.isfinite().all())
    frame = estimate_frame(points if is_sound else starts.points, plan.kind)
    position = frame.to_white(starts.points)
    log_density, gradient = density.score(frame.to_points(position))
    state = ChainState(position, log_density, frame.pull_back(gradient))
    kernel = ChEES(max_leapfrogs=plan.max_leapfrogs)
    chains = Chains(state, kernel, frame, plan.kind, History(2 * (3 * plan.max_draws // 4)))
    chains.space, chains.middle = density.space, density.middle
    chains.replaced_starts = starts.replaced
    chains.start(density)
    return chains


@dataclass(frozen=True)
class Plan:
    """What chains are to be, before there are any."""

    sampler: Sampler
    num_chains: int
    frame: str
    kind: FrameKind
    max_gradients: int
    max_leapfrogs: int
    max_draws: int
    compile: CompileMode = "auto"


def density_of(
    density: Target, plan: Plan, space: str, middle: Tensor | None = None
) -> ChainDensity:
    """What chains in a space walk on.

    :param space: ``"latent"``, ``"noise"`` of the guide, or ``"conditional"``.
    :param middle: of the guide's draws, ``(latent_dim,)``, from which the last is made; by default
        their median.
    :raises ValueError: for the noise of a guide that is not injective, or where no latent's prior
        changes with others.
    """
    if space == "conditional":
        return _conditional(density, plan, middle)
    if space == "latent":
        return ChainDensity(density, plan.max_gradients).compiled(plan.compile)
    guide = plan.sampler.guide
    reason = f"it is a {type(guide).__name__}, and not an AutoImplicit"
    if isinstance(guide, AutoImplicit):
        reason = why_inexact(guide)
        if not reason:
            return NoiseDensity(density, guide, plan.max_gradients).compiled(plan.compile)
    raise ValueError(f'frame="noise" wants an injective guide: {reason}')


def _conditional(density: Target, plan: Plan, middle: Tensor | None) -> ConditionalDensity:
    if middle is None:
        middle = middle_of(plan.sampler)
    try:
        walked = ConditionalDensity(density, middle, plan.max_gradients)
    except RuntimeError as error:
        raise ValueError(
            'frame="conditional" wants second derivatives of the log-density, but the model raises '
            f'{first_line(error)}. Cure: frame="auto"'
        ) from error
    if not walked.reparams:
        raise ValueError(
            'frame="conditional" wants latents of location and scale that depend on other latents, '
            "or are multiplied by functions of them, and this model has none. Cure: "
            'frame="auto"'
        )
    return walked.compiled(plan.compile)


class Starts(NamedTuple):
    """Where chains start, ``(num_chains, d)``, and how many starts were replaced because the
    density was not finite there."""

    points: Tensor
    replaced: int


def finite_starts(
    score: Any, points: Tensor, sampler: Sampler, blamed: Callable[[], str]
) -> Starts:
    """Replace starts at which the density or its gradient is not finite by others of them.

    :param sampler: the source of the points.
    :param blamed: which sites keep the density from being finite at all of them, and the cure.
    :raises ValueError: if it is finite at none.
    """
    log_prob, gradient = score(torch.where(points.isfinite(), points, torch.zeros_like(points)))
    finite = points.isfinite().all(-1) & log_prob.isfinite() & gradient.isfinite().all(-1)
    lost = int((~finite).sum())
    if lost == len(points):
        raise ValueError(
            f"{NOWHERE} {lost} {sampler.source}: {blamed()}; or train the guide first, or start "
            "from draws of the prior"
        )
    if lost:
        warn_user(
            f"the model's log-density is not finite at {lost} of {len(points)} {sampler.source}: "
            "these chains start from others of the draws",
        )
        good = finite.nonzero().squeeze(-1)
        points = points.clone()
        points[~finite] = points[good[torch.randint(len(good), (lost,), device=good.device)]]
    return Starts(points, lost)
