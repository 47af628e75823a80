# SPDX-License-Identifier: Apache-2.0
"""ChEES-HMC: chains side by side that set their common step size and trajectory length."""

from __future__ import annotations

import math

import torch
from pyro.ops.dual_averaging import DualAveraging
from torch import Tensor

from pyro_implicit.ops.ensemble_hmc import (
    ChainState,
    Move,
    Score,
    chees,
    ensemble_move,
    van_der_corput,
)

__all__ = ["HOPELESS", "ChEES"]

RATE, MEMORY, COST = 0.2, 0.8, 0.25
HARMONIC_TARGET, LEAST = 0.7, 0.05  # so that one hopeless chain in fifty does not rule
HOPELESS = 0.01  # a trajectory of such a probability of acceptance has failed
START_LENGTH = 1.5  # a quarter of a turn of a unit Gaussian is pi / 2


class ChEES:
    r"""The kernel, and what it has learnt.

    Each transition is one of Hamiltonian Monte Carlo with unit masses. All chains take the step
    size ``step_size`` and the same number of leapfrogs, ``trajectory_length`` times a number in
    (0, 1) over the step size; the numbers are those of van der Corput, so that no orbit is met
    with its own period.

    While it adapts, dual averaging moves the step size until the mean over chains of the
    probability of acceptance is ``target_acceptance``, and stochastic ascent moves the trajectory
    length to the maximum of the ChEES criterion over the fourth root of the length. Frozen, the
    kernel leaves the density exactly as it is. (The criterion alone is all but flat beyond its
    maximum, where trajectories cost more and bring nothing; divided by the length itself it is
    right for squares, but leaves means correlated.)

    The mean of the chains, not their harmonic mean as in the paper: of hundreds of chains the one
    in the narrowest place sets the harmonic mean, and slows down all. Where trajectories fail that
    is what is wanted, and with ``spread`` above 1 the harmonic mean (of probabilities of .05 at
    least) is brought to .7; each chain of each transition then takes its own step size, too,
    log-uniform between the common one and this fraction of it, so that some can enter places
    narrower still.

    :param target_acceptance: of the mean of all chains.
    :param max_leapfrogs: in one transition.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*.
    2. Hoffman and Gelman (2014), *The No-U-Turn Sampler*, section 3.2.
    """

    def __init__(self, target_acceptance: float = 0.8, max_leapfrogs: int = 64) -> None:
        self.target_acceptance, self.max_leapfrogs = target_acceptance, max_leapfrogs
        self.adapting = True
        self.spread = 1.0
        self._count = 0
        self.step_size, self.trajectory_length = 1.0, START_LENGTH
        self._log_length = self._mean_log_length = math.log(START_LENGTH)
        self._averaging = DualAveraging()
        self._criterion = self._slope = 0.0

    def find_step(self, score: Score, state: ChainState) -> tuple[ChainState, int]:
        """Start anew, as in a new frame, from a step size at which a short trajectory is accepted
        about as often as wanted.

        The chains keep where these trajectories take them: they are transitions like the others.

        :returns: the state, and the gradients taken.
        """
        size = min(self.step_size, 1.0)
        grown = shrunk = False
        gradients = 0
        for _ in range(30):
            move = ensemble_move(score, state, size, 2)
            state, gradients = move.state, gradients + 2
            if move.acceptance.mean() > self.target_acceptance:
                if shrunk:
                    break
                grown, size = True, 2 * size
            else:
                size, shrunk = size / 2, True
                if grown:
                    break
        self.step_size, self.trajectory_length = size, START_LENGTH
        self._log_length = self._mean_log_length = math.log(START_LENGTH)
        self._averaging = DualAveraging(prox_center=math.log(size), gamma=0.2)
        self._criterion = self._slope = 0.0
        return state, gradients

    def transition(self, score: Score, state: ChainState) -> tuple[Move, int]:
        """One move of all chains, and the gradients that it took of each.

        :param state: ``(num_chains, d)``.
        """
        self._count += 1
        length = van_der_corput(self._count) * self.trajectory_length
        num_steps = min(max(1, math.ceil(length / self.step_size)), self.max_leapfrogs)
        sizes: Tensor | float = self.step_size
        if self.spread > 1:
            sizes = self.step_size * self.spread ** -torch.rand_like(state.log_density)
            move = ensemble_move(score, state, sizes.unsqueeze(-1), num_steps)
        else:
            move = ensemble_move(score, state, sizes, num_steps)
        if self.adapting:
            self._adapt(state, move, num_steps * sizes)
        return move, num_steps

    def freeze(self) -> None:
        """Stop adapting, at the averages of what was tried."""
        self.adapting = False
        self.step_size = math.exp(self._averaging.get_state()[1])
        self.trajectory_length = math.exp(self._mean_log_length)

    def _adapt(self, state: ChainState, move: Move, length: Tensor | float) -> None:
        if self.spread > 1:
            harmonic = 1 / (1 / move.acceptance.clamp(min=LEAST)).mean().item()
            self._averaging.step(HARMONIC_TARGET - harmonic)
        else:
            self._averaging.step(self.target_acceptance - move.acceptance.mean().item())
        self.step_size = math.exp(self._averaging.get_state()[0])
        criterion, slope = (value.item() for value in chees(state.position, move, length))
        if not (math.isfinite(criterion) and math.isfinite(slope)):
            return
        self._criterion = MEMORY * self._criterion + criterion
        self._slope = MEMORY * self._slope + slope
        if self._criterion > 0:
            ascent = self._slope / self._criterion - COST
            self._log_length += RATE * min(max(ascent, -1.0), 1.0)
        longest = math.log(self.max_leapfrogs * self.step_size)
        self._log_length = min(max(self._log_length, math.log(self.step_size)), longest)
        self._mean_log_length += (1 - MEMORY) * (self._log_length - self._mean_log_length)
        self.trajectory_length = math.exp(self._log_length)
