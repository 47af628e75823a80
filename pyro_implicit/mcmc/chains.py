# SPDX-License-Identifier: Apache-2.0
"""Chains that see all data: they warm up, walk a frozen kernel, and stop once they converge."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.mcmc.chain_number import cheapest_number, seconds_of
from pyro_implicit.mcmc.convergence import Convergence
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.driver import Chains
from pyro_implicit.mcmc.frame import FrameKind, WhiteningFrame, frame_at
from pyro_implicit.mcmc.kernels import KERNELS, slice_sampling
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.mcmc.spaces.space import Fitted, Space
from pyro_implicit.mcmc.stopping import Tracked, tracked
from pyro_implicit.mcmc.warmup import WarmUp
from pyro_implicit.ops.jumps import jump_share

__all__ = ["SeparateChains", "WindowedChains"]

Tracks = Callable[[Tensor, Tensor], Tracked]


def _track_nothing(latent: Tensor, log_density: Tensor) -> Tracked:
    return tracked([], log_density)


@dataclass(kw_only=True)
class WindowedChains(Chains):
    """Chains with all data. They warm up in windows that double, then walk a frozen kernel.

    They go through three phases:

    1. ``"warm-up"``: the kernel adapts. At the end of each window, ``_end_window`` restarts chains
       that stand still, estimates the frame, and makes the space again if they have left it. The
       last window ends the phase.
    2. ``"tuning"``: frame and space are fixed; the kernel adapts for a number of transitions, after
       which ``advance`` freezes it.
    3. ``"sampling"``: ``advance`` stores draws, and :meth:`check` stops the chains.

    The way back to the warm-up is ``_warm_up_again``, which drops all draws. ``check`` takes it by
    ``_adapt_number``, once, for fewer and longer chains or a new space, and by ``_extend_budget``
    if the budget is spent and the space can be made again from the draws.

    :param adaptation: the kernel's adaptation, until the tuning ends.
    :param frame_kind: the kind of frame that is estimated at the end of each window.
    :param history: draws of the frozen chains.
    :param max_gradients: the budget of each chain.
    :param patience: seconds of one core in all, up to which chains that are not usable at
        ``max_gradients`` go on.
    :param ends_apart: whether chains that stay apart end early, to be annealed.
    :param num_workers: the number of processes that divide the chains.
    :param streams: the random streams at the end, from which :meth:`continued` goes on.
    :param phase: one of the three above.
    :param space: the name of the space, made from ``middle`` and ``fitted``; ``space_note``
        says why it was chosen.
    :param symmetries: of the posterior, under which the tracked latents are ordered.
    :param acceptance: the mean acceptance probability of the sampling.
    :param failed: the mean share of failed transitions of the sampling; ``last_failed`` is that of
        the last transition.
    :param warmup: the windows of the warm-up.
    :param convergence: whether the draws have settled.
    """

    adaptation: Any
    frame_kind: FrameKind
    history: History
    max_gradients: float = math.inf
    patience: float = 0.0
    ends_apart: bool = False
    num_workers: int = 1
    streams: Any = field(default=None, repr=False)
    phase: Literal["warm-up", "tuning", "sampling"] = "warm-up"
    space: str = "latent"
    space_note: str = ""
    middle: Tensor | None = None
    fitted: Fitted | None = None
    symmetries: Symmetries | None = None
    acceptance: float = 0.0
    failed: float = 0.0
    last_failed: float = 0.0
    warmup: WarmUp = field(default_factory=WarmUp)
    convergence: Convergence = field(
        default_factory=lambda: Convergence(DEFAULT.stopping.first_check)
    )
    #: Whether another method follows, see ``ChainSetup``; checkpoints do not store it.
    has_alternative: Callable[[], bool] | None = field(default=None, repr=False)
    #: Whether the user named the tracked quantities.
    has_quantities: bool = False
    #: Transitions until the tuning ends.
    _left: int = 0
    _space: Space | None = field(default=None, repr=False)
    _track: Tracks = field(default=_track_nothing, repr=False)
    #: Whether chains that have settled go on to the end of their budget.
    _spends_all: bool = False
    #: Whether `_adapt_number` has found the chains too short; it does so once.
    _adapted_number: bool = False
    #: Whether `_extend_budget` has raised `max_gradients`.
    _is_extended: bool = False

    def attach(
        self, space: Space, track: Tracks = _track_nothing, has_quantities: bool = False
    ) -> None:
        """Give the chains what a checkpoint does not store.

        :param space: the space of ``frame``.
        :param track: maps latents and log-densities to the tracked quantities.
        :param has_quantities: whether the user named the tracked quantities.
        """
        self._space, self._track, self.has_quantities = space, track, has_quantities

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_space": None, "_track": _track_nothing, "has_alternative": None}

    @property
    def has_draws(self) -> bool:
        """Whether there are enough draws for a result."""
        return self.history.seen >= self.policy.stopping.least_draws

    @property
    def progress(self) -> tuple[int, int]:
        """Gradients done and gradients in all."""
        total = int(self.max_gradients) if math.isfinite(self.max_gradients) else self.gradients
        return min(self.gradients, total), total

    def stop_soon(self) -> None:
        """End as soon as there are enough draws for a result."""
        self.max_gradients, self.patience = min(self.max_gradients, self.gradients), 0.0
        self.adaptation = self._limited(1)

    def values(self) -> dict[str, float]:
        """Return the mean log-density, the step size, and whether the warm-up is over."""
        return {
            "log_density": self.state.log_density.mean().item(),
            "step_size": self.adaptation.step_size,
            "sampling": float(self.phase == "sampling"),
        }

    @property
    def moves(self) -> str:
        """How discrete latent variables moved; empty without any."""
        return ""

    @property
    def points(self) -> Tensor:
        """Where the chains are in their space, ``(num_chains, d)``."""
        return self.frame.to_points(self.state.position)

    @property
    def current_space(self) -> Space:
        """The space in which the chains walk."""
        assert self._space is not None
        return self._space

    def continued(self, max_seconds: float | None, max_gradients: int | None) -> WindowedChains:
        """Return a copy with a further budget; settled chains spend all of it.

        :param max_seconds: further wall time.
        :param max_gradients: further gradients; by default as many as before, without a limit of
            time.
        """
        chains = copy.copy(self)
        chains.warmup, chains.convergence = self.warmup.copy(), replace(self.convergence)
        past = self.history
        chains.history = replace(past, latents=[*past.latents], powers=[*past.powers])
        if self.phase != "sampling":  # its draws are positions of the warm-up
            chains.history = History(past.capacity)
        if max_seconds is None and max_gradients is None:
            max_gradients = self.gradients
        chains.max_gradients = math.inf if max_gradients is None else self.gradients + max_gradients
        chains.max_seconds = None if max_seconds is None else self.seconds + max_seconds
        chains._spends_all, chains.stopped = self.stopped in ("converged", "steady"), None
        chains._is_extended, chains.has_alternative = False, None
        return chains

    def start(self) -> None:
        """Find the first step size."""
        self.state, self.adaptation, gradients = self.adaptation.restart(self._score, self.state)
        self.gradients += gradients

    def advance(self) -> None:
        """Make one transition of all chains, and learn from it."""
        is_early = self._ends_early()
        if is_early:
            self._shorten_trajectories()
        info = self._move()
        self.gradients += info.num_gradients
        self.transitions += 1
        rejected = info.acceptance < self.policy.hmc.failed_acceptance
        self.last_failed = failed = rejected.double().mean().item()
        if self.phase == "sampling":
            count = self.history.seen
            self.acceptance += (info.acceptance.mean().item() - self.acceptance) / (count + 1)
            self.failed += (failed - self.failed) / (count + 1)
            self._store()
        elif self.phase == "tuning":
            self._left -= 1
            if self._left <= 0:
                self.adaptation = self.adaptation.frozen()
                self.phase, self.warmup_gradients = "sampling", self.gradients
        else:
            self.warmup.append(self.state.position, self.state.log_density, failed)
            is_over = is_early or self.warmup.is_full(self.policy.warmup)
            if is_over and self._affordable() > self.policy.warmup.least_gradients:
                self._end_window(is_early)

    def _store(self) -> None:
        latent = self.current_space.to_latent(self.points)
        ranges = math.inf if self.has_quantities else self.policy.frame.outlier_ranges
        self.history.append(latent, self._track(latent, self.state.log_density), ranges)

    def _move(self) -> Any:
        left = self._affordable()
        adaptation = self._limited(max(1, int(left))) if math.isfinite(left) else self.adaptation
        settings = adaptation.settings(self.state)
        before = self.state
        self.state, info = KERNELS[self.kernel].step(before, self._score, settings)
        self.adaptation = self.adaptation.update(before, info, settings)
        return info

    def _affordable(self) -> float:
        """Return the gradients for which ``max_seconds`` leaves time."""
        if self.max_seconds is None or self.seconds <= 0:
            return math.inf
        return (self.max_seconds - self.seconds) * self.gradients / self.seconds

    def _limited(self, most: int) -> Any:
        """Return the adaptation with a limit of the gradients of a transition."""
        return self.adaptation.limited(min(self.adaptation.max_gradients, most))

    def _frame_of(self, draws: Tensor, kind: FrameKind) -> WhiteningFrame:
        limits, number = self.policy.frame, len(self.state.position)
        if kind == "low-rank":
            self.gradients += max(1, min(len(draws), limits.max_scored) // number)
        return frame_at(draws, kind, self.current_space.score, number, limits)

    def _in_parts(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Evaluate a function at as many points at a time as there are chains, to save memory."""
        return torch.cat([function(part) for part in values.split(len(self.state.position))])

    def _place(self, points: Tensor) -> None:
        self.state = KERNELS[self.kernel].init(self.frame.to_white(points), self._score)

    def _use_space(self, space: Space) -> None:
        self._space, self.middle, self.fitted = space, space.middle, space.fitted

    def _score(self, white: Tensor) -> tuple[Tensor, Tensor]:
        assert self._space is not None
        return self._space.white_score(self.frame, white)

    # Warm-up

    def _ends_early(self) -> bool:
        """Return whether the window ends now, as the warm-up has had its share of the budget."""
        share = self.warmup.share(
            self.gradients, self.max_gradients, self.seconds, self.max_seconds
        )
        return share >= self.policy.warmup.share

    def _shorten_trajectories(self) -> None:
        """Let the last window, the tuning and the fewest draws end within ``max_seconds``."""
        if self.max_seconds is None or self.phase != "warm-up":
            return
        left = max(0.0, self.max_seconds / max(self.seconds, 1e-9) - 1) * self.gradients
        least = 1 + self.policy.warmup.tuning + self.policy.stopping.least_draws
        self.adaptation = self._limited(
            max(1, min(self.adaptation.max_gradients, int(left / least)))
        )

    def _end_window(self, is_early: bool) -> None:
        """Estimate the frame from the window's second half; start tuning once nothing moves."""
        limits, window = self.policy.warmup, self.warmup
        moving, points = window.moving(self.policy), self.points
        if moving is not None:
            points = self._restart_stuck(points, moving)
        recent = window.recent(limits, moving)
        # The covariance of draws on a thin sheet makes a frame in which chains leave it slowly, and
        # do not show it. A frame of low rank is right even then: there the scores are small, too.
        spread = self._frame_of(recent, "diagonal").scale.max()
        is_right = bool(spread < limits.max_stretch)
        kind: FrameKind = self.frame_kind
        if kind == "full" and not is_right:
            kind = "diagonal"
        pool, is_moved = self.frame.to_points(recent), False
        if is_right and not is_early:
            points, pool, is_moved = self._renew_space(points, pool)
        self.frame = self._frame_of(pool, kind)
        settled, is_stiff = window.is_stationary(limits), window.is_stiff(limits)
        is_new = is_stiff and not self.adaptation.is_stiff  # a bad frame fails for one window, too
        self.adaptation = self.adaptation.with_step_size_spread(is_stiff)
        if is_stiff and self._jumps():
            self.kernel, is_new = "slice", True
            self.adaptation = slice_sampling.adaptation(self.policy, self.adaptation.max_gradients)
        window.next_window(is_right)
        self._place(points)
        self.gradients += 1
        self.start()
        is_final = settled and is_right and not (is_new or is_moved)
        is_done = is_final and window.num_windows >= limits.least_windows
        if is_early or is_done:
            self.phase, self._left = "tuning", limits.tuning

    def _jumps(self) -> bool:
        """Return whether trajectories of HMC fail because the density jumps."""
        limits, white = self.policy.slice, self.state.position
        if (self.kernel, self.space) != ("hmc", "latent") or white.shape[-1] > limits.max_dim:
            return False  # rounding of a guide's Jacobian may look like a jump
        # Chains that go on with HMC are as without this check: streams and budget do not change.
        stream = torch.Generator(white.device).manual_seed(0)
        return jump_share(white, self._score, generator=stream) > limits.least_jumps

    def _renew_space(self, points: Tensor, pool: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Make the space again if the chains have left its middle; return points and draws in it.

        A guide of many latents may be far away, and so may be what the data say there. The space
        is also made again if the draws tell more of its law than the middle did.
        """
        assert self._space is not None
        latents = self._in_parts(self._space.to_latent, pool)
        again = self._space.refitted(latents)
        if again is None:
            return points, pool, False
        moved = again.to_points(self._space.to_latent(points))
        pool_again = self._in_parts(again.to_points, latents)
        if not (again.score(moved)[0].isfinite().all() and pool_again.isfinite().all()):
            return points, pool, False
        self._use_space(again)
        return moved, pool_again, True

    def _restart_stuck(self, points: Tensor, moving: Tensor) -> Tensor:
        """Restart chains that stood still for a window, or are lost, from other chains."""
        stuck, good = (~moving).nonzero().squeeze(-1), moving.nonzero().squeeze(-1)
        self.replaced += len(stuck)
        if len(stuck) == 0:
            return points
        chosen = good[torch.randint(len(good), (len(stuck),), device=points.device)]
        return points.index_copy(0, stuck, points[chosen])

    # Stopping

    def check(self) -> str | None:
        """Return the reason why the chains stop now; or None, possibly after a restart."""
        found, limits = self.convergence, self.policy.stopping
        if self.phase == "sampling" and found.schedule(self.history.seen, limits):
            self._look()
            if self.ends_apart and self.is_apart:
                return "max_gradients"
            if self._may_end():
                if not self._spends_all:
                    return found.settled or "max_gradients"
            elif found.settled is None:
                self._adapt_number()
        end = None
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            end = "max_seconds"
            if self.history.seen == 0:  # the warm-up's last positions
                self._store()
        elif self.gradients >= self.max_gradients and self.has_draws:
            end = "max_gradients"
        if end is None or not self.has_draws:
            return end
        self._look()
        settled = self.convergence.settled
        if end == "max_gradients" and settled is None and self._extend_budget():
            return None
        return settled or end

    @property
    def is_apart(self) -> bool:
        """Whether the chains stay in separate modes, as far as R-hat tells."""
        limits, drift = self.policy.stopping, self.convergence.drift
        is_long = self.gradients >= min(limits.stuck_gradients, self.max_gradients)
        return is_long and drift is not None and drift.r_hat > limits.stuck_r_hat

    def _look(self) -> None:
        is_stiff = self.adaptation.is_stiff or self.failed > self.policy.warmup.max_failed
        self.convergence.look(
            self.history, self.policy.stopping, is_stiff, may_be_steady=self.has_quantities
        )

    def _may_end(self) -> bool:
        """Return whether the chains may end before their budget does."""
        return self.convergence.may_end(
            self.gradients - self.warmup_gradients,
            self.warmup_gradients,
            len(self.state.position),
            self.policy.stopping,
            self._is_extended,
        )

    # Restarts: a longer budget, fewer chains, or another space, with another warm-up

    def _extend_budget(self) -> bool:
        """Extend the budget of chains that are not usable, if patience is left."""
        drift, began = self.convergence.drift, self.warmup
        assert drift is not None
        limits, left = self.policy.stopping, self.patience - self.cpu_seconds
        if drift.is_usable(limits) or left < limits.least_left * self.cpu_seconds:
            return False
        if self.ends_apart and self.is_apart:
            return False
        if self.has_alternative is not None and self.has_alternative():
            return False
        cost = (self.cpu_seconds - began.cpu_seconds) / (self.gradients - began.gradients)
        if cost <= 0:  # the clock was too coarse to measure it
            return False
        # Twice as long, so that the result does not depend on small differences in time.
        self.max_gradients += math.ceil(min(left, self.cpu_seconds) / cost)
        self._is_extended = True
        latents = self._pool()
        again = self.current_space.refitted(latents) if self._may_warm_up_again else None
        if again is not None:
            self._move_to(self.points, latents, again)
            self._warm_up_again()
        return True

    def _adapt_number(self) -> None:
        """Go on with fewer chains and longer trajectories, if R-hat says that these chains end
        long before they forget, and if fewer are cheaper or the trajectories are at their limit.

        Chains that stay apart get a space that is made anew from their draws. The first one may be
        made where a guide has left them, far from the posterior (``volatility_2500``).
        """
        if self.patience <= 0 or self._adapted_number or not self._may_warm_up_again:
            return
        assert self.convergence.drift is not None
        spent, left = self.gradients - self.warmup_gradients, self.max_gradients - self.gradients
        needed = self.convergence.needed(spent, self.policy.stopping)
        if needed <= self.policy.stopping.too_long * left:
            return
        self._adapted_number = True
        new_warmup = (1 + self.policy.stopping.least_share) * self.warmup_gradients
        is_too_short = self.adaptation.is_at_limit and new_warmup < left
        before = seconds_of(self._score, self.state.position)
        latents, again = self._pool(), None
        if self.convergence.drift.r_hat > self.policy.stopping.unmoved_r_hat:
            again = self.current_space.refitted(latents, anew=True)
        if again is not None:
            self._move_to(self.points, latents, again)
        number, seconds = cheapest_number(self._score, self.state.position, self.policy)
        if number < len(self.state.position) or is_too_short:
            points = self.points[torch.randperm(len(self.points))[:number]]
            if again is None:
                self._move_to(points, latents, self.current_space.refitted(latents))
            else:  # the frame is that of the same draws
                self._place(points)
            longest = max(self.adaptation.max_gradients, self.policy.long_leapfrogs)
            self.adaptation = self.adaptation.limited(longest)
        elif again is None:
            return
        self._warm_up_again()
        self.max_gradients = self.gradients + math.ceil(max(0.0, left) * before / seconds)

    @property
    def _may_warm_up_again(self) -> bool:
        """Whether ``max_seconds`` leaves time for another warm-up and draws, which replace all
        earlier draws."""
        warmup, draws = self.policy.warmup, self.policy.stopping.least_draws
        return self._affordable() > warmup.least_gradients + warmup.tuning + draws

    def _pool(self) -> Tensor:
        """Return draws so far, evenly thinned, ``(num_draws, latent_dim)``."""
        latents = self.history.draws().flatten(0, 1)
        return latents[:: -(-len(latents) // self.policy.warmup.max_pool)]

    def _move_to(self, points: Tensor, latents: Tensor, space: Space | None) -> None:
        """Put the chains at points, in the frame of earlier draws and possibly another space."""
        moved = None if space is None else space.to_points(self.current_space.to_latent(points))
        if space is not None and moved is not None and space.score(moved)[0].isfinite().all():
            points = moved
            self._use_space(space)
        pool = self._in_parts(self.current_space.to_points, latents)
        self.frame = self._frame_of(pool, self.frame_kind)
        self._place(points)

    def _warm_up_again(self) -> None:
        """Begin the last window of another warm-up, from the space and frame of now."""
        self.adaptation = self.adaptation.unfrozen()
        # Draws of chains that had not converged would only bias those of the new ones.
        self.history = History(self.history.capacity)
        self.convergence = Convergence(self.policy.stopping.first_check)
        self.warmup = WarmUp(
            self.policy.warmup.least_windows - 1, self.gradients, self.seconds, self.cpu_seconds
        )
        self.phase, self.acceptance, self.failed = "warm-up", 0.0, 0.0
        self.start()


@dataclass(kw_only=True)
class SeparateChains(WindowedChains):
    """Chains with all data in the coordinates of their space, without a common frame.

    Modes of a network have different scales, so a frame of all chains suits none of them. Each
    chain learns step size and preconditioner from its own states, during a fixed share of the
    budget.
    """

    _last_share: float = 0.0
    """The share of the warm-up that was over when the last window ended."""

    def _limited(self, most: int) -> Any:
        return self.adaptation  # the kernel's transitions have few gradients

    def _ends_early(self) -> bool:
        """Return whether a window ends early, so that the warm-up has several and ends in time."""
        share = self._warmed()
        return share >= 1 or share - self._last_share >= self.policy.mclmc.longest_window

    def _warmed(self) -> float:
        """Return the share of the warm-up that is over."""
        share = self.gradients / self.max_gradients
        if self.max_seconds is not None:
            share = max(share, self.seconds / max(self.max_seconds, 1e-9))
        return share / self.policy.mclmc.warmup_share

    def _end_window(self, is_early: bool) -> None:
        share = self._last_share = self._warmed()
        self.adaptation = self.adaptation.at(share)
        self.warmup.next_window(self.warmup.num_windows < self.policy.warmup.least_windows)
        if share >= 1:
            self.adaptation = self.adaptation.frozen()
            self.phase, self.warmup_gradients = "sampling", self.gradients
