# SPDX-License-Identifier: Apache-2.0
"""Chains of continuous and discrete latent variables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_implicit.density.discrete import Elements
from pyro_implicit.density.policy import DISCRETE, RUNS
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.frame import FrameKind, WhiteningFrame, frame_at
from pyro_implicit.mcmc.kernels import hmc, shift, window_gibbs
from pyro_implicit.mcmc.kernels.shift import Ridge, conditional_factor
from pyro_implicit.mcmc.kernels.window_gibbs import MoveClass
from pyro_implicit.mcmc.policy import ChainPolicy
from pyro_implicit.mcmc.spaces.space import MixedSpace
from pyro_implicit.ops.ensemble_hmc import ChainState, Move, Score

__all__ = ["MixedChains", "mixed_frame", "possible_points"]


def mixed_frame(
    draws: Tensor,
    kind: FrameKind,
    score: Score,
    chunk: int,
    elements: Elements,
    policy: ChainPolicy,
) -> WhiteningFrame:
    """Estimate the frame of continuous coordinates given the discrete ones, which stay as they are.

    :param draws: ``(n, d)``, the discrete coordinates last.
    :param score: with ``chunk``, see :func:`~pyro_implicit.mcmc.frame.frame_at`.
    :param elements: the discrete elements.
    """
    loc, scale = torch.zeros_like(draws[0]), torch.ones_like(draws[0])
    number = len(elements.low)
    split = len(loc) - number
    if split == 0:
        return WhiteningFrame(loc, scale)
    own, values = draws[:, :split], draws[:, split:]
    found = frame_at(draws, kind, score, chunk, policy.frame, split)
    directions, tril = found.directions, found.scale_tril
    width = found.scale
    if directions is None:  # a low-rank frame has too many coordinates for a regression
        factor = conditional_factor(found.to_white(own), values, elements).to(draws)
        if tril is None:
            width = width * factor.square().sum(-1).sqrt()
        else:
            tril = torch.block_diag(tril @ factor, torch.eye(number).to(tril))
    else:
        directions = torch.nn.functional.pad(directions, (0, 0, 0, number))
    loc[:split], scale[:split] = found.loc, width
    return WhiteningFrame(loc, scale, directions, found.stretch, tril)


def possible_points(space: MixedSpace, points: Tensor, policy: ChainPolicy) -> Tensor:
    """Move the discrete latent variables of impossible points until the density is not 0.

    A draw of the prior may have fewer individuals than were counted, for instance. Its terms of
    density 0 count as terms of a very small density.

    :param points: ``(num_chains, d)``.
    """
    limits, elements = policy.window, space.elements
    split = points.shape[-1] - len(elements.low)
    is_lost = ~space.target.log_prob(points).isfinite()
    if not is_lost.any():
        return points
    some = points[is_lost]
    continuous, values = some[:, :split], some[:, split:]
    given = window_gibbs.terms_given(space.target.terms, continuous)

    def terms(values: Tensor) -> Tensor:
        return given(values).nan_to_num(nan=-limits.impossible, neginf=-limits.impossible)

    depends = None
    reach = torch.full_like(elements.low, DISCRETE.longest_stride)
    for _ in range(limits.most_repairs):
        found = terms(values)
        if not (found <= -limits.impossible).any():
            break
        # Moves of all sizes, as small ones change nothing where the density is 0.
        far = (values + (reach ** torch.rand_like(values)).round()).minimum(elements.high)
        seen = window_gibbs.dependence(values, terms, elements, far)
        depends = seen if depends is None else depends | seen
        classes = window_gibbs.move_classes(depends, elements, limits)
        state = window_gibbs.State(values, found)
        (values, _), _ = window_gibbs.step(state, terms, classes, elements, reach)
    points = points.clone()
    points[is_lost] = torch.cat([continuous, values], -1)
    return points


@dataclass(kw_only=True)
class MixedChains(WindowedChains):
    """Chains of which the last coordinates are discrete.

    A transition is one of HMC for the continuous latent variables, given the discrete ones, and
    sweeps over the discrete ones (:mod:`~pyro_implicit.mcmc.kernels.window_gibbs`).

    :param elements: the bounds of the discrete elements.
    :param depends: which terms of the log-density depend on which elements; None if the chains
        found that this cannot be told.
    :param classes: elements that move at once.
    :param reach: the longest strides of candidates, ``(num_elements,)``.
    :param moved: the mean probability that an element moves in a sweep after the warm-up.
    """

    elements: Elements
    depends: Tensor | None = None
    classes: list[MoveClass] = field(default_factory=list)
    reach: Tensor = field(default_factory=lambda: torch.empty(0))
    moved: Tensor | float = 0.0
    is_sequential: bool = False
    ridge: Ridge | None = None
    shift_size: float = 1.0
    num_shifts: int = 0

    @property
    def _split(self) -> int:
        return self.state.position.shape[-1] - len(self.elements.low)

    @property
    def moves(self) -> str:
        """How discrete latent variables moved."""
        moved = self.moved.mean().item() if isinstance(self.moved, Tensor) else math.nan
        shifts = "" if self.ridge is None else ", and with continuous ones along a ridge"
        return (
            f"{len(self.elements.low)} elements in {len(self.classes)} independent classes, each "
            f"moved in {moved:.0%} of the sweeps{shifts}"
        )

    @property
    def mixed(self) -> MixedSpace:
        """The space, which has the terms of the log-density."""
        assert isinstance(self._space, MixedSpace)
        return self._space

    def start(self) -> None:
        """Find the first step size."""
        if not self.classes:
            self._learn(self.state.position[:, self._split :])
        if self._split == 0:
            return
        part, discrete = self._parts()
        part, self.adaptation, gradients = self.adaptation.restart(
            self._score_given(discrete), part
        )
        self.state = _joined(part, discrete)
        self.gradients += gradients

    def _learn(self, values: Tensor) -> None:
        """Find out which elements move at once, and how far."""
        limits = self.policy.window
        if not self.is_sequential:
            number = min(len(self.state.position), RUNS.num_points)
            rows = torch.randperm(len(self.state.position))[:number].to(values.device)
            given = self.state.position[rows]
            found = window_gibbs.dependence(
                given[:, self._split :],
                lambda values: self._terms(given, values),
                self.elements,
            )
            self.depends = found if self.depends is None else self.depends | found
        self.classes = window_gibbs.move_classes(self.depends, self.elements, limits)
        self.reach = window_gibbs.reach_of(values, self.elements, limits)

    def _move(self) -> hmc.Info:
        part, discrete = self._parts()
        if self._split:
            settings = self.adaptation.settings(part)
            before = part
            part, info = hmc.step(before, self._score_given(discrete), settings)
            self.adaptation = self.adaptation.update(before, info, settings)
        else:
            ones = torch.ones_like(part.log_density)
            info = hmc.Info(Move(part, part.position, part.position, ones), 0)
        white = _joined(part, discrete).position
        given = self._terms(white, discrete)
        total, sweeps = given.sum(-1), self._num_sweeps(info.num_gradients)
        state = window_gibbs.State(discrete, given)
        for _ in range(sweeps):
            state, moved = window_gibbs.step(
                state,
                lambda values: self._terms(white, values),
                self.classes,
                self.elements,
                self.reach,
            )
        expected = part.log_density + state.terms.sum(-1) - total
        continuous, values, evaluations = part.position, state.values, 2
        log_density = self._log_prob(continuous, values)
        self._compare(log_density, expected, state.terms)
        if self.ridge is not None:
            for _ in range(self.policy.shift.num_moves):
                continuous, values, log_density, acceptance = shift.step(
                    continuous, values, log_density, self._log_prob, self.ridge, self.shift_size
                )
                self._adapt_shift(acceptance.mean().item())
            evaluations += self.policy.shift.num_moves
        self.state = hmc.init(torch.cat([continuous, values], -1), self._score)
        if self.phase == "sampling":
            self.moved = self.moved + (moved - self.moved) / (self.history.seen + 1)
        evaluations += sweeps * self._evaluations
        return info._replace(num_gradients=info.num_gradients + 1 + math.ceil(evaluations / 2))

    @property
    def _evaluations(self) -> int:
        """Evaluations of the log-density that a sweep takes, by each chain."""
        return sum(one.num_values - 1 for one in self.classes)

    def _num_sweeps(self, gradients: int) -> int:
        """Return the number of sweeps that take about as long as the gradients."""
        number = round(gradients / max(1, self._evaluations))
        return min(max(1, number), self.policy.window.most_sweeps)

    def _adapt_shift(self, acceptance: float) -> None:
        if self.phase == "sampling":
            return
        limits, self.num_shifts = self.policy.shift, self.num_shifts + 1
        rate = self.num_shifts**-limits.slowing
        self.shift_size *= math.exp(rate * (acceptance - limits.target_acceptance))

    def _log_prob(self, white: Tensor, values: Tensor) -> Tensor:
        return self.mixed.log_prob(self.frame.to_points(torch.cat([white, values], -1)))

    def _compare(self, log_density: Tensor, expected: Tensor, terms: Tensor) -> None:
        """Let each element move alone from now on, if classes depend on each other after all."""
        error = (log_density - expected).abs()
        allowed = math.sqrt(torch.finfo(error.dtype).eps)  # rounding, of terms of size 1
        if self.is_sequential or not (error > allowed * (1 + terms.abs().sum(-1))).any():
            return
        self.is_sequential, self.depends = True, None
        self.classes = window_gibbs.move_classes(None, self.elements, self.policy.window)
        if self.phase == "sampling":  # earlier draws are not of the posterior
            self.history = History(self.history.capacity)
            self.acceptance = self.failed = 0.0

    def _jumps(self) -> bool:
        return False  # slices are for continuous latent variables

    def _end_window(self, is_early: bool) -> None:
        points = self.frame.to_points(torch.cat(self.warmup.late))
        super()._end_window(is_early)
        self.learn_moves(points)

    def learn_moves(self, points: Tensor) -> None:
        """Learn the moves of discrete elements from points ``(n, d)`` of the chains' space."""
        white = self.frame.to_white(points)
        continuous, values = white[:, : self._split], white[:, self._split :]
        self._learn(values)
        self.ridge = shift.ridge_of(continuous, values, self.elements, self.policy.shift)
        self.shift_size, self.num_shifts = self.policy.shift.first_size, 0

    @property
    def is_apart(self) -> bool:
        """Whether the chains stay in separate modes at the end of their budget."""
        drift, limit = self.convergence.drift, self.policy.stopping.apart_r_hat
        is_long = self.gradients >= self.max_gradients
        return is_long and (drift is None or drift.r_hat > limit)

    def _extend_budget(self) -> bool:
        return not self.is_apart and super()._extend_budget()

    def _frame_of(self, draws: Tensor, kind: FrameKind) -> WhiteningFrame:
        number = len(self.state.position)
        return mixed_frame(
            draws, kind, self.current_space.score, number, self.elements, self.policy
        )

    def _parts(self) -> tuple[ChainState, Tensor]:
        split, state = self._split, self.state
        part = ChainState(state.position[:, :split], state.log_density, state.gradient[:, :split])
        return part, state.position[:, split:]

    def _score_given(self, discrete: Tensor) -> Score:
        def score(white: Tensor) -> tuple[Tensor, Tensor]:
            log_density, gradient = self._score(torch.cat([white, discrete], -1))
            return log_density, gradient[:, : white.shape[-1]]

        return score

    def _terms(self, white: Tensor, values: Tensor) -> Tensor:
        """Return the terms at white coordinates with other values, ``(*batch, num_terms)``."""
        points = self.frame.to_points(white)[:, : self._split]
        return window_gibbs.terms_given(self.mixed.terms, points)(values)


def _joined(part: ChainState, discrete: Tensor) -> ChainState:
    return ChainState(
        torch.cat([part.position, discrete], -1),
        part.log_density,
        torch.cat([part.gradient, torch.zeros_like(discrete)], -1),
    )
