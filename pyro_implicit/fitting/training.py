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

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.progress import progress_bar
from pyro_implicit.density.turns import in_turn
from pyro_implicit.fitting.checkpoint import load_checkpoint, save_checkpoint
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.infer import ImplicitELBO, InjectiveELBO
from pyro_implicit.infer.engine.networks import NetworkELBO
from pyro_implicit.mcmc.batch_stream import BatchStream

__all__ = ["Schedule", "train"]


@dataclass(frozen=True)
class Schedule:
    """When to slow down and when to stop.

    :param num_steps: at most.
    :param lr: Adam's learning rate, until the smoothed loss stands still; then it falls to zero
        along a cosine in ``num_steps * decay`` steps.
    :param decay: that share. With 1 the rate falls from the first step on.
    :param window: steps whose mean is one smoothed loss. It stands still when the last two did
        not fall below the lowest before them by more than their standard error.
    :param max_gap: an exact density's loss may stop at once when the guide is so near, in nats:
        half the variance of the log-weights, by the spread of the last 25 losses.
    :param clip_norm: gradients are cut to this norm.
    """

    num_steps: int = 3000
    lr: float = 0.01
    decay: float = 0.5
    window: int = 100
    max_gap: float = 0.0005
    clip_norm: float = 10.0

    def rate(self, step: int, decay_start: int) -> float:
        """The learning rate of a step whose decay began, or will not have begun, at another."""
        return self._fall((step - decay_start) / max(1, round(self.num_steps * self.decay)))

    def rate_by_clock(self, share: float) -> float:
        """The highest learning rate when this share of the time is over."""
        return self._fall(2 * share - 1)

    def _fall(self, progress: float) -> float:
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def stands_still(self, losses: list[float]) -> bool:
        """Whether the smoothed loss has stopped falling; asked at the end of a window."""
        if len(losses) % self.window or len(losses) < 4 * self.window:
            return False
        windows = torch.tensor(losses, dtype=torch.float64).reshape(-1, self.window)
        means = windows.nanmean(-1)
        latest = windows[-2:].flatten()
        error = latest[latest.isfinite()].std() / math.sqrt(2 * self.window)
        return bool(means[-2:].mean() > means[:-2].min() - error)

    def is_exact(self, losses: list[float], num_particles: int) -> bool:
        """Whether an exact density's loss shows the guide to be the posterior."""
        if len(losses) % 25 or not losses:
            return False
        spread = torch.tensor(losses[-25:], dtype=torch.float64).var()
        return bool(0.5 * num_particles * spread < self.max_gap)


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

    :param loss: any of Pyro's or this library's ELBOs.
    :param args: of model and guide, as ``kwargs``.
    :param batches: minibatches, each the arguments that follow ``args`` in one step.
    :param held_out: rows that are scored after each pass over ``batches``. Training ends when five
        passes brought nothing, or when it is over anyway, with the best parameters of all passes.
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
    :raises ValueError: if neither model nor guide has a parameter.
    :raises RuntimeError: when fifty steps in a row have no finite loss.
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
    parameters = _parameters(model, guide, loss, args, kwargs)
    optimiser = torch.optim.Adam(list(parameters.values()), lr=schedule.lr)
    optimisers: dict[str, torch.optim.Optimizer] = {"": optimiser}
    if isinstance(loss, NetworkELBO):
        optimisers |= loss.optimisers
    buffers = dict(guide.named_buffers()) if isinstance(guide, torch.nn.Module) else {}
    # While parameters of the model move, an exact guide is exact for a posterior of today.
    may_stop = isinstance(loss, InjectiveELBO) and _all_of_guide(guide, parameters, args, kwargs)
    file = None if checkpoint is None else Path(checkpoint) / f"{name}.pt"
    if file is not None and file.exists():
        load_checkpoint(file, state, parameters, optimisers, loss, buffers)
        if batches is not None and state.batches is not None:
            batches.restore(state.batches)
        if held_out is not None and state.held_out is not None:
            held_out.restore(state.held_out)
    first, last = len(state.losses), schedule.num_steps
    latest_decay = last - round(last * schedule.decay)
    began = time.perf_counter()
    bar = progress_bar(last, name, progress, initial=first)
    while not state.finished:
        step = len(state.losses)
        if state.decay_start is None and (
            step >= latest_decay or schedule.stands_still(state.losses)
        ):
            state.decay_start = step
        decay_start = last if state.decay_start is None else state.decay_start
        clock = (time.perf_counter() - began) / max(max_seconds, 1e-9)
        for group in optimiser.param_groups:
            group["lr"] = min(schedule.rate(step, decay_start), schedule.rate_by_clock(clock))
        if batches is not None:
            args = (*shared, *batches.next())
        state.losses.append(_step(model, guide, loss, optimiser, schedule.clip_norm, args, kwargs))
        _check_finite(state.losses)
        is_exact = may_stop and schedule.is_exact(state.losses, loss.num_particles)
        by_steps = step + 1 >= decay_start + round(last * schedule.decay)
        state.finished = is_exact or by_steps or clock >= 1
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


def _parameters(
    model: Callable[..., Any], guide: Callable[..., Any], loss: Trace_ELBO, args: Any, kwargs: Any
) -> dict[str, Tensor]:
    """All that one evaluation of the loss touches, by its name in Pyro's parameter store.

    The names of guide and loss are replaced: they may be others when training is resumed.
    """
    with poutine.trace(param_only=True) as capture:
        value = loss.differentiable_loss(model, guide, *args, **kwargs)
    parameters = [site["value"].unconstrained() for _, site in _params(capture.trace)]
    if not parameters:
        raise ValueError(
            "neither model nor guide has a parameter to train. Cure: a guide with pyro.param or "
            "one of the autoguides"
        )
    # Backwards too: some ELBOs make the optimisers of their networks on that way.
    value.backward(inputs=parameters)
    owners = {
        getattr(guide, "_pyro_name", ""): "<guide>.",
        loss.store_name if isinstance(loss, NetworkELBO) else "": "<loss>.",
    }

    def own(name: str) -> str:
        for prefix, owner in owners.items():
            if prefix and name.startswith(f"{prefix}."):
                return owner + name.removeprefix(f"{prefix}.")
        return name

    return {own(name): site["value"].unconstrained() for name, site in _params(capture.trace)}


def _params(trace: poutine.Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "param")


def _all_of_guide(
    guide: Callable[..., Any], parameters: dict[str, Tensor], args: Any, kwargs: Any
) -> bool:
    """Whether all parameters are the guide's, and none the model's."""
    with poutine.block(), poutine.trace(param_only=True) as capture:
        guide(*args, **kwargs)
    own = {id(site["value"].unconstrained()) for _, site in _params(capture.trace)}
    return all(id(parameter) in own for parameter in parameters.values())


def _step(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    loss: Trace_ELBO,
    optimiser: torch.optim.Optimizer,
    clip_norm: float,
    args: Any,
    kwargs: Any,
) -> float:
    value = loss.differentiable_loss(model, guide, *args, **kwargs)
    if not math.isfinite(value.item()):
        return math.nan
    optimiser.zero_grad()
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    value.backward(inputs=parameters)  # nothing is left behind in parameters that stay as they are
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    if norm.isfinite():
        optimiser.step()
    return value.item()


def _check_finite(losses: list[float]) -> None:
    if len(losses) >= 50 and all(math.isnan(loss) for loss in losses[-50:]):
        raise RuntimeError(
            f"the loss was not finite for 50 steps in a row, the last of them step {len(losses)}. "
            'Cure: run the ELBO with nonfinite="raise", which names the term; a lower lr, or '
            "another init_loc_fn"
        )
