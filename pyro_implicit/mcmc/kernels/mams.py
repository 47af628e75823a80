# SPDX-License-Identifier: Apache-2.0
"""Metropolis-adjusted microcanonical sampler (MAMS): MCLMC without the bias of its step size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.kernels import mclmc
from pyro_implicit.mcmc.kernels.hmc import Averaging
from pyro_implicit.mcmc.kernels.mclmc import MCLMCTuning, State, gradients_of, path, refreshed
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy
from pyro_implicit.ops.ensemble_hmc import Score, chosen

__all__ = ["Info", "MAMSTuning", "Settings", "adaptation", "init", "step"]


class Settings(NamedTuple):
    """Settings of the path, and whether Metropolis' rule accepts or rejects its end."""

    path: mclmc.Settings
    is_adjusted: bool = True


class Info(NamedTuple):
    """Probabilities of acceptance and energy errors of the whole transition, ``(num_chains,)``,
    and the gradients of each chain. Without adjustment, the energy error is that of MCLMC's
    :class:`~pyro_implicit.mcmc.kernels.mclmc.Info`."""

    acceptance: Tensor
    energy_error: Tensor
    num_gradients: int


def init(position: Tensor, score: Score) -> State:
    """Start chains at positions ``(num_chains, d)`` in random directions.

    :raises ValueError: for a single dimension, where directions cannot turn.
    """
    if position.shape[-1] < 2:
        raise ValueError(
            "kernel='mams' needs at least two latent dimensions, because directions cannot turn in "
            "one. Cure: kernel='hmc'"
        )
    return mclmc.init(position, score)


def step(state: State, score: Score, settings: Settings) -> tuple[State, Info]:
    r"""Make one transition that leaves the density invariant.

    The proposal is the end of a path of ``num_steps`` steps of MCLMC
    (:func:`~pyro_implicit.mcmc.kernels.mclmc.step`). It is accepted with probability
    :math:`\min(1, e^{-\Delta})`, where :math:`\Delta = \sum (\Delta K - \Delta \log p)` is the sum
    of the energy errors of the deterministic steps. The refreshments of the direction between them
    do not count, because they leave the uniform distribution of directions invariant and are
    reversible. An accepted path keeps its direction, and a rejected one reverses it, as in
    generalised Hamiltonian Monte Carlo. So the decoherence length may exceed the path. The
    refreshment after the last step is made after the decision, by all chains: one by the accepted
    chains alone would not leave the density invariant.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> score = lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> state, size = init(torch.randn(1000, 10), score), torch.full((1000, 1), 1.0)
    >>> for _ in range(20):
    ...     state, info = step(state, score, Settings(mclmc.Settings(size, 3 * size, 4)))
    >>> f"{state.position.var():.1f}", bool(info.acceptance.mean() > 0.9)
    ('1.0', True)

    :param state: positions and directions.
    :param score: log-densities and gradients of points ``(num_chains, d)``.
    :param settings: step sizes, lengths and the number of steps.
    :returns: the next state and the info. A path that leaves the finite numbers is rejected.

    **References:**

    1. Robnik, Cohn-Gordon and Seljak (2025), *Metropolis Adjusted Microcanonical Hamiltonian
       Monte Carlo*.
    2. Riou-Durand and Vogrinc (2022), *Metropolis Adjusted Langevin Trajectories*, on the energy
       error of paths with refreshments.
    3. Horowitz (1991), *A Generalized Guided Monte Carlo Algorithm*.
    """
    if not settings.is_adjusted:
        after, found = mclmc.step(state, score, settings.path)
        return after, Info(found.acceptance, found.energy_error, found.num_gradients)
    after, _, change = path(state, score, settings.path)
    is_finite = change.isfinite() & after.gradient.isfinite().all(-1)
    change = change.masked_fill(~is_finite, math.inf)
    acceptance = (-change).clamp(max=0.0).exp()
    accepted = torch.rand_like(acceptance) < acceptance
    kept = chosen(accepted, after, state._replace(direction=-state.direction))
    kept = kept._replace(direction=refreshed(kept.direction, settings.path))
    return kept, Info(acceptance, change, gradients_of(settings.path))


@dataclass(frozen=True)
class MAMSTuning:
    """Step sizes of chains that learn nothing from each other, as a value.

    In the first half of the warm-up the chains run unadjusted, with step sizes and decoherence
    lengths of :class:`~pyro_implicit.mcmc.kernels.mclmc.MCLMCTuning`: such steps are longer and
    move faster from the starts to the posterior. In the second half, dual averaging brings each
    chain's mean acceptance probability to ``target_acceptance``, from half the step size. A path
    has as many steps as the median of decoherence length over step size, at most ``max_steps``: the
    only number that the chains share, because they step at the same time.

    :param walk: step sizes and lengths, and the numbers of the adaptation.
    :param max_steps: of a path.
    :param averaging: of the log step sizes; None while the chains are unadjusted.
    :param num_steps: of a path, once frozen.

    **References:**

    1. Robnik, Cohn-Gordon and Seljak (2025), *Metropolis Adjusted Microcanonical Hamiltonian
       Monte Carlo*, section 4.
    """

    walk: MCLMCTuning = field(default_factory=MCLMCTuning)
    max_steps: int = 32
    averaging: Averaging | None = None
    num_steps: int | None = None

    is_stiff: ClassVar[bool] = False  # each chain has its own step size in any case

    def settings(self, state: State) -> Settings:
        """Return the settings of the next transition."""
        found = self.walk.settings(state)
        if self.averaging is None:
            return Settings(found, is_adjusted=False)
        number = self._number(self.walk) if self.num_steps is None else self.num_steps
        return Settings(found._replace(num_steps=number))

    def update(self, state: State, info: Info, settings: Settings) -> MAMSTuning:
        """Learn from a transition."""
        if self.num_steps is not None:
            return self
        if self.averaging is None:
            found = mclmc.Info(info.energy_error, info.num_gradients)
            return replace(self, walk=self.walk.update(state, found, settings.path))
        gradient = self.walk.policy.target_acceptance - info.acceptance.unsqueeze(-1)
        averaging = self.averaging.update(gradient)
        walk = replace(self.walk, step_sizes=averaging.value.exp())
        return replace(self, averaging=averaging, walk=walk)

    def restart(self, score: Score, state: State) -> tuple[State, MAMSTuning, int]:
        """Find first step sizes by doubling and halving.

        :returns: the state, the adaptation, and the gradients taken.
        """
        state, walk, gradients = self.walk.restart(score, state)
        return state, replace(self, walk=walk), gradients

    def at(self, share: float) -> MAMSTuning:
        """Learn from the warm-up, of which a share is over."""
        if self.averaging is not None:
            return self
        limits = self.walk.policy
        walk = self.walk.at(share / limits.unadjusted_share)
        if share < limits.unadjusted_share:
            return replace(self, walk=walk)
        assert walk.step_sizes is not None
        first = limits.restart_factor * walk.step_sizes
        return replace(
            self,
            walk=replace(walk, step_sizes=first),
            averaging=Averaging(first.log(), average=first.log()),
        )

    def frozen(self) -> MAMSTuning:
        """Stop adapting, at the averages of the step sizes."""
        begun = self if self.averaging is not None else self.at(math.inf)
        assert begun.averaging is not None
        walk = replace(begun.walk, step_sizes=begun.averaging.average.exp())
        return replace(begun, walk=walk, num_steps=begun._number(walk))

    @property
    def max_gradients(self) -> int:
        """The most gradients of a transition."""
        return 2 * self.max_steps

    @property
    def step_size(self) -> float:
        """The median of the chains' step sizes."""
        return self.walk.step_size

    @property
    def trajectory_length(self) -> float:
        """The median of the chains' decoherence lengths."""
        return self.walk.trajectory_length

    def _number(self, walk: MCLMCTuning) -> int:
        """Return the steps of a path: they cover the decoherence length, if they may."""
        ratio = walk.trajectory_length / walk.step_size
        return min(max(1, math.ceil(ratio)), self.max_steps)


def adaptation(policy: ChainPolicy = DEFAULT, max_gradients: int = 64) -> MAMSTuning:
    """Return the first adaptation of a run."""
    return MAMSTuning(mclmc.adaptation(policy), max(1, max_gradients // 2))
