# SPDX-License-Identifier: Apache-2.0
"""Chains side by side: they warm up, learn their frame, and leave draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from pyro_implicit.mcmc.chain_density import ChainDensity
from pyro_implicit.mcmc.chees import HOPELESS, ChEES
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.frame import FrameKind, WhiteningFrame, estimate_frame
from pyro_implicit.mcmc.stopping import Drift, Tracked
from pyro_implicit.ops.ensemble_hmc import ChainState

__all__ = ["Chains"]

FIRST_WINDOW = 8  # transitions; each window is twice as long as the one before
LEAST_WINDOWS = 3
TUNING = 16  # transitions in the last frame, before the kernel is frozen
MAX_POOL = 4096  # draws from which a frame is estimated
MAX_FAILED = 0.002
MAX_STRETCH = 3.0  # of sds, in a frame that is to stay
FAR, LEAST_FAR, MAX_LOST = 6.0, 15.0, 0.02  # interquartile ranges, nats, and the share of chains
SPREAD = 8.0  # of step sizes, where more trajectories fail
STRICT_R_HAT = 1.05
ENOUGH, LEAST_SHARE = 4_000, 0.5  # effective draws, or gradients of the warm-up's


@dataclass
class Chains:
    """All that the chains are at one moment; a checkpoint keeps it whole.

    :param state: in white coordinates of ``frame``.
    :param kernel: adapting, until warm-up ends.
    :param frame_kind: re-estimated at the end of each window of the warm-up.
    :param history: of the frozen chains.
    :param space: ``"latent"``, ``"noise"`` or ``"conditional"``, made from ``middle``, and
        ``space_note`` says why it is the one where others were possible.
    :param replaced_starts: chains put elsewhere, as their start had no finite log-density, no way
        out or next to no mass.
    """

    state: ChainState
    kernel: ChEES
    frame: WhiteningFrame
    frame_kind: FrameKind
    history: History
    phase: Literal["warm-up", "tuning", "sampling"] = "warm-up"
    space: str = "latent"
    space_note: str = ""
    middle: Tensor | None = None
    replaced_starts: int = 0
    gradients: int = 0
    warmup_gradients: int = 0
    seconds: float = 0.0
    transitions: int = 0
    acceptance: float = 0.0
    failed: float = 0.0
    last_failed: float = 0.0
    stopped: str | None = None
    settled: str | None = None
    """In what way; they go on while draws are few and cheap."""
    last_drift: Drift | None = None
    _window: int = 0
    _positions: list[Tensor] = field(default_factory=list)
    _log_densities: list[Tensor] = field(default_factory=list)
    _failed: list[float] = field(default_factory=list)
    _left: int = 0
    _next_check: int = 16

    def start(self, density: ChainDensity) -> None:
        """Find the first step size."""
        self.state, gradients = self.kernel.find_step(self._score(density), self.state)
        self.gradients += gradients

    def advance(
        self, density: ChainDensity, track: Callable[[Tensor, Tensor], Tracked], hurry: bool
    ) -> None:
        """One transition of all chains, and what it teaches.

        :param track: the tracked quantities of latents and log-densities.
        :param hurry: whether the warm-up has had its share of the budget.
        """
        move, gradients = self.kernel.transition(self._score(density), self.state)
        self.state = move.state
        self.gradients += gradients
        self.transitions += 1
        self.last_failed = failed = (move.acceptance < HOPELESS).double().mean().item()
        if self.phase == "sampling":
            count = self.history.seen
            self.acceptance += (move.acceptance.mean().item() - self.acceptance) / (count + 1)
            self.failed += (failed - self.failed) / (count + 1)
            latent = density.to_latent(self.frame.to_points(self.state.position))
            self.history.append(latent, track(latent, self.state.log_density))
        elif self.phase == "tuning":
            self._left -= 1
            if self._left <= 0:
                self.kernel.freeze()
                self.phase, self.warmup_gradients = "sampling", self.gradients
        else:
            self._positions.append(self.state.position)
            self._log_densities.append(self.state.log_density)
            self._failed.append(failed)
            if hurry or len(self._positions) >= FIRST_WINDOW << self._window:
                self._end_window(density, hurry)

    def check(
        self, has_quantities: bool, labels: Callable[[Tensor], Tensor] | None = None
    ) -> str | None:
        """Why the chains may stop, or None. Asked ever more rarely.

        :param has_quantities: whether what is tracked are functions that the user named.
        :param labels: of latents ``(num_chains, d)``, the component of a mixture that each is in.

        Where trajectories fail there are places that the chains seldom enter, and what happens
        seldom hardly shows as drift: the chains must then be much longer than their memory.

        Draws are cheap beside the warm-up that went before. So chains that have converged go on
        until there are four thousand effective ones, by R-hat, or half of its gradients are spent.
        """
        if self.phase != "sampling" or self.history.seen < self._next_check:
            return None
        self._next_check = math.ceil(1.2 * self.history.seen)
        self.last_drift = found = self.history.drift(self.history.label(labels))
        is_stiff = self.kernel.spread > 1 or self.failed > MAX_FAILED
        self.settled = None  # what shows later counts against what was said before
        if has_quantities and found.steady and not is_stiff:
            self.settled = "steady"
        if found.settled and not (is_stiff and found.r_hat > STRICT_R_HAT):
            self.settled = "converged"
        if self.settled != "converged":
            return self.settled
        is_enough = (found.r_hat**2 - 1) * ENOUGH <= len(self.state.position)
        spent = self.gradients - self.warmup_gradients
        return "converged" if is_enough or spent >= LEAST_SHARE * self.warmup_gradients else None

    def _end_window(self, density: ChainDensity, hurry: bool) -> None:
        """A new frame from the window's second half; on to the tuning once nothing moves."""
        half = len(self._positions) // 2
        path = torch.stack(self._positions)
        log_densities = torch.stack(self._log_densities)
        lively = (path.amax(0) > path.amin(0)).any(-1) & ~_are_lost(log_densities[half:])
        points = self.frame.to_points(self.state.position)
        if len(path) >= FIRST_WINDOW and lively.any():
            points = self._revived(points, lively)
            self._positions = [position[lively] for position in self._positions]
        stride = max(1, -(-(len(self._positions) - half) * len(points) // MAX_POOL))
        recent = torch.stack(self._positions[half:][::-1][::stride]).flatten(0, 1)
        # Draws on a thin sheet make a frame in which chains leave it slowly, and do not show it.
        is_right = bool(estimate_frame(recent, "diagonal").scale.max() < MAX_STRETCH)
        kind: FrameKind = self.frame_kind if is_right else "diagonal"
        self.frame = estimate_frame(self.frame.to_points(recent), kind)
        settled = _is_settled(log_densities, half)
        is_stiff = fmean(self._failed[half:]) > MAX_FAILED
        is_new = is_stiff and self.kernel.spread == 1  # a bad frame fails too, for one window
        self.kernel.spread = SPREAD if is_stiff else 1.0
        self._positions, self._log_densities, self._failed = [], [], []
        self._window += is_right
        score = self._score(density)
        position = self.frame.to_white(points)
        self.state, gradients = self.kernel.find_step(score, ChainState(position, *score(position)))
        self.gradients += gradients + 1
        if hurry or (settled and is_right and not is_new and self._window >= LEAST_WINDOWS):
            self.phase, self._left = "tuning", TUNING

    def _revived(self, points: Tensor, lively: Tensor) -> Tensor:
        """Chains that stood still for a window of the warm-up, or are lost, go on from others."""
        stuck, good = (~lively).nonzero().squeeze(-1), lively.nonzero().squeeze(-1)
        self.replaced_starts += len(stuck)
        if len(stuck) == 0:
            return points
        chosen = good[torch.randint(len(good), (len(stuck),), device=points.device)]
        return points.index_copy(0, stuck, points[chosen])

    def _score(self, density: ChainDensity) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        frame = self.frame

        def score(white: Tensor) -> tuple[Tensor, Tensor]:
            log_density, gradient = density.score(frame.to_points(white))
            return log_density, frame.pull_back(gradient)

        return score


def _are_lost(log_densities: Tensor) -> Tensor:
    """Which chains stay where there is next to no mass: too few to be another mode, with
    log-densities ``(num_transitions, num_chains)`` far below all others'."""
    ordered = log_densities.flatten().sort().values
    low, middle, high = (ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3))
    lost = log_densities.amax(0) < middle - (FAR * (high - low)).clamp(min=LEAST_FAR)
    return lost & (lost.double().mean() <= MAX_LOST)


def _is_settled(log_densities: Tensor, half: int) -> bool:
    """Whether the chains' log-density ``(num_transitions, num_chains)`` has stopped to drift."""
    early, late = log_densities[:half].mean(0), log_densities[half:].mean(0)
    error = (late - early).std() / math.sqrt(len(late))
    allowed = torch.maximum(3 * error, 0.1 * log_densities[half:].std())
    return bool((late - early).mean().abs() <= allowed)
