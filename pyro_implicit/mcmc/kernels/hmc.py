# SPDX-License-Identifier: Apache-2.0
"""Hamiltonian Monte Carlo, with ChEES adaptation of step size and trajectory length."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, HMCPolicy
from pyro_implicit.ops.ensemble_hmc import (
    ChainState,
    Move,
    Score,
    chees,
    ensemble_move,
    van_der_corput,
)

__all__ = ["Averaging", "ChEES", "Info", "Settings", "adaptation", "init", "step"]


class Settings(NamedTuple):
    """Step size, broadcastable to ``(num_chains,)``, and leapfrog steps of a transition."""

    step_size: Tensor | float
    num_steps: int


class Info(NamedTuple):
    """A transition, and the gradients that it took of each chain."""

    move: Move
    num_gradients: int

    @property
    def acceptance(self) -> Tensor:
        """Probabilities of acceptance, ``(num_chains,)``."""
        return self.move.acceptance


def init(position: Tensor, score: Score) -> ChainState:
    """Start chains at positions ``(num_chains, d)``."""
    return ChainState(position, *score(position))


def step(state: ChainState, score: Score, settings: Settings) -> tuple[ChainState, Info]:
    """Make one transition of all chains, exact by Metropolis' rule."""
    size = settings.step_size
    if isinstance(size, Tensor):
        size = size.unsqueeze(-1)
    move = ensemble_move(score, state, size, settings.num_steps)
    return move.state, Info(move, settings.num_steps)


class Averaging(NamedTuple):
    """Dual averaging of log step sizes: Hoffman and Gelman (2014), section 3.2.

    Numbers, or tensors of independent step sizes.
    """

    centre: Any = 0.0
    gamma: float = DEFAULT.hmc.gamma
    steps: int = 0
    gradient: Any = 0.0
    value: Any = 0.0
    average: Any = 0.0

    def update(self, gradient: Any) -> Averaging:
        """Move against a gradient: the wanted minus the actual acceptance probability."""
        # The paper's constants: ten earlier steps, and weights that fall as steps ** -0.75.
        steps = self.steps + 1
        mean = (1 - 1 / (steps + 10)) * self.gradient + gradient / (steps + 10)
        value = self.centre - (steps**0.5) / self.gamma * mean
        weight = steps ** (-0.75)
        average = (1 - weight) * self.average + weight * value
        return self._replace(steps=steps, gradient=mean, value=value, average=average)


class _Learnt(NamedTuple):
    averaging: Averaging
    log_length: float
    mean_log_length: float
    criterion: float = 0.0
    slope: float = 0.0

    @staticmethod
    def nothing(step_size: float, policy: HMCPolicy) -> _Learnt:
        averaging = Averaging(math.log(step_size), policy.gamma)
        log_length = math.log(policy.start_length)
        return _Learnt(averaging, log_length, log_length)


@dataclass(frozen=True)
class ChEES:
    r"""Adaptive step size and trajectory length (ChEES), as a value.

    All chains share the step size and the number of leapfrog steps: ``trajectory_length`` times a
    number in (0, 1), over the step size. The numbers are van der Corput's sequence, so that no
    orbit is met at its own period.

    While it adapts, dual averaging moves the step size until the mean acceptance probability of
    all chains is ``policy.target_acceptance``. Stochastic ascent moves the trajectory length to
    the maximum of the ChEES criterion over the fourth root of the length. Once frozen, the kernel
    leaves the density exactly invariant. (The criterion alone is nearly flat beyond its maximum,
    where trajectories cost more and gain nothing. Divided by the length itself, it suits squares
    but leaves means correlated.)

    The paper uses the harmonic mean over chains. Among hundreds of chains, the chain in the
    narrowest place dominates it and slows all others. It is the right target where trajectories
    fail: with ``spread`` above 1, the harmonic mean is brought to ``policy.harmonic_target``, and
    each chain draws its own step size, log-uniform between the common one and this fraction of it,
    so that some chains can enter narrower places.

    **Example:**

    >>> score = lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> adaptation, state = ChEES(), init(torch.zeros(100, 2), score)
    >>> settings = adaptation.settings(state)
    >>> after, info = step(state, score, settings)
    >>> adaptation = adaptation.update(state, info, settings)
    >>> after.position.shape, info.num_gradients, adaptation.count
    (torch.Size([100, 2]), 1, 1)

    :param policy: the numbers of the adaptation.
    :param max_leapfrogs: leapfrog steps of a transition, at most.
    :param step_size: step size of the leapfrog integrator.
    :param trajectory_length: the longest.
    :param spread: ratio of the largest to the smallest step size of chains.
    :param adapting: whether updates change step size and length.
    :param count: transitions so far.
    :param learnt: running values of the adaptation.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*.
    2. Hoffman and Gelman (2014), *The No-U-Turn Sampler*, section 3.2.
    """

    policy: HMCPolicy = field(default_factory=HMCPolicy)
    max_leapfrogs: int = 64
    step_size: float = 1.0
    trajectory_length: float = DEFAULT.hmc.start_length
    spread: float = 1.0
    adapting: bool = True
    count: int = 0
    learnt: _Learnt = field(default_factory=lambda: _Learnt.nothing(1.0, DEFAULT.hmc), repr=False)

    def settings(self, state: ChainState) -> Settings:
        """Return the settings of the next transition."""
        length = van_der_corput(self.count + 1) * self.trajectory_length
        num_steps = min(max(1, math.ceil(length / self.step_size)), self.max_leapfrogs)
        sizes: Tensor | float = self.step_size
        if self.spread > 1:
            sizes = self.step_size * self.spread ** -torch.rand_like(state.log_density)
        return Settings(sizes, num_steps)

    def update(self, state: ChainState, info: Info, settings: Settings) -> ChEES:
        """Learn from a transition.

        :param state: before the transition.
        """
        after = replace(self, count=self.count + 1)
        return after._adapted(state, info.move, settings) if self.adapting else after

    def restart(self, score: Score, state: ChainState) -> tuple[ChainState, ChEES, int]:
        """Find a step size at which short trajectories have about the wanted acceptance.

        The chains stay where these trajectories end: they are transitions like all others.

        :returns: the state, the adaptation, and the gradients taken.
        """
        size = min(self.step_size, 1.0)
        grown = shrunk = False
        gradients = 0
        for _ in range(self.policy.max_doublings):
            move = ensemble_move(score, state, size, self.policy.search_leapfrogs)
            state, gradients = move.state, gradients + self.policy.search_leapfrogs
            if move.acceptance.mean() > self.policy.target_acceptance:
                if shrunk:
                    break
                grown, size = True, 2 * size
            else:
                size, shrunk = size / 2, True
                if grown:
                    break
        found = replace(
            self,
            step_size=size,
            trajectory_length=self.policy.start_length,
            learnt=_Learnt.nothing(size, self.policy),
        )
        return state, found, gradients

    def started_at(self, step_size: float) -> ChEES:
        """Adapt from a step size that is about right."""
        return replace(self, step_size=step_size, learnt=_Learnt.nothing(step_size, self.policy))

    def frozen(self) -> ChEES:
        """Stop adapting, at the averages of step size and length."""
        return replace(
            self,
            adapting=False,
            step_size=math.exp(self.learnt.averaging.average),
            trajectory_length=math.exp(self.learnt.mean_log_length),
        )

    def unfrozen(self) -> ChEES:
        """Adapt again, from the step size and length of now."""
        return replace(self, adapting=True)

    def with_step_size_spread(self, is_stiff: bool) -> ChEES:
        """Spread step sizes where trajectories fail, and only there."""
        return replace(self, spread=self.policy.spread if is_stiff else 1.0)

    @property
    def is_stiff(self) -> bool:
        """Whether step sizes are spread."""
        return self.spread > 1

    def limited(self, max_gradients: int) -> ChEES:
        """Limit the gradients of a transition."""
        return replace(self, max_leapfrogs=max_gradients)

    @property
    def is_at_limit(self) -> bool:
        """Whether the longest trajectories have as many leapfrog steps as they may."""
        return math.ceil(self.trajectory_length / self.step_size) >= self.max_leapfrogs

    @property
    def max_gradients(self) -> int:
        """The most gradients of a transition."""
        return self.max_leapfrogs

    def _adapted(self, state: ChainState, move: Move, settings: Settings) -> ChEES:
        policy, learnt = self.policy, self.learnt
        if self.is_stiff:
            harmonic = 1 / (1 / move.acceptance.clamp(min=policy.least_acceptance)).mean().item()
            averaging = learnt.averaging.update(policy.harmonic_target - harmonic)
        else:
            acceptance = move.acceptance.mean().item()
            averaging = learnt.averaging.update(policy.target_acceptance - acceptance)
        size = math.exp(averaging.value)
        learnt = learnt._replace(averaging=averaging)
        length = settings.num_steps * settings.step_size
        found, slope = (value.item() for value in chees(state.position, move, length))
        if not (math.isfinite(found) and math.isfinite(slope)):
            return replace(self, step_size=size, learnt=learnt)
        criterion = policy.memory * learnt.criterion + found
        slope = policy.memory * learnt.slope + slope
        log_length = learnt.log_length
        if criterion > 0:
            ascent = slope / criterion - policy.cost
            log_length += policy.rate * min(max(ascent, -1.0), 1.0)
        log_length = min(max(log_length, math.log(size)), math.log(self.max_leapfrogs * size))
        mean = learnt.mean_log_length
        mean += (1 - policy.memory) * (log_length - mean)
        learnt = _Learnt(averaging, log_length, mean, criterion, slope)
        return replace(self, step_size=size, trajectory_length=math.exp(log_length), learnt=learnt)


def adaptation(policy: ChainPolicy = DEFAULT, max_gradients: int = 64) -> ChEES:
    """Return the first adaptation of a run."""
    return ChEES(policy.hmc, max_gradients)
