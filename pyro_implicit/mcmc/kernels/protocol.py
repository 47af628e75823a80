# SPDX-License-Identifier: Apache-2.0
"""The interface of kernels and of their adaptations, which the chains rely on."""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import Tensor

from pyro_implicit.mcmc.policy import ChainPolicy
from pyro_implicit.ops.ensemble_hmc import Score

__all__ = ["Init", "MakeTuning", "SeparateTuning", "SharedTuning", "Transition", "Tuning"]


class Init(Protocol):
    """Start chains at positions ``(num_chains, d)``; a kernel may ignore the score."""

    def __call__(self, position: Tensor, score: Score) -> Any: ...


class Transition(Protocol):
    """One transition of all chains: the next state, and an info with ``num_gradients``."""

    def __call__(self, state: Any, score: Score, settings: Any) -> tuple[Any, Any]: ...


class Tuning(Protocol):
    """The adaptation of a kernel with all data, a frozen value."""

    @property
    def step_size(self) -> float:
        """The step size, for reports."""

    @property
    def trajectory_length(self) -> float:
        """The length of the longest trajectory, for reports."""

    @property
    def max_gradients(self) -> int:
        """The most gradients of a transition."""

    @property
    def is_stiff(self) -> bool:
        """Whether trajectories fail in narrow places, so that step sizes are spread."""

    def settings(self, state: Any) -> Any:
        """Return the settings of the next transition; they may depend on the state."""

    def update(self, state: Any, info: Any, settings: Any) -> Self:
        """Learn from a transition, given the state before it."""

    def restart(self, score: Score, state: Any) -> tuple[Any, Self, int]:
        """Find a first step size; return the state, the adaptation and the gradients taken."""

    def frozen(self) -> Self:
        """Stop adapting."""


class SharedTuning(Tuning, Protocol):
    """The adaptation of chains with a common frame and common settings."""

    @property
    def is_at_limit(self) -> bool:
        """Whether the longest trajectories take ``max_gradients``."""

    def unfrozen(self) -> Self:
        """Adapt again."""

    def limited(self, max_gradients: int) -> Self:
        """Limit the gradients of a transition."""

    def with_step_size_spread(self, is_stiff: bool) -> Self:
        """Spread step sizes if trajectories fail."""


class SeparateTuning(Tuning, Protocol):
    """The adaptation of chains with settings of their own."""

    def at(self, share: float) -> Self:
        """Go to a share of the warm-up."""


class MakeTuning(Protocol):
    """Return the first adaptation of a run; a kernel may ignore the limit of gradients."""

    def __call__(
        self, policy: ChainPolicy = ..., max_gradients: int = ...
    ) -> SharedTuning | SeparateTuning: ...
