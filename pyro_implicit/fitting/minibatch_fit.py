# SPDX-License-Identifier: Apache-2.0
"""``fit`` for few latent variables and minibatches: each evaluation is a pass over all rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.pass_target import RowsTarget
from pyro_implicit.density.policy import GROUPS, PILOT
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import frame_of_draws
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.passes import (
    OnePass,
    PassStages,
    count_modes,
    is_late,
    pilot_modes,
    use_gaussians,
)
from pyro_implicit.fitting.policy import MinibatchPolicy
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.minibatches import BatchStream, num_rows
from pyro_implicit.runtime.processes import any_process, common_seed, num_processes
from pyro_implicit.runtime.trees import leaves_of

__all__ = ["fit_by_passes"]

Batches = Iterable[tuple]

NO_TIME = "max_seconds is too short for passes over all rows"


def fit_by_passes(stages: Stages, target: Target, refine: Literal["auto"] | bool) -> bool:
    """Infer the latent variables from the log-density of all rows, a sum over minibatches.

    The stages are: **search**, for the modes of a few thousand rows; **gaussian**, Newton steps by
    passes over all rows; **correct**, importance weights of the Gaussian at the mode; and
    **refine**, chains if the weights are uneven and all rows are cheap enough.

    :param target: the posterior of the first minibatch.
    :param refine: whether chains run: if necessary, always or never.
    :returns: whether the result is set; otherwise a guide has to be trained by minibatches.
    """
    if model_parameters(target):  # the density does not determine them
        return False
    with seeded(common_seed(), target.init_loc.device):  # all processes decide alike
        found = _search(stages, target)
        if found is not None:
            _set_result(stages, found, refine)
        return found is not None


class _Search(NamedTuple):
    """The posterior of the first rows and its modes, and the posterior of all rows."""

    pilot: RowsTarget
    modes: Modes
    whole: RowsTarget


def _search(stages: Stages, target: Target) -> _Search | None:
    """Search for the modes of the first rows; None if passes over all rows fail or are too slow."""
    policy, batches, is_slow = stages.policy.minibatch, stages.batches, False
    assert batches is not None
    with stages.result.attempt("search") as line:
        stream = OnePass(batches)
        parts = _read(stream, policy)
        rows = RowsTarget(target, parts or stream)
        pilot = rows.with_batches(_first_rows(rows, policy))
        modes = pilot_modes(pilot, stages, policy)
        line.outcome = f"{count_modes(modes)} of {pilot.num_units} rows"
        candidates: list[Batches] = [parts or stream]
        if parts and num_processes() == 1:  # an error of one process would stop the others
            candidates.insert(0, _joined(parts))
        points = torch.stack([modes.loc[0], modes.loc[0] + modes.scale_tril[0].sum(-1)])
        whole, noise = _first_sound(rows, stream, candidates, points)
        is_slow = whole is not None and _is_too_slow(whole, points, stages)
        if whole is not None and not is_slow:
            return _Search(pilot, modes, whole)
        reason = NO_TIME if is_slow else f"two passes differ by {noise:.2g} nats"
        line.outcome += f"; {reason}: a guide is trained by minibatches instead"
    _warn_of_training(batches, is_slow)
    return None


def _set_result(stages: Stages, search: _Search, refine: Literal["auto"] | bool) -> None:
    """Climb to the modes of all rows, weigh the draws of their Gaussians, and run chains."""
    result, policy = stages.result, stages.policy.minibatch
    pilot, modes, whole = search
    passes = PassStages(stages, whole, policy, "the latent variables")
    with result.stage("gaussian") as line:
        whole.num_passes = 0
        line.outcome = "of the search, which had all rows"
        # A search that max_seconds ends may not have reached the top.
        if pilot.num_units < whole.num_units or math.isfinite(stages.limit.end):
            modes = passes.climb_all(modes)
            count = f"{whole.num_passes} passes over {whole.num_units} rows"
            line.outcome = f"{count}{passes.note}"
        result.num_modes, result.modes, result.passes = len(modes.loc), modes.loc, whole
        if whole.subsampled is not None:
            name, _, full_size = whole.subsampled
            passes.warn_of_missing(name, full_size)
        use_gaussians(stages, modes)
    draws, weights = passes.weigh(modes)
    if len(modes.loc) == 1:
        use_gaussians(stages, _gaussian(draws, modes))
    result.draws = passes.stored(draws, weights)
    is_sound = result.draws.settled
    can_chain = not is_sound or whole.num_units <= policy.most_chained
    if weights is not None and can_chain and (refine is True or (refine and not is_sound)):
        result.refined = passes.refine(draws, weights)
        result.draws = result.draws if result.refined is None else None
    if stages.held_out is not None:
        score = stages.held_out(result.posterior)
        result.stages[-1].outcome += f"; held-out NLL {score:.4g}"


def _warn_of_training(batches: BatchStream, is_slow: bool) -> None:
    """Warn that no passes are made, if that may surprise the user."""
    why = ""
    if is_slow:
        why = f"{NO_TIME}. Cure: a larger max_seconds"
    elif getattr(batches.batches, "drop_last", False):
        why = "with drop_last=True each pass leaves out other rows, so passes do not determine the "
        why += "posterior. Cure: drop_last=False"
    if why:
        warn_user(f"fit trains a guide by minibatches, and nothing checks its draws: {why}")


def _gaussian(draws: Tensor, modes: Modes) -> Modes:
    """Return the Gaussian with the moments of draws."""
    frame = frame_of_draws(draws)
    assert frame.scale_tril is not None
    return Modes(frame.loc[None], frame.scale_tril[None], modes.elbo)


def _is_too_slow(target: RowsTarget, points: Tensor, stages: Stages) -> bool:
    """Return whether ``max_seconds`` leaves no time for a few passes."""
    if math.isinf(stages.limit.end):
        return False
    began = time.perf_counter()
    target.sums(points)  # the first pass of a target takes longer
    took = time.perf_counter() - began
    return is_late(stages.limit, points, stages.policy.minibatch.least_passes * took)


def _read(stream: OnePass, policy: MinibatchPolicy) -> list[tuple]:
    """Return the minibatches of one pass; an empty list if they need too much memory."""
    found, size = [], 0
    for batch in stream:
        found.append(batch)
        size += sum(getattr(leaf, "nbytes", 0) for leaf in leaves_of(batch))
        if size > policy.most_bytes:
            return []
    return found


def _num_rows(batch: tuple) -> int:
    return max((num_rows(part) or 1 for part in batch), default=1)


def _first_rows(target: RowsTarget, policy: MinibatchPolicy) -> list[tuple]:
    """Return minibatches with the rows of the first search, or a part of the first minibatch."""
    number = max(policy.num_pilot, policy.pilot_per_dim * target.latent_dim)
    found: list[tuple] = []
    for batch in target.batches:
        found.append(batch)
        if sum(map(_num_rows, found)) >= number:
            break
    size = _num_rows(found[0])
    if any_process(size <= number, target.init_loc.device):  # all decide alike
        return found
    few = tuple(
        part[:number] if isinstance(part, Tensor) and num_rows(part) == size else part
        for part in found[0]
    )
    is_sound = target.with_batches([few]).sums(target.init_loc[None]).isfinite().all()
    return [few] if is_sound else found


def _joined(batches: list[tuple]) -> list[tuple]:
    """Join small minibatches to larger ones; their densities have to be compared."""
    groups: list[list[tuple]] = []
    for batch in batches:
        if not groups or sum(map(_num_rows, groups[-1])) >= GROUPS.rows_of_run:
            groups.append([])
        groups[-1].append(batch)
    return [_join(group) for group in groups]


def _join(batches: list[tuple]) -> tuple:
    """Concatenate the arguments that have a row for each observation; take others from the first
    minibatch."""
    if len(batches) == 1:
        return batches[0]
    sizes = [_num_rows(batch) for batch in batches]

    def join(parts: tuple) -> Any:
        have_rows = [num_rows(part) for part in parts] == sizes
        return torch.cat(parts) if have_rows and isinstance(parts[0], Tensor) else parts[0]

    return tuple(map(join, zip(*batches, strict=True)))


def _first_sound(
    target: RowsTarget, stream: OnePass, candidates: list[Batches], points: Tensor
) -> tuple[RowsTarget | None, float]:
    """Return the log-density of the first candidate that another pass confirms, if any does, and
    the difference of the passes in nats.

    Passes differ if a loader draws or changes rows, or a model draws random numbers; joined
    minibatches differ if the model treats rows differently or depends on their number.
    """

    def rise(batches: Batches) -> tuple[float, RowsTarget]:
        found = target.with_batches(batches)
        low, high = found.sums(points).tolist()
        return high - low, found

    expected, _ = rise(stream)
    noise = math.inf
    for batches in candidates:
        with suppress(*IMPOSSIBLE):
            value, found = rise(batches)
            noise = abs(value - expected)
            if noise <= PILOT.max_noise:
                return found, noise
    return None, noise
