# SPDX-License-Identifier: Apache-2.0
"""Training of one guide, with minibatches, validation rows and checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMessenger
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.checks.observations import refuse_missing_data
from pyro_implicit.density.model import SubsampledError, refuse_subsampling
from pyro_implicit.density.scales import DataScales, trace_once
from pyro_implicit.fitting.checkpoint import TrainingCheckpoint, loss_of_processes, own_file
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.parameters import are_all_of_guide, trained_parameters
from pyro_implicit.fitting.policy import DEFAULT, DENORMAL_MARGIN, Schedule
from pyro_implicit.guides import AutoAmortized, AutoEnsemble, AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_implicit import has_exact_density
from pyro_implicit.infer import (
    KIVI_ELBO,
    LIVI_ELBO,
    ImplicitELBO,
    InjectiveELBO,
    NonFiniteError,
)
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.mcmc.teaching import descend
from pyro_implicit.runtime.global_state import (
    in_turn,
    random_streams,
    restore_random_streams,
    with_seed,
)
from pyro_implicit.runtime.messages import counted, refuse_nonpositive, warn_user
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.processes import (
    any_process,
    is_first,
    mean_over_processes,
    num_processes,
)
from pyro_implicit.runtime.progress import Callback, new_stage, watch, watching

__all__ = ["TrainingInterrupted", "default_loss", "train"]


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during a training.

    :param losses: the losses of the steps so far.
    """

    def __init__(self, losses: list[float]) -> None:
        super().__init__(f"after {len(losses)} steps")
        self.losses = losses


def _decay_steps(schedule: Schedule) -> int:
    return round(schedule.num_steps * schedule.decay)


@dataclass
class _State:
    losses: list[float] = field(default_factory=list)
    decay_start: int | None = None
    norm: float = 0.0
    finished: bool = False
    batches: dict[str, Any] | None = None
    held_out: dict[str, Any] | None = None

    def note_norm(self, norm: float, memory: float) -> None:
        """Update the running mean of the norms of gradients."""
        if math.isfinite(norm):
            self.norm += (1 - memory if self.norm else 1.0) * (norm - self.norm)

    def begin_decay(self, schedule: Schedule) -> int:
        """Return the step at which the rate begins to fall: this one if the loss stands still."""
        step, latest = len(self.losses), schedule.num_steps - _decay_steps(schedule)
        if self.decay_start is None and (step >= latest or schedule.stands_still(self.losses)):
            self.decay_start = step
        return schedule.num_steps if self.decay_start is None else self.decay_start


@dataclass
class _Stepper:
    """Takes the steps of a training, each with the next minibatch if there are any."""

    model: Callable[..., Any]
    evaluate: Callable[..., Tensor]
    optimisers: Mapping[str, torch.optim.Optimizer]
    schedule: Schedule
    batches: BatchStream | None
    scales: DataScales | None
    args: tuple
    kwargs: dict[str, Any]

    def take(self, state: _State, rate: float) -> float:
        """Take a step and note it in the state; return its loss."""
        schedule, optimiser, args = self.schedule, self.optimisers[""], self.args
        for group in optimiser.param_groups:
            group["lr"] = rate
        weight, clip_norm = 1.0, schedule.clip_norm
        if self.batches is not None and self.scales is not None:
            args = (*args, *self.batches.next())
            weight = self.scales.first / self.scales.of(args)
            # With a fixed limit, training would end at the median gradient's zero.
            clip_norm *= max(1.0, state.norm)
        value, norm = _step(self.evaluate, optimiser, weight, clip_norm, args, self.kwargs)
        state.note_norm(min(norm, clip_norm), schedule.norm_memory)
        state.losses.append(value)
        if len(state.losses) % schedule.window == 0:
            _round_to_zero(self.optimisers.values())
        if self.batches is not None and math.isnan(value):
            _refuse_missing_data(self.model, args, self.kwargs, self.batches)
        return value


@in_turn
@with_seed
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
    callbacks: Iterable[Callback] = (),
    name: str = "fit",
    max_seconds: float = math.inf,
    seed: int | None = None,
    compile: CompileMode = "auto",
    is_enough: Callable[[], bool] | None = None,
    max_nonfinite: int = DEFAULT.training.max_nonfinite,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[float]:
    """Train a guide in place by Adam, together with the parameters of the model (``pyro.param``).

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_implicit.fitting import Schedule
    >>> from pyro_implicit.infer import ImplicitELBO
    >>> def model(mean):
    ...     pyro.sample("x", dist.Normal(mean, 1.0))
    >>> options = {"schedule": Schedule(num_steps=5), "progress": False}
    >>> losses = train(model, AutoNormal(model), ImplicitELBO(4), mean=2.0, **options)
    >>> len(losses)
    5

    :param model: a Pyro model.
    :param guide: any guide of the model.
    :param loss: an ELBO of Pyro or of this library.
    :param args: positional arguments of model and guide; ``kwargs`` are keyword arguments.
    :param batches: minibatches; each is the arguments that follow ``args`` in one step.
    :param held_out: rows that are scored after each epoch, or after ``held_out.interval`` steps.
        Training ends after five scores without a better one, and restores the parameters of the
        best one.
    :param schedule: the number of steps and the learning rates; by default a
        :class:`~pyro_implicit.fitting.Schedule` without arguments.
    :param checkpoint: a folder for a file of this ``name``. A run that was killed resumes from it
        and ends with the same parameters: bit-identical with ``compile=False``, else up to
        rounding.
    :param checkpoint_every: the number of steps between two writes.
    :param progress: whether to show a progress bar.
    :param callbacks: observers of the steps, which may end the training
        (:mod:`pyro_implicit.callbacks`); with several processes, in each of them.
    :param name: the name of bar and file.
    :param max_seconds: the limit of wall time; in its second half the learning rate falls. A
        training that it ends is not reproducible.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param compile: how steps are compiled, for a loss of this library with ``compile=False``; see
        :class:`~pyro_implicit.infer.ImplicitELBO`.
    :param is_enough: is called after 20, 40, 80, ... steps (``Schedule.first_look``); the training
        ends if it returns True.
    :param max_nonfinite: steps in a row without a finite loss and gradient that end the training.
    :param model_kwargs: keyword arguments of model and guide that have the name of an argument
        here.
    :returns: the loss of each step.
    :raises ValueError: for a ``max_seconds`` that is not positive, if neither model nor guide has a
        parameter, and for a minibatch with an observation that is NaN.
    :raises RuntimeError: if ``max_nonfinite`` steps in a row, or all, have no finite loss and
        gradient.
    :raises TrainingInterrupted: for Ctrl-C, with the best parameters of ``held_out``, if given.
    """
    refuse_nonpositive(max_seconds=max_seconds)
    began = time.perf_counter()
    kwargs, schedule = {**kwargs, **(model_kwargs or {})}, schedule or Schedule()
    shows_bar = progress and is_first()
    with watching(shows_bar, callbacks), new_stage(name) as line, _compiled(loss, compile):
        first = args if batches is None else (*args, *batches.probed[0])
        parameters = trained_parameters(model, guide, loss, first, kwargs)
        scales = None if batches is None else DataScales(model, first, kwargs)
        optimiser = _adam(list(parameters.values()), schedule.lr)
        optimisers: dict[str, torch.optim.Optimizer] = {"": optimiser}
        if isinstance(loss, NetworkELBO):
            optimisers |= loss.optimisers
        buffers = _fixed_tensors(guide) if isinstance(guide, torch.nn.Module) else {}
        # While parameters of the model change, so does the posterior.
        may_stop = isinstance(loss, InjectiveELBO) and are_all_of_guide(
            guide, parameters, first, kwargs
        )
        evaluate: Callable[..., Tensor] = partial(loss.differentiable_loss, model, guide)
        if num_processes() > 1:
            evaluate = loss_of_processes(evaluate, loss, parameters, buffers)
        stepper = _Stepper(model, evaluate, optimisers, schedule, batches, scales, args, kwargs)
        device, state = next(iter(parameters.values())).device, _State()
        terms = partial(_nonfinite_terms, loss, model, guide, first, kwargs)
        stored = TrainingCheckpoint(state, parameters, optimisers, loss, buffers)
        file = None if checkpoint is None else own_file(checkpoint, name)
        if file is not None and file.exists():
            stored.load(file)
            if batches is not None and state.batches is not None:
                batches.restore(state.batches)
            if held_out is not None and state.held_out is not None:
                held_out.restore(state.held_out)
        try:
            with watch(name, schedule.num_steps, len(state.losses)) as watched:
                while not state.finished:
                    decay_start = state.begin_decay(schedule)
                    clock = _share_of_time(began, max_seconds, device)
                    rate = schedule.rate(len(state.losses), decay_start)
                    value = stepper.take(state, min(rate, schedule.rate_by_clock(clock)))
                    steps = len(state.losses)
                    watched.step(values=partial(dict, loss=value))
                    stops = any_process(watched.stopped, device)
                    is_exact = may_stop and schedule.is_exact(state.losses, loss.num_particles)
                    by_steps = steps >= decay_start + _decay_steps(schedule)
                    state.finished = is_exact or by_steps or clock >= 1 or stops
                    if is_enough is not None and not state.finished and schedule.is_look(steps):
                        state.finished = _looks_enough(is_enough)
                    _check_finite(state.losses, state.finished, max_nonfinite, terms)
                    if held_out is not None:
                        epoch = 1 if batches is None else batches.epoch_length
                        _score(held_out, state, epoch, guide, parameters)
                    if file is not None and (state.finished or steps % checkpoint_every == 0):
                        state.batches = None if batches is None else batches.state()
                        state.held_out = None if held_out is None else held_out.state()
                        stored.save(file)
        except KeyboardInterrupt as interrupt:
            if held_out is not None:
                held_out.take_best(parameters)
            raise TrainingInterrupted(state.losses) from interrupt
        finally:
            optimiser.zero_grad()  # a later SVI would add to them
            line.outcome = counted(len(state.losses), "step")
        return state.losses


def _adam(parameters: list[Tensor], lr: float) -> torch.optim.Adam:
    """Make an optimiser, with one kernel for a step where that is possible.

    On a CPU this kernel ignores strides: the views of a tensor would be written to at other places.
    """
    devices = {parameter.device for parameter in parameters}
    is_fused = len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda")
    is_fused &= all(one.is_contiguous() and one.is_floating_point() for one in parameters)
    return torch.optim.Adam(parameters, lr=lr, fused=is_fused)


def _fixed_tensors(guide: torch.nn.Module) -> dict[str, Tensor]:
    """Return buffers and frozen parameters by name, such as the frame of a neural sampler."""
    frozen = {name: one for name, one in guide.named_parameters() if not one.requires_grad}
    return {**dict(guide.named_buffers()), **frozen}


def _share_of_time(began: float, max_seconds: float, device: torch.device) -> float:
    """Return the share of the time limit that is over, the same in all processes."""
    if math.isinf(max_seconds):
        return 0.0
    return mean_over_processes(time.perf_counter() - began, device) / max_seconds


def _score(
    held_out: HeldOut, state: _State, epoch: int, guide: Callable[..., Any], parameters: Any
) -> None:
    """Score held-out rows after an epoch or interval; a training ends at the best parameters."""
    steps = len(state.losses)
    if state.finished or steps % (held_out.interval or epoch) == 0:
        held_out.num_steps = steps
        state.finished |= held_out.judge(guide, parameters)
    if state.finished:
        held_out.take_best(parameters)


def _looks_enough(is_enough: Callable[[], bool]) -> bool:
    """Ask whether a training may end. The question does not change a training that continues."""
    streams = random_streams()
    found = is_enough()
    if not found:
        restore_random_streams(streams)
    return found


@torch.no_grad()
def _round_to_zero(optimisers: Iterable[torch.optim.Optimizer]) -> None:
    """Set parameters and their running means to zero before they become denormal.

    A prior pulls weights without data to zero, such as those of black pixels, and products with
    denormal numbers take ten times as long: 101 ms instead of 12 for a step of a network of
    784-400-400-10 units after 44,000 steps.
    """
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                means = optimiser.state.get(parameter, {}).values()
                for value in (parameter, *means):
                    if isinstance(value, Tensor) and value.is_floating_point():
                        least = DENORMAL_MARGIN * torch.finfo(value.dtype).tiny
                        value.masked_fill_(value.abs() < least, 0.0)


@contextlib.contextmanager
def _compiled(loss: Trace_ELBO, compile: CompileMode) -> Iterator[None]:
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
    weight: float,
    clip_norm: float,
    args: Any,
    kwargs: Any,
) -> tuple[float, float]:
    """Take a step, and return the loss and the norm of its weighted gradient; NaN without one."""
    value = evaluate(*args, **kwargs)
    loss = mean_over_processes(value.item(), value.device)
    if not math.isfinite(loss):
        return math.nan, math.nan
    norm = descend(weight * value, optimiser, clip_norm)
    return (loss, norm) if math.isfinite(norm) else (math.nan, math.nan)


def _refuse_missing_data(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], batches: BatchStream
) -> None:
    if (trace := trace_once(model, args, kwargs)) is not None:
        refuse_missing_data(trace, f" in {batches.where}")


def _nonfinite_terms(loss: Any, model: Any, guide: Any, args: tuple, kwargs: Any) -> str:
    """Name the terms of another loss that are not finite; empty if there are none."""
    if not isinstance(loss, ImplicitELBO):
        return ""
    before, loss.nonfinite = loss.nonfinite, "raise"
    try:
        loss.differentiable_loss(model, guide, *args, **kwargs)
    except NonFiniteError as error:
        return str(error).partition(": ")[2].partition(". Cure")[0]
    except Exception:  # the model may raise anything; then no term is named
        return ""
    finally:
        loss.nonfinite = before
    return ""


def _check_finite(losses: list[float], finished: bool, most: int, terms: Callable[[], str]) -> None:
    number = min(most, len(losses))
    if (finished or number == most) and all(math.isnan(loss) for loss in losses[-number:]):
        found = terms()
        raise RuntimeError(
            f"the loss or its gradient was not finite for {number} steps in a row, up to step "
            f"{len(losses)}{f' ({found})' if found else ''}. Cure: a model whose log-density is "
            "finite at its draws, a lower lr, or a guide with another init_loc_fn"
        )


def default_loss(
    guide: Callable[..., Any],
    num_particles: int,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trace_ELBO:
    """Return the ELBO that ``fit`` uses for a guide.

    ============================================== ==================================
    guide                                          ELBO
    ============================================== ==================================
    :class:`AutoSemiImplicit`                      :class:`LIVI_ELBO`
    :class:`AutoImplicit` with an exact density    :class:`InjectiveELBO`
    another :class:`AutoImplicit`                  :class:`KIVI_ELBO`
    ``AutoGuideList`` with an implicit part        ``LIVI_ELBO`` if all implicit parts are
                                                   semi-implicit, else ``KIVI_ELBO``
    :class:`AutoAmortized`                         ``LIVI_ELBO`` if semi-implicit
    Pyro's ``AutoMessenger``                       :class:`ImplicitELBO` of at most 8 particles
    every other guide                              :class:`ImplicitELBO`
    ============================================== ==================================

    The exact density has coverage if the model has all data. ``KIVI_ELBO`` only needs draws of the
    generator: without an exact density, a Jacobian would count folds as entropy. An ``AutoDelta``
    has one particle, because its draws are equal, and an :class:`AutoEnsemble` has one for each
    member.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> type(default_loss(AutoSemiImplicit(model), 8)).__name__
    'LIVI_ELBO'
    >>> type(default_loss(AutoImplicit(model), 8)).__name__
    'KIVI_ELBO'

    :param guide: a guide; an :class:`AutoImplicit` that was never called is called once.
    :param num_particles: the number of particles of the ELBO.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :param model_kwargs: keyword arguments of the model that have the name of an argument here.
    :warns UserWarning: for a copy of a guide, whose coverage is 0 because its model is unknown.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    options: dict[str, Any] = {"nonfinite": "skip"}
    if isinstance(guide, AutoDelta):
        return ImplicitELBO(1, **options)
    if isinstance(guide, AutoEnsemble):
        return ImplicitELBO(guide.num_members, **options)
    parts = list(guide) if isinstance(guide, AutoGuideList) else [guide]
    implicit = [part for part in parts if isinstance(part, AutoImplicit)]
    if implicit and all(isinstance(part, AutoSemiImplicit) for part in implicit):
        return LIVI_ELBO(num_particles, **options)
    if isinstance(guide, (AutoAmortized, AutoImplicit)) and guide.prototype_trace is None:
        with poutine.block():
            guide(*args, **kwargs)
    if isinstance(guide, AutoImplicit) and has_exact_density(guide):
        coverage = 0.0 if _subsamples(guide, args, kwargs) else 1.0
        return InjectiveELBO(num_particles, coverage=coverage, **options)
    if isinstance(guide, AutoAmortized) and guide.is_semi_implicit:
        return LIVI_ELBO(num_particles, **options)
    if implicit:
        return KIVI_ELBO(num_particles, **options)
    if isinstance(guide, AutoMessenger):  # whose draws are not vectorised
        num_particles = min(num_particles, DEFAULT.training.few_particles)
    return ImplicitELBO(num_particles, **options)


def _subsamples(guide: AutoImplicit, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the guide has parameters of rows, or its model subsamples its data or is
    unknown, as that of a copy."""
    if hasattr(guide, "rows"):
        return True
    if vars(guide)["_model"] is None:
        warn_user(
            "a copy of a guide has no model, so default_loss cannot tell whether the model "
            "subsamples its data, and InjectiveELBO has coverage 0. Cure: the original guide, or "
            "InjectiveELBO(num_particles, coverage=1.0) if the model has all data"
        )
        return True
    with poutine.block(), pyro.validation_enabled(False):  # draws of a prior may be impossible
        trace = poutine.trace(guide.model).get_trace(*args, **kwargs)
    try:
        refuse_subsampling(trace, "coverage")
    except SubsampledError:
        return True
    return False
