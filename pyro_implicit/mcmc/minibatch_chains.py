# SPDX-License-Identifier: Apache-2.0
"""Chains that see one minibatch at a time: their schedule, and the choice of their step size."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.density.scales import DataScales
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.driver import Chains
from pyro_implicit.mcmc.kernels import KERNELS, sghmc
from pyro_implicit.mcmc.kernels.step_choice import (
    Score,
    StepChoice,
    choose_step,
    judge,
    probe,
    stable_step,
)
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.minibatches import BatchStream, num_rows

__all__ = ["MinibatchChains", "StepSchedule", "check_scaling"]


@dataclass(frozen=True)
class StepSchedule:
    """When the step size is chosen, and which draws are kept.

    :param steps: all steps.
    :param warmup: steps of the warm-up; the step size is chosen anew after a quarter, a half and
        all of them.
    :param max_draws: kept draws of each chain.
    """

    steps: int
    warmup: int
    max_draws: int

    @property
    def sampling(self) -> int:
        """Steps after the warm-up."""
        return self.steps - self.warmup

    @property
    def windows(self) -> set[int]:
        """Ends of the windows of the warm-up."""
        return {max(1, self.warmup >> shift) for shift in (2, 1, 0)}

    def factor(self, step: int) -> float:
        """Return the factor of the chosen step size, which rises in the first window."""
        return min(1.0, 4 * (step + 1) / self.warmup) if step < self.warmup else 1.0

    def keeps(self, step: int) -> bool:
        """Return whether positions after this step are draws."""
        interval = -(-self.sampling // self.max_draws)
        return step >= self.warmup and (self.steps - 1 - step) % interval == 0


@dataclass(kw_only=True)
class MinibatchChains(Chains):
    """Chains whose score comes from minibatches.

    :param schedule: see :class:`StepSchedule`; ``planned`` are its steps before time ran short.
    :param given_step: the user's step size, which is kept.
    :param replaced_late: chains that left the finite numbers after the warm-up.
    :param choice: the step size until the window ends.
    :param num_draws: snapshots in the store, and ``stream_state`` the place in the minibatches,
        at the last checkpoint.
    """

    schedule: StepSchedule
    planned: int
    given_step: float | None = None
    replaced_late: int = 0
    choice: StepChoice | None = None
    num_draws: int = 0
    stream_state: Any = None
    _cap: float = math.inf
    _heat: float = 0.0
    _count: int = 0
    _anchor: Tensor | None = None
    _is_plain: bool = True
    _took: float = 0.0
    _mean_share: float = 1.0
    _target: Any = field(default=None, repr=False)
    _scales: Any = field(default=None, repr=False)
    _stream: Any = field(default=None, repr=False)
    _store: Any = field(default=None, repr=False)

    def attach(self, target: Target, stream: BatchStream, store: DrawStore) -> None:
        """Give the chains what a checkpoint does not store."""
        self._target, self._stream, self._store = target, stream, store
        self._scales = DataScales(target.model, target.args, target.kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_target": None,
            "_scales": None,
            "_stream": None,
            "_store": None,
            "stream_state": self._stream.state(),
            "num_draws": len(self._store),
        }

    @property
    def temperature(self) -> float:
        """Mean square of the velocities since the last window."""
        return 1 + self._heat / max(1, self._count)

    @property
    def has_draws(self) -> bool:
        """Whether there are enough draws for a result."""
        return len(self._store) > 0

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done and steps in all."""
        return self.transitions, self.planned

    def values(self) -> dict[str, float]:
        """Return the step size."""
        return {"step_size": self._size()}

    def advance(self) -> None:
        """Make one step of all chains, and store the draws that are due."""
        began, gradients = time.perf_counter(), self.gradients
        if self.choice is None:
            self._choose()
        self._target = self._target.on(self._stream.next())
        change = self._share(self._target) - self._mean_share
        self._mean_share += change / (self.transitions + 1)
        settings = sghmc.Settings(self._size(), self.policy.langevin.friction)
        state, info = KERNELS[self.kernel].step(self.state, self._score, settings)
        self.gradients += info.num_gradients
        if not all(part.isfinite().all(-1).any() for part in state):
            self._target.refuse_missing_data(self._stream.where)
        self._take(state)
        self.transitions += 1
        if self.transitions in self.schedule.windows:
            self._choose()
            self.warmup_gradients = self.gradients
        if self.schedule.keeps(self.transitions - 1):
            self._store.append(self.frame.to_points(self.state.position))
        self._is_plain = self.gradients == gradients + info.num_gradients  # without probes
        self._took = time.perf_counter() - began

    def check(self) -> str | None:
        """Return the reason why the chains stop now, or None; end the warm-up if time is short."""
        limit = self.max_seconds
        limits = self.policy.langevin
        if limit is not None and self._is_plain and self.seconds > limits.warmup_share * limit:
            self._hurry(round((limit - self.seconds) / self._took))
        if self.transitions == self.schedule.steps:
            return "max_epochs" if self.transitions == self.planned else "max_seconds"
        if limit is not None and self.seconds >= limit and self.has_draws:
            return "max_seconds"
        return None

    def _hurry(self, left: int) -> None:
        """End the warm-up with the next step; there is time for ``left`` steps."""
        if self.transitions < self.schedule.warmup - 1:
            warmup = self.transitions + 1
            least = self.policy.stopping.least_draws
            steps = min(self.schedule.steps, warmup + max(left, least))
            self.schedule = replace(self.schedule, warmup=warmup, steps=steps)

    def _size(self) -> float:
        assert self.choice is not None
        size = self.choice.step_size * self.schedule.factor(self.transitions)
        if self.given_step is None:
            size = min(size, stable_step(self.choice.curvature), self._cap)
        return size

    def _choose(self) -> None:
        limits, steps, before = self.policy.langevin, self.schedule.sampling, self.choice
        if self.given_step is None and before is not None:
            is_hot = self._heat > (limits.max_temperature - 1) * self._count
            if is_hot and not self._climbed():
                self._retreat(before.step_size)
        scores: list[Score] = [
            partial(self._probe_score, seed, batch)
            for seed, batch in enumerate(self._stream.probed)
        ]
        try:
            found = probe(scores, self.state.position, self.policy)
        except RuntimeError:
            for seed, batch in enumerate(self._stream.probed):
                where = f"minibatch {seed + 1} of those looked at first"
                self._target.on(batch, seed=seed).refuse_missing_data(where)
            raise
        self.gradients += found.gradients
        choice = choose_step(found, steps, limits)
        if self.given_step is not None:
            choice = judge(found, steps, self.given_step, "user", limits)
        else:
            growth = math.inf if before is None else limits.max_growth * before.step_size
            if self._cap < min(choice.step_size, growth):
                choice = judge(found, steps, self._cap, "stability", limits)
            elif growth < choice.step_size:
                choice = judge(found, steps, growth, choice.limit, limits)
        self.choice = choice
        self._heat, self._count = 0.0, 0
        is_warm = self.transitions >= self.schedule.warmup
        self._anchor = None if is_warm else self.state.position
        self._restart(self.state.position)  # without the heat of a fall from far away

    @torch.no_grad()
    def _climbed(self) -> bool:
        """Return whether the log-density has risen in this window: chains that fall towards the
        posterior are hot, too."""
        assert self._anchor is not None
        rise = 0.0
        for seed, batch in enumerate(self._stream.probed[:4]):
            target = self._target.on(batch, seed=seed)
            before, after = (
                target.log_prob(self.frame.to_points(white)).mean().item()
                for white in (self._anchor, self.state.position)
            )
            rise += after - before
        return rise > 0

    def _retreat(self, step_size: float) -> None:
        """Return to where the window began, whose step was too long."""
        assert self._anchor is not None
        self._restart(self._anchor)
        self._cap = min(self._cap, step_size / 2)

    def _restart(self, position: Tensor) -> None:
        self.state = KERNELS[self.kernel].init(position, self._score)

    def _take(self, state: Any) -> None:
        """Move to a state; lost chains restart from other chains, in the warm-up with a shorter
        step."""
        lost = ~torch.stack([part.isfinite().all(-1) for part in state]).all(0)
        num_lost = int(lost.sum())
        is_warm = self.transitions >= self.schedule.warmup
        if num_lost == len(lost) and not is_warm and self.given_step is None:
            self.replaced += num_lost
            self._retreat(self._size())
            return
        if num_lost == len(lost):
            raise RuntimeError(
                f"all {num_lost} chains left the finite numbers at step {self.transitions}, of "
                f"size {self._size():.3g} in the frame. Cure: a better start, a shorter step_size, "
                "or float64"
            )
        if num_lost:
            good = (~lost).nonzero().squeeze(-1)
            chosen = good[torch.randint(len(good), (num_lost,), device=good.device)]
            fresh = KERNELS[self.kernel].init(state.position[chosen], self._score)
            state = type(state)(
                *(old.index_put((lost,), new) for old, new in zip(state, fresh, strict=True))
            )
            self.replaced += num_lost
            if is_warm:
                self.replaced_late += num_lost
            else:
                self._cap = self._size() / 2
        self.state = state
        self._heat += state.velocity.square().mean().item() - 1
        self._count += 1

    def _score(self, white: Tensor) -> tuple[Tensor, Tensor]:
        return self._score_of(self._target, white)

    def _probe_score(self, seed: int, batch: tuple, white: Tensor) -> tuple[Tensor, Tensor]:
        """The score of another minibatch; ``seed`` is for rows that a model draws itself."""
        return self._score_of(self._target.on(batch, seed=seed), white)

    def _score_of(self, target: Target, white: Tensor) -> tuple[Tensor, Tensor]:
        log_density, gradient = target.score(self.frame.to_points(white))
        # All rows count alike: a model scales the rows of a small minibatch by more.
        weight = self._share(target) / self._mean_share
        return weight * log_density, weight * self.frame.pull_back(gradient)

    def _share(self, target: Target) -> float:
        """Return the share of all rows that a minibatch has, up to a common factor."""
        return self._scales.first / self._scales.of(target.args)


def check_scaling(target: Target, stream: BatchStream, num_shares: int = 1) -> None:
    """Check that the model scales a minibatch to all data.

    :param num_shares: processes that have their own minibatches.
    :raises ValueError: if no observed site is scaled.
    :warns UserWarning: if plate and minibatches disagree about the number of rows.
    """
    batches = stream.epoch_length * num_shares
    if batches > 1 and not target.scaled:
        raise ValueError(
            f"the model takes each of {batches} minibatches for all data: no observed site is "
            "scaled. Cure: with pyro.plate('rows', number_of_all_rows, subsample_size=len(x)), or "
            "poutine.scale; of classifier and regressor, the number of all rows as num_data"
        )
    if target.subsampled is None or not any(stream.probed):
        return
    name, first_size, full_size = target.subsampled
    size = _mean_size(stream.probed[: stream.epoch_length], first_size)
    if not (batches - 1) * size < full_size < (batches + 1) * size:
        share = full_size / size / batches
        warn_user(
            f"plate '{name}' has {full_size} rows in all, but {batches} minibatches of {size:.4g} "
            f"make about {round(batches * size)}, so that the likelihood counts {share:.3g} times. "
            "Cure: the number of all rows as the plate's size"
        )


def _mean_size(batches: list[tuple], first_size: int) -> float:
    """Mean number of rows, by the part that has as many in the first minibatch as the plate."""
    rows = [num_rows(part) for part in batches[0]]
    if first_size not in rows:
        return first_size
    place = rows.index(first_size)
    return sum(num_rows(batch[place]) or 0 for batch in batches) / len(batches)
