# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients from traces: where they are no numbers, and by a recording of a step."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.compiled import CompileMode, Same, check_mode, is_tracing
from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import DiscreteSum
from pyro_implicit.infer.engine.recording import Evaluation, TracedSteps
from pyro_implicit.infer.engine.traces import (
    NonFiniteError,
    Particles,
    apply_weights,
    check_gradients,
    first_run,
    leave_out_impossible,
    loss_and_surrogate,
    nonfinite_terms,
    refuse_nonfinite,
)
from pyro_implicit.runtime.locks import refuse_outer_plates
from pyro_implicit.runtime.sites import graph_leaves, unconstrained
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = [
    "CarriedMemory",
    "ElboState",
    "Pair",
    "SIMPLE",
    "StatefulELBO",
    "StepELBO",
    "noting_memory",
]


SIMPLE = (bool, int, float, str, type(None))

_WEIGHTS = ("prior_weight", "entropy_weight", "inverse_temperature")
_COUNTERS = ("num_steps_taken", "num_skipped", "num_left_out")


Given = ParamSpec("Given")
Result = TypeVar("Result")


class _ELBO(Protocol):
    num_particles: int
    _memory_cure: Any


Owner = TypeVar("Owner", bound=_ELBO)


def noting_memory(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """A step whose errors for want of memory, of whatever kind, have a note with the cure.

    :param method: of an ELBO.
    """

    @functools.wraps(method)
    def noting(self: Owner, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if _is_of_memory(error):
                error.add_note(
                    f"{type(self).__name__} ran out of memory in a step of {self.num_particles} "
                    f"particles. Cure: {self._memory_cure}"
                )
            raise

    return noting


def _is_of_memory(error: Exception) -> bool:
    """On the CPU torch raises a plain ``RuntimeError``."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "can't allocate memory" in str(error)


T = TypeVar("T")


class CarriedMemory:
    """What is remembered of a site in attributes that are tensors, and changes from step to step by
    others in their place: a recorded step takes and gives them."""


@dataclass
class ElboState:
    """What was found out about one model and guide, and what an estimator keeps.

    ``runs`` knows how the model can be run, and ``discrete`` which of its latents are summed out;
    ``value_ndims`` are the dimensions of each of the
    guide's values outside the particle plate, None before the first run; ``has_implicit_sites`` and
    ``checked_sites`` tell what the guide draws and which sites have passed a method's checks;
    ``memory`` is what a method keeps, by purpose and site, and ``traced`` are recorded steps.
    """

    runs: BatchedRuns
    discrete: DiscreteSum | None = None
    value_ndims: dict[str, int] | None = None
    has_implicit_sites: bool = False
    checked_sites: set[str] = field(default_factory=set)
    memory: dict[tuple[str, str], Any] = field(default_factory=dict)
    traced: TracedSteps = field(default_factory=TracedSteps)


class Pair:
    """The model and guide that a state belongs to, without keeping them alive."""

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any]) -> None:
        self._model, self._guide = _reference(model), _reference(guide)

    def has(self, model: Callable[..., Any], guide: Callable[..., Any]) -> bool:
        """Whether it is of these two."""
        return _is(self._model(), model) and self.has_guide(guide)

    def has_guide(self, guide: Callable[..., Any]) -> bool:
        """Whether it is of this guide."""
        return _is(self._guide(), guide)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        return self  # a copy of the ELBO goes on with the same model and guide

    def __getstate__(self) -> dict[str, Any]:
        return {}  # weak references cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = self._guide = lambda: None


def _is(known: Any, target: Callable[..., Any]) -> bool:
    # Not by ==, which models may define; but methods are made anew at each access.
    return known is target or (inspect.ismethod(target) and known == target)


def _reference(target: Callable[..., Any]) -> Callable[[], Any]:
    if inspect.ismethod(target):
        return weakref.WeakMethod(target)
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


class StatefulELBO(Trace_ELBO):
    """A ``Trace_ELBO`` that remembers, for as long as model and guide stay the same.

    :param num_particles: draws of the guide per step.
    :param vectorize_particles: how the model runs for all of them; the guide runs under Pyro's
        particle plate in any case.
    :param kwargs: all others of :class:`pyro.infer.Trace_ELBO`.
    """

    def __init__(
        self,
        num_particles: int,
        vectorize_particles: Literal["vmap", "plate", False],
        **kwargs: Any,
    ) -> None:
        self.max_plate_nesting: float
        # Pyro counts the guide's particle plate in max_plate_nesting.
        super().__init__(num_particles, vectorize_particles=True, **kwargs)
        self.vectorize_particles = vectorize_particles
        self.num_steps_taken = 0  # not num_steps, which subclasses have as a setting
        self.num_skipped = 0
        self._given_nesting = self.max_plate_nesting
        self._pair: Pair | None = None
        self.state = self._new_state()

    def remember(self, purpose: str, site: str, make: Callable[[], T]) -> T:
        """What is kept of a site from step to step; made the first time."""
        memory = self.state.memory
        if (purpose, site) not in memory:
            memory[purpose, site] = make()
        return memory[purpose, site]

    def remembered(self, kind: type[T]) -> dict[str, T]:
        """By site, what of one kind is kept."""
        memory = self.state.memory
        return {site: kept for (_, site), kept in memory.items() if isinstance(kept, kind)}

    def get_state(self) -> dict[str, Any]:
        """All that the next step depends on beside parameters and random streams, for a file."""
        return {
            "memory": copy.deepcopy(self.state.memory),
            "num_steps": self.num_steps_taken,
            "num_skipped": self.num_skipped,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`get_state` gave; the next step goes on from there."""
        self.state.memory.update(copy.deepcopy(state["memory"]))
        self.num_steps_taken, self.num_skipped = state["num_steps"], state["num_skipped"]

    def _new_state(self) -> ElboState:
        mode: Literal["vmap", False] = "vmap" if self.vectorize_particles == "vmap" else False
        return ElboState(BatchedRuns(type(self).__name__, mode))

    def _meet(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Forget what belonged to another model or guide, and run a new pair once.

        :raises ValueError: inside a plate.
        """
        refuse_outer_plates(type(self).__name__)
        self._forget_others(model, guide)
        if self.state.value_ndims is None:
            self._guess_max_plate_nesting(model, guide, args, kwargs)
            self._pair = Pair(model, guide)

    def _forget_others(self, model: Callable, guide: Callable) -> None:
        """Forget what belonged to another model or guide."""
        if self._pair is not None and not self._pair.has(model, guide):
            self.state = self._new_state()
            self.max_plate_nesting = self._given_nesting
            if not self._pair.has_guide(guide):
                self._forget_guide()
            self._pair = None

    def _forget_guide(self) -> None:
        """Drop what was trained beside another guide."""

    def _guess_max_plate_nesting(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        found = first_run(model, guide, args, kwargs, self.max_plate_nesting)
        self.state.value_ndims = {n: s["value"].dim() for n, s in found.guide_sites.items()}
        self.state.discrete = found.discrete
        for name, site in found.guide_sites.items():
            self._check_trainable(name, site)
        if math.isinf(self.max_plate_nesting):
            self.max_plate_nesting = found.plate_nesting + (self.num_particles > 1)

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        """Refuse a site of a new guide that cannot be trained, and note an implicit one."""


class StepELBO(StatefulELBO):
    """Steps of an ELBO whose traces a subclass makes, in ``_get_traces``.

    Its parameters are those of :class:`~pyro_implicit.infer.ImplicitELBO`.
    """

    #: Whether a recorded step gives the numbers of a plain one to the last bit.
    records_to_the_bit: ClassVar[bool] = True

    def __init__(
        self,
        num_particles: int,
        vectorize_particles: Literal["vmap", "plate", False],
        prior_weight: float,
        entropy_weight: float,
        inverse_temperature: float,
        nonfinite: Literal["raise", "skip"],
        compile: CompileMode,
        **kwargs: Any,
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f'nonfinite must be "raise" or "skip", but got {nonfinite!r}')
        check_mode(compile)
        super().__init__(num_particles, vectorize_particles, **kwargs)
        self.prior_weight = prior_weight
        self.entropy_weight = entropy_weight
        self.inverse_temperature = inverse_temperature
        self.nonfinite = nonfinite
        self.compile: CompileMode = compile
        self.num_left_out = 0
        self._particles: Particles | None = None

    @property
    def _memory_cure(self) -> str:
        """What to try when a step has run out of memory."""
        return "a smaller num_particles, or minibatches"

    def carried(self) -> dict[Any, Tensor]:
        """Tensors that a step takes over from the last and leaves to the next, by some name."""
        return {
            (*key, part): tensor
            for key, kept in self.state.memory.items()
            if isinstance(kept, CarriedMemory)
            for part, tensor in vars(kept).items()
        }

    def carry(self, tensors: dict[Any, Tensor]) -> None:
        """Put others in the place of those of :meth:`carried`."""
        for (*key, part), tensor in tensors.items():
            setattr(self.state.memory[tuple(key)], part, tensor)

    @noting_memory
    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """:returns: an estimate of the negative ELBO (nan for a skipped one)."""
        try:
            with torch.no_grad():
                return sum(value for value, _, _ in self._losses(model, guide, args, kwargs))
        except NonFiniteError as error:
            self._skip(error)
            return math.nan

    @noting_memory
    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """:returns: a surrogate of the negative ELBO whose gradient is the estimator's.

        A skipped step returns a nan that no parameter hangs on.
        """
        self.num_steps_taken += 1
        known = self._traced_step(model, guide, args, kwargs)
        if known is not None:
            return known.differentiable()
        try:
            loss, surrogate = self.total(model, guide, args, kwargs)
            return loss + (surrogate - surrogate.detach())
        except NonFiniteError as error:
            self._skip(error)
            return torch.full((), math.nan, requires_grad=True)

    @noting_memory
    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the negative ELBO to the parameters.

        :returns: an estimate of the negative ELBO (nan for a skipped step).
        """
        self.num_steps_taken += 1
        known = self._traced_step(model, guide, args, kwargs)
        if known is not None:
            return known.backward()
        total = 0.0
        before: dict[Tensor, Tensor | None] = {}
        with poutine.trace(param_only=True) as capture:
            try:
                for value, _, surrogate in self._losses(model, guide, args, kwargs):
                    total += value
                    if surrogate.requires_grad:
                        if self.nonfinite == "skip":
                            _keep_gradients(surrogate, before)
                        surrogate.backward(retain_graph=self.retain_graph)
                check_gradients(capture.trace, type(self).__name__, self.num_steps_taken)
                return total
            except NonFiniteError as error:
                self._skip(error)
        for site in capture.trace.nodes.values():
            before.setdefault(unconstrained(site), unconstrained(site).grad)
        for parameter, gradient in before.items():
            # With zeros in place of None, optimisers with momentum would move the parameter.
            parameter.grad = gradient if gradient is not None and gradient.any() else None
        return math.nan

    def total(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """The loss, a constant, and a surrogate that has its gradient.

        :raises NonFiniteError: as :meth:`loss_and_grads`.
        """
        total: Any = 0.0
        total_surrogate: Any = 0.0
        for _, loss, surrogate in self._losses(model, guide, args, kwargs):
            total, total_surrogate = total + loss, total_surrogate + surrogate
        return total, total_surrogate

    def weights(self) -> dict[str, float]:
        """The settings that may differ from step to step."""
        return {name: getattr(self, name) for name in _WEIGHTS}

    @contextlib.contextmanager
    def weighed_by(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """With tensors in the place of some of :meth:`weights`."""
        before = self.weights()
        self.__dict__.update(weights)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def settings(self) -> tuple[Any, ...]:
        """All other settings, functions and modules by identity, and which weights are 1."""
        varying = (*_WEIGHTS, *_COUNTERS, "state")
        values = [(n, v) for n, v in vars(self).items() if n[0] != "_" and n not in varying]
        return (
            *((n, v if isinstance(v, SIMPLE) else Same(v)) for n, v in values),
            *(weight == 1.0 for weight in self.weights().values()),
        )

    def _weighed(self, model_trace: Trace, guide_trace: Trace) -> tuple[Trace, Trace]:
        apply_weights(
            model_trace,
            guide_trace,
            self.prior_weight,
            self.entropy_weight,
            self.inverse_temperature,
        )
        return model_trace, guide_trace

    def _losses(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Shares of the loss, as numbers and as constants, each with a surrogate that has its
        gradient.

        :raises NonFiniteError: if a share is not a number, naming the sites to blame.
        """
        for pair in self._get_traces(model, guide, args, kwargs):
            shares = (part / self.num_particles for part in self._evaluate(*pair))
            yield tuple(shares)

    def _evaluate(self, model_trace: Trace, guide_trace: Trace) -> tuple[float, Tensor, Tensor]:
        """The loss as a number, the one thing in a step that is read from the device, and as a
        tensor, and the surrogate.

        :raises NonFiniteError: if it is none for all particles, naming the sites to blame.
        """
        loss, surrogate = loss_and_surrogate(model_trace, guide_trace)
        if is_tracing():
            return 0.0, loss, surrogate
        value = float(loss)
        if not math.isfinite(value):
            loss, surrogate = self._of_possible(model_trace, guide_trace)
            value = float(loss)
        return value, loss, surrogate

    def _of_possible(self, model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
        """Loss and surrogate without the particles at which the model has no density."""
        terms = nonfinite_terms(model_trace, guide_trace)
        impossible = None
        if self._particles is not None and self.num_particles > 1:
            impossible = leave_out_impossible(model_trace, guide_trace, self.num_particles)
        loss, surrogate = loss_and_surrogate(model_trace, guide_trace)
        if impossible is None or not loss.isfinite():
            refuse_nonfinite(model_trace, guide_trace, type(self).__name__, self.num_steps_taken)
        assert self._particles is not None and impossible is not None
        self._particles.left_out.particles = impossible
        number = int(impossible.sum())
        if not self.num_left_out:
            warn_user(
                f"{type(self).__name__}, step {self.num_steps_taken}: the model has no density at "
                f"{number} of {self.num_particles} particles, which are left out ({terms}). Said "
                "once; see num_left_out. Cure, if they are many: a smaller init_scale, or priors "
                "in whose range the data are possible",
            )
        self.num_left_out += number
        return loss, surrogate

    def _traced_step(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Evaluation | None:
        """The step by a recording; None where a plain one is to be taken."""
        if self.compile is False or not torch.is_grad_enabled():
            return None
        self._forget_others(model, guide)
        return self.state.traced.step(self, model, guide, args, kwargs)

    def _skip(self, error: NonFiniteError) -> None:
        if self.nonfinite == "raise":
            raise error
        self.num_skipped += 1


def _keep_gradients(surrogate: Tensor, kept: dict[Tensor, Tensor | None]) -> None:
    """Add copies of the gradients that ``surrogate.backward()`` changes, unless they are kept."""
    for leaf in graph_leaves(surrogate):
        if leaf not in kept:
            kept[leaf] = None if leaf.grad is None else leaf.grad.clone()
