# SPDX-License-Identifier: Apache-2.0
"""Chains side by side that see one minibatch at a time: they find their step, and leave draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_implicit.density.minibatch_density import MinibatchDensity
from pyro_implicit.mcmc.frame import WhiteningFrame
from pyro_implicit.mcmc.minibatch_schedule import Schedule
from pyro_implicit.mcmc.step_choice import (
    FRICTION,
    MinibatchKernel,
    StepChoice,
    choose_step,
    judge,
    probe,
    stable_step,
)
from pyro_implicit.ops.sghmc import sghmc_step, sgld_step
from pyro_implicit.runtime.minibatches import BatchStream

__all__ = ["MinibatchChains"]

MAX_GROWTH = 2.0  # of the step, from one window of the warm-up to the next
MAX_TEMPERATURE = 3.0  # that of short runs varies, as all chains see the same noise
LEAST_STEPS = 10  # after the warm-up


@dataclass
class MinibatchChains:
    """All that the chains are at one moment; a checkpoint keeps it whole.

    :param position: in white coordinates of ``frame``, ``(num_chains, d)``, as ``velocity``.
    :param choice: the step size, until the next window ends.
    :param given_step: the user's, which is then kept.
    :param replaced: chains put elsewhere, as their start had no finite log-density, or as they left
        the finite numbers.
    """

    position: Tensor
    velocity: Tensor
    frame: WhiteningFrame
    kernel: MinibatchKernel
    schedule: Schedule
    given_step: float | None = None
    replaced: int = 0
    replaced_late: int = 0
    choice: StepChoice | None = None
    step: int = 0
    gradients: int = 0
    warmup_gradients: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    _cap: float = math.inf
    _heat: float = 0.0
    _count: int = 0
    _anchor: Tensor | None = None

    @property
    def temperature(self) -> float | None:
        """Mean square of the velocities since the last window ended."""
        return 1 + self._heat / max(1, self._count) if self.kernel == "sghmc" else None

    def advance(self, density: MinibatchDensity, stream: BatchStream) -> Tensor | None:
        """One step of all chains; unconstrained draws ``(num_chains, d)`` where they are kept."""
        if self.choice is None:
            self._choose(density, stream)
        density.use(stream.next())
        gradient, size = self._gradient(density), self._size()
        if self.kernel == "sghmc":
            moved = sghmc_step(gradient, self.position, self.velocity, size, FRICTION)
        else:
            moved = sgld_step(gradient, self.position, size), self.velocity
        self.gradients += 1
        if not all(part.isfinite().all(-1).any() for part in moved):
            density.refuse_missing_data(stream.where)
        self._take(*moved)
        self.step += 1
        if self.step in self.schedule.windows:
            self._choose(density, stream)
            self.warmup_gradients = self.gradients
        if self.schedule.keeps(self.step - 1):
            return self.frame.to_points(self.position)
        return None

    def hurry(self, left: int) -> None:
        """End the warm-up with the next step, where time rather than steps is short.

        :param left: steps for which there is time.
        """
        if self.step < self.schedule.warmup - 1:
            warmup = self.step + 1
            least = max(LEAST_STEPS, 3 * self.schedule.cycles)
            steps = min(self.schedule.steps, warmup + max(left, least))
            self.schedule = replace(self.schedule, warmup=warmup, steps=steps)

    def _size(self) -> float:
        """Of the next step."""
        assert self.choice is not None
        size = self.choice.step_size * self.schedule.factor(self.step)
        if self.given_step is None:
            size = min(size, stable_step(self.kernel, self.choice.curvature), self._cap)
        return size

    def _choose(self, density: MinibatchDensity, stream: BatchStream) -> None:
        """The step size of the next window, from what the chains see where they are."""
        steps, before = self.schedule.sampling, self.choice
        if self.given_step is None and before is not None:
            is_hot = self._heat > (MAX_TEMPERATURE - 1) * self._count
            if is_hot and not self._climbed(density, stream):
                self._retreat(before.step_size)
        gradients = [self._gradient(density, *probed) for probed in enumerate(stream.probed)]
        try:
            found = probe(gradients, self.position)
        except RuntimeError:
            for seed, batch in enumerate(stream.probed):
                density.use(batch, seed)
                density.refuse_missing_data(f"minibatch {seed + 1} of those looked at first")
            raise
        self.gradients += found.gradients
        choice = choose_step(self.kernel, found, steps)
        if self.given_step is not None:
            choice = judge(self.kernel, found, steps, self.given_step, "user")
        else:
            growth = math.inf if before is None else MAX_GROWTH * before.step_size
            if self._cap < min(choice.step_size, growth):
                choice = judge(self.kernel, found, steps, self._cap, "stability")
            elif growth < choice.step_size:
                choice = judge(self.kernel, found, steps, growth, choice.limit)
        self.choice = choice
        self._heat, self._count = 0.0, 0
        self._anchor = self.position if self.step < self.schedule.warmup else None
        self.velocity = torch.randn_like(self.position)  # the heat of a fall from far is gone

    @torch.no_grad()
    def _climbed(self, density: MinibatchDensity, stream: BatchStream) -> bool:
        """Whether the log-density has risen since the window began: chains that fall towards the
        posterior from far away are hot, too."""
        assert self._anchor is not None
        rise = 0.0
        for seed, batch in enumerate(stream.probed[:4]):
            density.use(batch, seed)
            before, after = (
                density.log_prob(self.frame.to_points(white)).mean().item()
                for white in (self._anchor, self.position)
            )
            rise += after - before
        return rise > 0

    def _retreat(self, step_size: float) -> None:
        """To where the window began, whose step was too long."""
        assert self._anchor is not None
        self.position, self.velocity = self._anchor, torch.randn_like(self._anchor)
        self._cap = min(self._cap, step_size / 2)

    def _take(self, position: Tensor, velocity: Tensor) -> None:
        """Go on from there; lost chains go on from others, and in the warm-up with a shorter
        step."""
        lost = ~(position.isfinite() & velocity.isfinite()).all(-1)
        num_lost = int(lost.sum())
        is_warm = self.step >= self.schedule.warmup
        if num_lost == len(lost) and not is_warm and self.given_step is None:
            self.replaced += num_lost
            self._retreat(self._size())
            return
        if num_lost == len(lost):
            raise RuntimeError(
                f"all {num_lost} chains left the finite numbers at step {self.step}, of size "
                f"{self._size():.3g} in the frame. Cure: a better start, a shorter step_size, or "
                "float64"
            )
        if num_lost:
            good = (~lost).nonzero().squeeze(-1)
            chosen = good[torch.randint(len(good), (num_lost,), device=good.device)]
            position, velocity = position.clone(), velocity.clone()
            position[lost] = position[chosen]
            velocity[lost] = torch.randn_like(velocity[lost])
            self.replaced += num_lost
            if is_warm:
                self.replaced_late += num_lost
            else:
                self._cap = self._size() / 2
        self.position, self.velocity = position, velocity
        self._heat += velocity.square().mean().item() - 1
        self._count += 1

    def _gradient(
        self, density: MinibatchDensity, seed: int | None = None, batch: tuple | None = None
    ) -> Callable[[Tensor], Tensor]:
        """In white coordinates; NaN where the log-density is not finite.

        :param batch: by default the one that the density has; ``seed`` is for the rows that a model
            draws itself.
        """

        def gradient(white: Tensor) -> Tensor:
            if batch is not None:
                density.use(batch, seed)
            log_density, found = density.score(self.frame.to_points(white))
            found = torch.where(log_density.isfinite().unsqueeze(-1), found, torch.nan)
            return self.frame.pull_back(found)

        return gradient
