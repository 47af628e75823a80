# SPDX-License-Identifier: Apache-2.0
"""Training one guide: plateau, decay, stop; and going on after a kill as if nothing had been."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.checks import refuse_missing_data
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.fitting.checkpoint import load_checkpoint, save_checkpoint
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.processes import is_first, loss_function, mean_over_processes, own_file
from pyro_implicit.fitting.schedule import Schedule
from pyro_implicit.fitting.trained_parameters import are_all_of_guide, trained_parameters
from pyro_implicit.infer import ImplicitELBO, InjectiveELBO
from pyro_implicit.infer.networks import NetworkELBO
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.printing import progress_bar
from pyro_implicit.runtime.random_stream import seeded

__all__ = ["TrainingInterrupted", "train"]


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during a training.

    :param losses: of its steps so far.
    """

    def __init__(self, losses: list[float]) -> None:
        super().__init__(f"after {len(losses)} steps")
        self.losses = losses


@dataclass
class _State:
    """All that a resumed run needs beside the parameters and the optimiser."""

    losses: list[float] = field(default_factory=list)
    decay_start: int | None = None
    finished: bool = False
    batches: dict[str, Any] | None = None
    held_out: dict[str, Any] | None = None


@in_turn
def train(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: Trace_ELBO,
    *args: Any,
    batches: BatchStream | None = None,
    held_out: HeldOut | None = None,
    schedule: Schedule | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool = True,
    name: str = "fit",
    max_seconds: float = math.inf,
    compile: CompileMode = "auto",
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Takes steps of Adam until the schedule ends; the guide is trained in place, and with it the
    parameters of the model (``pyro.param``).

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_implicit.infer import ImplicitELBO
    >>> def model(seed):
    ...     pyro.sample("x", dist.Normal(seed, 1.0))
    >>> options = {"schedule": Schedule(num_steps=5), "progress": False}
    >>> losses = train(model, AutoNormal(model), ImplicitELBO(4), seed=2.0, **options)
    >>> len(losses)
    5

    :param model: a Pyro model.
    :param guide: any guide of it.
    :param loss: any of Pyro's or this library's ELBOs.
    :param args: of model and guide, as ``kwargs``.
    :param batches: minibatches, each the arguments that follow ``args`` in one step.
    :param held_out: rows that are scored after each pass over ``batches``. Training ends when five
        passes brought nothing, or when it is over anyway, with the best parameters of all passes.
    :param schedule: number of steps and learning rates; by default those of
        :class:`~pyro_implicit.fitting.schedule.Schedule`.
    :param checkpoint: a folder with a file of this ``name``, from which a killed run goes on, to
        the same last bit.
    :param checkpoint_every: steps between two writings.
    :param progress: whether to show a bar.
    :param name: of the bar and the file.
    :param max_seconds: of wall time, in the second half of which the rate falls. A training that
        they end does not repeat to the last bit.
    :param compile: of the steps, for a loss of this library whose own ``compile`` is False; see
        :class:`~pyro_implicit.infer.ImplicitELBO`.
    :param model_kwargs: more keyword arguments of model and guide: those with a name of ours.
    :returns: the losses of all steps.
    :raises ValueError: if neither model nor guide has a parameter, and for a minibatch with an
        observation that is NaN.
    :raises RuntimeError: when fifty steps in a row, or all, have no finite loss.
    :raises TrainingInterrupted: by Ctrl-C, with the best parameters of ``held_out`` if it is given.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    with _compiled(loss, compile):
        return _train(
            model, guide, loss, args, kwargs, batches, held_out, schedule or Schedule(),
            checkpoint, checkpoint_every, progress, name, max_seconds,
        )  # fmt: skip


def _train(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: Trace_ELBO,
    args: tuple,
    kwargs: dict[str, Any],
    batches: BatchStream | None,
    held_out: HeldOut | None,
    schedule: Schedule,
    checkpoint: str | Path | None,
    checkpoint_every: int,
    progress: bool,
    name: str,
    max_seconds: float,
) -> list[float]:
    state = _State()
    shared = args
    if batches is not None:
        args = (*shared, *batches.probed[0])
    parameters = trained_parameters(model, guide, loss, args, kwargs)
    optimiser = torch.optim.Adam(list(parameters.values()), lr=schedule.lr)
    optimisers: dict[str, torch.optim.Optimizer] = {"": optimiser}
    if isinstance(loss, NetworkELBO):
        optimisers |= loss.optimisers
    buffers = dict(guide.named_buffers()) if isinstance(guide, torch.nn.Module) else {}
    # While parameters of the model move, an exact guide is exact for a posterior of today.
    may_stop = isinstance(loss, InjectiveELBO) and are_all_of_guide(guide, parameters, args, kwargs)
    evaluate = loss_function(loss, model, guide, parameters, buffers)
    device = next(iter(parameters.values())).device
    file = None if checkpoint is None else own_file(checkpoint, name)
    if file is not None and file.exists():
        load_checkpoint(file, state, parameters, optimisers, loss, buffers)
        if batches is not None and state.batches is not None:
            batches.restore(state.batches)
        if held_out is not None and state.held_out is not None:
            held_out.restore(state.held_out)
    first, last = len(state.losses), schedule.num_steps
    latest_decay = last - round(last * schedule.decay)
    began = time.perf_counter()
    bar = progress_bar(last, name, progress and is_first(), initial=first)
    try:
        while not state.finished:
            step = len(state.losses)
            if state.decay_start is None and (
                step >= latest_decay or schedule.stands_still(state.losses)
            ):
                state.decay_start = step
            decay_start = last if state.decay_start is None else state.decay_start
            clock = 0.0
            if math.isfinite(max_seconds):
                elapsed = mean_over_processes(time.perf_counter() - began, device)
                clock = elapsed / max(max_seconds, 1e-9)
            for group in optimiser.param_groups:
                group["lr"] = min(schedule.rate(step, decay_start), schedule.rate_by_clock(clock))
            if batches is not None:
                args = (*shared, *batches.next())
            state.losses.append(_step(evaluate, optimiser, schedule.clip_norm, args, kwargs))
            if batches is not None and math.isnan(state.losses[-1]):
                _refuse_missing_data(model, args, kwargs, batches)
            is_exact = may_stop and schedule.is_exact(state.losses, loss.num_particles)
            by_steps = step + 1 >= decay_start + round(last * schedule.decay)
            state.finished = is_exact or by_steps or clock >= 1
            _check_finite(state.losses, state.finished)
            if held_out is not None and batches is not None:
                if state.finished or (step + 1) % batches.epoch_length == 0:
                    state.finished |= held_out.judge(guide, parameters)
                if state.finished:
                    held_out.take_best(parameters)
            if file is not None and (state.finished or (step + 1) % checkpoint_every == 0):
                state.batches = None if batches is None else batches.state()
                state.held_out = None if held_out is None else held_out.state()
                save_checkpoint(file, state, parameters, optimisers, loss, buffers)
            bar.update()
            if step % 50 == 0:
                bar.set_postfix(loss=f"{state.losses[-1]:.3f}", refresh=False)
    except KeyboardInterrupt as interrupt:
        if held_out is not None:
            held_out.take_best(parameters)
        raise TrainingInterrupted(state.losses) from interrupt
    finally:
        bar.close()
        optimiser.zero_grad()  # a later SVI would add to them
    return state.losses


@contextlib.contextmanager
def _compiled(loss: Trace_ELBO, compile: CompileMode) -> Iterator[None]:
    """With the steps of a loss compiled, unless it has its own way."""
    if not isinstance(loss, ImplicitELBO) or loss.compile is not False:
        yield
        return
    loss.compile = compile
    try:
        yield
    finally:
        loss.compile = False


def _step(
    evaluate: Callable[..., Tensor],
    optimiser: torch.optim.Optimizer,
    clip_norm: float,
    args: Any,
    kwargs: Any,
) -> float:
    value = evaluate(*args, **kwargs)
    loss = mean_over_processes(value.item(), value.device)
    if not math.isfinite(loss):
        return math.nan
    optimiser.zero_grad()
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    value.backward(inputs=parameters)  # nothing is left behind in parameters that stay as they are
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    if norm.isfinite():
        optimiser.step()
    return loss


def _refuse_missing_data(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], batches: BatchStream
) -> None:
    """Look at the minibatch of a skipped step.

    :raises ValueError: if an observation is NaN, naming the site and the minibatch.
    """
    try:
        with seeded(0), poutine.block(), pyro.validation_enabled(False):
            trace = poutine.trace(model).get_trace(*args, **kwargs)
    except IMPOSSIBLE:  # at this draw of the prior
        return
    refuse_missing_data(trace, f" in {batches.where}")


def _check_finite(losses: list[float], finished: bool) -> None:
    number = min(50, len(losses))
    if (finished or number == 50) and all(math.isnan(loss) for loss in losses[-number:]):
        raise RuntimeError(
            f"the loss was not finite for {number} steps in a row, the last of them step "
            f"{len(losses)}. "
            'Cure: run the ELBO with nonfinite="raise", which names the term; a lower lr, or '
            "another init_loc_fn"
        )
