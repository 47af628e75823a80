# SPDX-License-Identifier: Apache-2.0
"""The start of chains with all data: their space, chosen by short trial walks, and their frame."""

from __future__ import annotations

import math
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
from pyro_implicit.density.policy import MAX_DENSE_DIM, SEARCH
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.auto_implicit import why_inexact
from pyro_implicit.guides.sampler import NOWHERE, Sampler
from pyro_implicit.mcmc.chains import SeparateChains, WindowedChains
from pyro_implicit.mcmc.convergence import Convergence
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.frame import FrameKind, WhiteningFrame, frame_at
from pyro_implicit.mcmc.kernels import KERNELS
from pyro_implicit.mcmc.mixed_chains import MixedChains, mixed_frame, possible_points
from pyro_implicit.mcmc.nuts import count_folds
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise, is_too_late, middle_of
from pyro_implicit.mcmc.spaces.space import Fitted, GuideNoise, MixedSpace, Space
from pyro_implicit.mcmc.stopping import Quantities
from pyro_implicit.ops.importance_weights import LogWeights
from pyro_implicit.ops.policy import FINITE_MEAN_KHAT
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.sites import innermost_support

__all__ = ["ChainSetup", "Starts", "finite_starts", "space_of", "start_chains"]


Score = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ChainSetup:
    """Settings of chains that see all data, before there are any.

    :param sampler: gives their starts.
    :param frame: the frame or space that the user wants.
    :param max_leapfrogs: gradients of a transition.
    :param quantities: the function whose values decide when the chains stop; by default the latents
        decide.
    :param patience: seconds of one core in all, up to which chains that are not usable at
        ``max_gradients`` go on.
    :param anneals_apart: whether chains that stay in separate modes are annealed: discrete latents
        from the prior, others from the modes near the chains. If annealing is no better, the chains
        go on.
    :param symmetries: symmetries of the posterior. The chains start with their units in order.
    :param has_alternative: tells chains that are not usable at ``max_gradients`` whether another
        method, such as the integration of latents, follows: then they end whatever their patience.
    """

    sampler: Sampler
    num_chains: int
    max_gradients: int
    frame: str = "auto"
    max_leapfrogs: int = 64
    max_draws: int = 100
    compile: CompileMode = "auto"
    kernel: str = "hmc"
    policy: ChainPolicy = DEFAULT
    limit: TimeLimit = NO_LIMIT
    quantities: Quantities | None = None
    patience: float = 0.0
    anneals_apart: bool = False
    symmetries: Symmetries | None = None
    has_alternative: Callable[[], bool] | None = None

    @property
    def kind(self) -> FrameKind:
        """The kind of frame in the space."""
        if self.frame in ("auto", "noise", "conditional"):
            return "full" if self.sampler.target.latent_dim <= MAX_DENSE_DIM else "low-rank"
        return self.frame  # type: ignore[return-value]

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint compares."""
        names = ("kernel", "policy", "num_chains", "max_gradients", "max_leapfrogs", "max_draws")
        return {
            **{name: getattr(self, name) for name in names},
            "latent_dim": self.sampler.target.latent_dim,
            "frame": (self.frame, self.kind),
        }


class Starts(NamedTuple):
    """Finite starts ``(num_chains, d)``, and how many were replaced."""

    points: Tensor
    replaced: int


def start_chains(plan: ChainSetup) -> tuple[Space, WindowedChains]:
    """Start chains at draws of the guide, in the space that suits them.

    With ``frame="auto"``, chains begin in the conditional space if priors of latents depend on
    other latents. Otherwise the chains of an injective guide begin in its noise, unless the
    importance weights of few latents have no mean: what it lacks is small there. They stay there if
    the generator does not fold and the walk is easy: few gradients for a transition, and no failed
    trajectory. If the walk is not easy and the budget allows it, the latents are tried for as many
    transitions from the same guide: the second derivatives that make the conditional space are
    blind to kinks, for instance. The chains go there if the slowest latent, or its square, moves
    further in the same time: by the squared distance of a transition over the variance, the larger
    of both walks, and by the cost of a gradient, counted in operations. A space in which the
    log-density is not finite is left.

    :returns: the space, and the chains; the trials' gradients are counted.
    """
    is_mixed = bool(plan.sampler.target.sampled)
    if plan.frame != "auto" or KERNELS[plan.kernel].separate or is_mixed:
        space = space_of(plan, plan.frame if plan.frame in ("noise", "conditional") else "latent")
        return space, _begin(space, plan)
    latent = space_of(plan, "latent")
    notes, names = [], ["conditional", "noise"]
    if is_too_late(plan.sampler.target, plan.limit, plan.policy.space):
        notes, names = ["max_seconds is too short to try other spaces"], []
    for name in names:
        chains = None
        with suppress(ValueError):
            chains, note = _begin_if_sound(space_of(plan, name), plan)
            notes.append(note)
        if chains is not None:
            chains = _the_better(chains, latent, plan)
            return chains.current_space, chains
    others = _begin(latent, plan)
    others.space_note = "; ".join(notes)
    return latent, others


def space_of(
    plan: ChainSetup, name: str, middle: Tensor | None = None, fitted: Fitted | None = None
) -> Space:
    """Return a space by name.

    :param name: ``"latent"``, ``"noise"`` of the guide, or ``"conditional"``.
    :param middle: the middle of the posterior, ``(latent_dim,)``, from which the conditional space
        is made; by default the median of the guide's draws.
    :param fitted: what the conditional space has learnt from draws.
    :raises ValueError: for the noise of a guide that is not injective, or if no latent's prior
        changes with others.
    """
    target, guide = plan.sampler.target, plan.sampler.guide
    if name == "conditional":
        return _conditional(plan, middle, fitted)
    if name == "latent":
        kind = MixedSpace if target.sampled else Space
        return kind(target, plan.max_gradients, plan.compile)
    reason = f"it is a {type(guide).__name__}, and not an AutoImplicit"
    if isinstance(guide, AutoImplicit):
        reason = why_inexact(guide)
        if not reason and not _has_coordinates_of(target, guide):
            reason = "its unconstrained coordinates are not those of the model, as after fit"
        if not reason:
            return GuideNoise(target, guide, plan.max_gradients, plan.compile)
    raise ValueError(f'frame="noise" needs an injective guide: {reason}')


def _has_coordinates_of(target: Target, guide: AutoImplicit) -> bool:
    if guide.prototype_trace is None:
        return True
    sites = guide.prototype_trace.nodes
    kinds = [
        {type(innermost_support(one[name]["fn"].support)) for one in (target.sites, sites)}
        for name in target.sites
        if name in sites
    ]
    return all(len(kind) == 1 for kind in kinds)


def _conditional(
    plan: ChainSetup, middle: Tensor | None, fitted: Fitted | None
) -> ConditionalNoise:
    policy = plan.policy.space
    if middle is None:
        middle = middle_of(plan.sampler, policy)
    target = plan.sampler.target
    try:
        space = ConditionalNoise(target, middle, plan.max_gradients, plan.compile, policy, fitted)
    except RuntimeError as error:
        raise ValueError(
            'frame="conditional" needs second derivatives of the log-density, but the model raises '
            f'{first_line(error)}. Cure: frame="auto"'
        ) from error
    if not space.reparams:
        raise ValueError(
            'frame="conditional" needs latents of location and scale that depend on other latents, '
            "or are multiplied by functions of them, and this model has none. Cure: "
            'frame="auto"'
        )
    return space


def finite_starts(
    score: Score, points: Tensor, sampler: Sampler, blamed: Callable[[], str]
) -> Starts:
    """Replace starts at which the density or its gradient is not finite by other starts.

    :param sampler: the source of the points.
    :param blamed: describes which sites are to blame if all are, and the cure.
    :raises ValueError: if the density is finite at none.
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
            "these chains start from other draws"
        )
        good = finite.nonzero().squeeze(-1)
        points = points.clone()
        points[~finite] = points[good[torch.randint(len(good), (lost,), device=good.device)]]
    return Starts(points, lost)


def _the_better(chains: WindowedChains, latent: Space, plan: ChainSetup) -> WindowedChains:
    """Return chains in a noise, or chains in the latents where they move faster."""
    policy = plan.policy.space
    # Two trial walks take half of the budget at most.
    number = 2 * policy.probe_leapfrogs * policy.probe
    if plan.max_gradients < 2 * number:
        return chains
    if math.isfinite(plan.limit.end):
        seconds = number * latent.target.seconds(plan.num_chains)
        if seconds > plan.limit.left(SEARCH.time_share):
            return chains
    walk = _Walk(chains, plan.policy)
    if walk.is_easy:
        return chains
    others = _begin(latent, plan)
    other = _Walk(others, plan.policy)
    gain = _cost(chains) / _cost(others)
    gain *= other.speed(walk) / max(walk.speed(other), 1e-12)
    chains.gradients = others.gradients = chains.gradients + others.gradients
    said = f"{gain:.1f} times as fast as in "
    said += "its noise" if chains.space == "noise" else "their own noise"
    if gain > policy.faster and other.failed <= walk.failed + plan.policy.warmup.max_failed:
        others.space_note = f"in the latents chains move {said}"
        return others
    chains.space_note = f"in the latents they would move {said}"
    return chains


def _begin_if_sound(space: Space, plan: ChainSetup) -> tuple[WindowedChains | None, str]:
    """Return chains, or the reason why there are none."""
    policy = plan.policy.space
    name = "the guide's noise" if space.name == "noise" else "the latents' own noise"
    if isinstance(space, GuideNoise):
        shape = min(plan.num_chains, policy.fold_draws), space.target.latent_dim
        if count_folds(space.guide, torch.randn(shape).to(space.target.init_loc)):
            return None, "the guide's generator folds its noise"
        khat = _khat(space, policy)
        # Chains rarely find the region that the guide lacks. In the mixture of Pyro's tutorial,
        # means were .2 sds off with a stated error of .04.
        if khat > FINITE_MEAN_KHAT:
            return None, f"the guide lacks a part of the posterior (k-hat {khat:.2f})"
    chains, note = None, f"the log-density is finite nowhere in {name}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ValueError):
            chains = _begin(space, plan)
    if chains is not None and chains.replaced > policy.max_replaced * plan.num_chains:
        chains, note = None, f"the log-density is rarely finite in {name}"
    for one in caught:
        if chains is not None or "not finite at" not in str(one.message):
            warn_user(one.message, one.category)
    return chains, note


def _khat(space: GuideNoise, policy: SpacePolicy) -> float:
    """Return Pareto k-hat of the guide's draws, 0 if it is unknown."""
    dim = space.target.latent_dim
    if dim > policy.max_khat_dim:
        return 0.0
    noise = torch.randn(policy.khat_draws, dim).to(space.target.init_loc)
    ratio = space.score(noise)[0] + 0.5 * noise.square().sum(-1)
    ratio = ratio[ratio.isfinite()]
    return LogWeights(ratio).khat if len(ratio) > 0 else 0.0


class _Walk:
    """A short trial walk, the beginning of the chains' warm-up."""

    def __init__(self, chains: WindowedChains, policy: ChainPolicy) -> None:
        self._policy, limits = policy, policy.space
        began, jumps, counted = chains.transitions, [], 0
        usual = chains.adaptation.max_gradients
        chains.adaptation = chains.adaptation.limited(min(usual, limits.probe_leapfrogs))
        self._centre = self._latent(chains).median(0).values
        values, failed = self._values(chains), []
        while chains.transitions < began + limits.probe:
            before, gradients = values, chains.gradients
            chains.advance()
            values = self._values(chains)
            if chains.transitions > began + limits.probe // 3:
                jumps.append((values - before).square().mean(0))
                counted += chains.gradients - gradients
                failed.append(chains.last_failed)
        chains.adaptation = chains.adaptation.limited(usual)
        self._jump = torch.stack(jumps).mean(0)
        self._spread = values.var(0)
        self.gradients = counted / len(jumps)
        self.failed = sum(failed) / len(failed)

    @property
    def is_easy(self) -> bool:
        """Whether the space needs no comparison."""
        is_sound = self.failed <= self._policy.warmup.max_failed
        return self.gradients <= self._policy.space.easy and is_sound

    def speed(self, other: _Walk) -> float:
        spread = torch.maximum(self._spread, other._spread)
        moves = self._jump / (2 * torch.where(spread > 0, spread, torch.ones_like(spread)))
        return moves.nan_to_num(0.0).min().item() / self.gradients

    def _latent(self, chains: WindowedChains) -> Tensor:
        return chains.current_space.to_latent(chains.points)  # the warm-up may renew a space

    def _values(self, chains: WindowedChains) -> Tensor:
        """Latents and squares of their distances from the middle, ``(num_chains, 2 d)``."""
        offset = self._latent(chains) - self._centre
        return torch.cat([offset, offset.square()], -1)


def _cost(chains: WindowedChains) -> float:
    return estimated_seconds(lambda: chains.current_space.score(chains.points), is_recorded=True)


def _begin(space: Space, plan: ChainSetup) -> WindowedChains:
    """Start chains at draws of the guide, in the frame of more of its draws."""
    sampler, num_chains, policy = plan.sampler, plan.num_chains, plan.policy
    latent_dim = space.target.latent_dim
    num_draws = num_chains
    kernel = KERNELS[plan.kernel]
    assert kernel.adaptation is not None  # `refine` refuses kernels of minibatches
    if not isinstance(sampler.guide, Mapping) and plan.kind == "full" and not kernel.separate:
        num_draws = max(num_chains, policy.frame.draws_per_dim * latent_dim)
    if isinstance(space, GuideNoise):
        points = torch.randn(num_draws, latent_dim).to(space.target.init_loc)
        sampler.draw(1)  # refuses a guide of another model
    else:
        draws = sampler.draw(num_draws)
        if plan.symmetries:  # rotations would put all starts on a sheet
            draws = plan.symmetries.finite().ordered(draws)
        points = space.to_points(draws)
    options: dict[str, Any] = {}
    kind: type[WindowedChains] = SeparateChains if kernel.separate else WindowedChains
    if isinstance(space, MixedSpace):
        points = possible_points(space, points, policy)
        kind, options = MixedChains, {"elements": space.elements}
    first = points[:num_chains]
    starts = finite_starts(
        space.score, first, sampler, lambda: blame(space.target, space.to_latent(first))
    )
    is_sound = starts.replaced == 0 and bool(points.isfinite().all())
    frame = WhiteningFrame(torch.zeros_like(points[0]), torch.ones_like(points[0]))
    if not kernel.separate:
        pool = points if is_sound else starts.points
        if isinstance(space, MixedSpace):
            frame = mixed_frame(pool, plan.kind, space.score, num_chains, space.elements, policy)
        else:
            frame = frame_at(pool, plan.kind, space.score, num_chains, policy.frame)
    position = frame.to_white(starts.points)
    chains = kind(
        kernel=plan.kernel,
        state=kernel.init(position, lambda white: space.white_score(frame, white)),
        frame=frame,
        policy=policy,
        replaced=starts.replaced,
        adaptation=kernel.adaptation(policy, plan.max_leapfrogs),
        frame_kind=plan.kind,
        history=History(2 * (3 * plan.max_draws // 4)),
        space=space.name,
        middle=space.middle,
        symmetries=plan.symmetries,
        convergence=Convergence(policy.stopping.first_check),
        **options,
    )
    chains.attach(space)
    chains.start()
    return chains
