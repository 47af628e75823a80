# SPDX-License-Identifier: Apache-2.0
"""Steps of an ELBO: losses, gradients and memory, for traces that a subclass makes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn

from pyro_implicit.compiled import ACTIVE, CompileMode, Same, check_mode
from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import DiscreteSum
from pyro_implicit.infer.engine.recording import Evaluation, TracedSteps
from pyro_implicit.infer.engine.traces import (
    CURE,
    NonFiniteError,
    Particles,
    first_run,
    leave_out_impossible,
    loss_and_surrogate,
    nonfinite_terms,
    refuse_nonfinite,
)
from pyro_implicit.runtime.global_state import refuse_outer_plates, same_streams
from pyro_implicit.runtime.messages import first_line, refuse_counts, refuse_unknown, warn_user
from pyro_implicit.runtime.sites import graph_leaves, unconstrained
from pyro_implicit.runtime.trees import leaves_of

__all__ = ["ElboState", "Pair", "StepELBO"]

T = TypeVar("T")

_WEIGHTS = ("prior_weight", "entropy_weight", "inverse_temperature")
_COUNTERS = ("num_steps_taken", "num_skipped", "num_left_out")


@dataclass
class ElboState:
    """The memory of an ELBO about one model and guide.

    ``runs`` knows how the model can be run, ``guide_mode`` whether the guide draws all particles
    under the particle plate or in a loop (None before its first draws), ``discrete`` which latent
    variables are summed out, and ``unchanged`` which distributions need no changes.
    ``value_ndims`` are the dimensions of each of the guide's draws outside the particle plate, None
    before the first run; ``implicit_sites`` and ``checked_sites`` name its implicit sites, and
    the sites that have passed a method's checks.
    ``structures`` are the latent variables of model and guide that have been compared;
    ``folded_sites`` names sites of which a warning was issued, and ``knows_parameters`` says
    whether the loss was searched for parameters that Pyro does not know.

    ``memory`` is what a method keeps from step to step, by purpose and site: tensors, named tuples
    of tensors, or other values that a recorded step does not change. ``optimisers`` train a
    method's own networks. ``step`` is what a method keeps within a step; it is cleared after it.
    """

    runs: BatchedRuns
    guide_mode: Literal["plate", "loop"] | None = None
    discrete: DiscreteSum | None = None
    value_ndims: dict[str, int] | None = None
    implicit_sites: set[str] = field(default_factory=set)
    checked_sites: set[str] = field(default_factory=set)
    folded_sites: set[str] = field(default_factory=set)
    structures: set[tuple[frozenset[str], frozenset[str]]] = field(default_factory=set)
    knows_parameters: bool = False
    unchanged: set[tuple] = field(default_factory=set)
    memory: dict[tuple[str, str], Any] = field(default_factory=dict)
    optimisers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    step: dict[tuple[str, str], Any] = field(default_factory=dict)
    traced: TracedSteps = field(default_factory=TracedSteps)

    def tensors(self) -> dict[Any, Tensor]:
        """Return the tensors that a step takes from the step before and leaves to the next one."""
        found: dict[Any, Tensor] = {}
        for key, kept in self.memory.items():
            if isinstance(kept, Tensor):
                found[key] = kept
            elif isinstance(kept, tuple):
                found |= {(*key, i): tensor for i, tensor in enumerate(kept)}
        return found | self._in_place()

    @torch.no_grad()
    def put(self, tensors: dict[Any, Tensor]) -> None:
        """Replace the tensors of :meth:`tensors`; write into those that a network has."""
        for key, kept in self.memory.items():
            if isinstance(kept, Tensor):
                self.memory[key] = tensors[key]
            elif isinstance(kept, tuple):
                self.memory[key] = type(kept)(*(tensors[*key, i] for i in range(len(kept))))
        for key, tensor in self._in_place().items():
            if tensors[key] is not tensor:
                tensor.copy_(tensors[key])

    def _in_place(self) -> dict[Any, Tensor]:
        """Return the parameters of a method's networks, and the state of their optimisers."""
        found = {}
        for name, optimiser in self.optimisers.items():
            for i, parameter in enumerate(optimiser.param_groups[0]["params"]):
                found["parameter", name, i] = parameter
                for part, value in optimiser.state[parameter].items():
                    found[part, name, i] = value
        return found


class Pair:
    """Weak references to the model and guide of a state."""

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any]) -> None:
        self._model, self._guide = _reference(model), _reference(guide)

    def has(self, model: Callable[..., Any], guide: Callable[..., Any]) -> bool:
        """Tell whether it consists of these two."""
        if self._model() is model and self._guide() is guide:
            return True
        return _is(self._model(), model) and self.has_guide(guide)

    def has_guide(self, guide: Callable[..., Any]) -> bool:
        """Tell whether it has this guide."""
        return _is(self._guide(), guide)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        return self  # a copy of the ELBO goes on with the same model and guide

    def __getstate__(self) -> dict[str, Any]:
        return {}  # weak references cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = self._guide = lambda: None


def _is(known: Any, target: Callable[..., Any]) -> bool:
    # Models may define ==, but methods are made anew at each access.
    return known is target or (inspect.ismethod(target) and known == target)


def _reference(target: Callable[..., Any]) -> Callable[[], Any]:
    if inspect.ismethod(target):
        return weakref.WeakMethod(target)
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


class StepELBO(Trace_ELBO):
    """A ``Trace_ELBO`` whose traces a subclass makes, with a memory of its model and guide.

    Its parameters are those of :class:`~pyro_implicit.infer.ImplicitELBO`.
    """

    #: The least ``num_particles``: 2 for methods that compare particles.
    least_particles: int = 1
    #: Whether recorded steps are bit-identical to plain ones.
    records_to_the_bit: ClassVar[bool] = True

    def __init__(
        self,
        num_particles: int = 1,
        vectorize_particles: Literal["vmap", "plate"] | bool = "vmap",
        prior_weight: float = 1.0,
        entropy_weight: float = 1.0,
        inverse_temperature: float = 1.0,
        nonfinite: Literal["raise", "skip"] = "raise",
        compile: CompileMode = False,
        **kwargs: Any,
    ) -> None:
        if callable(num_particles):  # SVI(..., loss=LIVI_ELBO) calls the class with the model
            name = type(self).__name__
            raise TypeError(
                f"{name} was called with a model, as the loss is a class. Cure: "
                f"SVI(model, guide, optim, loss={name}())"
            )
        refuse_counts(self.least_particles, num_particles=num_particles)
        refuse_unknown("vectorize_particles", vectorize_particles, "vmap", "plate", True, False)
        refuse_unknown("nonfinite", nonfinite, "raise", "skip")
        check_mode(compile)
        self.max_plate_nesting: float
        # Pyro counts the guide's particle plate in max_plate_nesting.
        super().__init__(num_particles, vectorize_particles=True, **kwargs)
        self.vectorize_particles = "plate" if vectorize_particles is True else vectorize_particles
        self.prior_weight = prior_weight
        self.entropy_weight = entropy_weight
        self.inverse_temperature = inverse_temperature
        self.nonfinite = nonfinite
        self.compile: CompileMode = compile
        self.num_steps_taken = 0  # subclasses have a setting num_steps
        self.num_skipped = 0
        self.num_left_out = 0
        self._given_nesting = self.max_plate_nesting
        self._is_resumed = False
        self._pair: Pair | None = None
        self._particles: Particles | None = None
        self.state = self._new_state()

    # The memory

    def remember(self, purpose: str, site: str, make: Callable[[], T]) -> T:
        """Return what is kept of a site from step to step; make it the first time."""
        memory = self.state.memory
        if (purpose, site) not in memory:
            memory[purpose, site] = make()
        return memory[purpose, site]

    def remembered(self, purpose: str) -> dict[str, Any]:
        """Return what is kept for a purpose, by site."""
        memory = self.state.memory
        return {site: kept for (kind, site), kept in memory.items() if kind == purpose}

    def get_state(self) -> dict[str, Any]:
        """Return all that the next step depends on, without parameters, their optimisers and
        random streams."""
        return {
            "memory": copy.deepcopy(self.state.memory),
            "num_steps": self.num_steps_taken,
            "num_skipped": self.num_skipped,
            "num_left_out": self.num_left_out,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`get_state` returned; the next step goes on from there."""
        self.state.memory.update(copy.deepcopy(state["memory"]))
        self.num_steps_taken, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.num_left_out = state["num_left_out"]
        self._is_resumed = True

    def _new_state(self) -> ElboState:
        mode: Literal["vmap", False] = "vmap" if self.vectorize_particles == "vmap" else False
        return ElboState(BatchedRuns(type(self).__name__, mode))

    def _bind(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Forget another model or guide, and run a new pair once."""
        refuse_outer_plates(type(self).__name__)
        if inspect.isclass(guide):
            name = guide.__name__
            raise TypeError(f"the guide is the class {name}. Cure: SVI(model, {name}(model), ...)")
        if self._pair is not None and not self._pair.has(model, guide):
            self._forget(guide)
        if self.state.value_ndims is not None:
            return
        # The first step of an interrupted run has made this run already.
        with same_streams() if self._is_resumed else nullcontext():
            found = first_run(model, guide, args, kwargs, self.max_plate_nesting)
        for name, site in found.guide_sites.items():
            self._check_trainable(name, site)
        self._check_sum(found.discrete)
        self.state.discrete = found.discrete
        if math.isinf(self.max_plate_nesting):
            self.max_plate_nesting = found.plate_nesting + (self.num_particles > 1)
        drawn = {n: s for n, s in found.guide_sites.items() if not s["is_observed"]}
        self.state.value_ndims = {name: site["value"].dim() for name, site in drawn.items()}
        self._pair = Pair(model, guide)

    def _check_structure(
        self,
        model: Callable,
        guide: Callable,
        args: tuple,
        kwargs: dict,
        traces: tuple[Trace, Trace],
    ) -> None:
        """Check latent variables that differ from those of all steps before, by a first run."""
        latents = frozenset(traces[0].stochastic_nodes), frozenset(traces[1].stochastic_nodes)
        known = self.state.structures
        if latents not in known:
            if known:
                with same_streams():
                    first_run(model, guide, args, kwargs, self.max_plate_nesting)
            known.add(latents)

    def _forget(self, guide: Callable) -> None:
        assert self._pair is not None
        optimisers = self.state.optimisers
        self.state = self._new_state()
        self.max_plate_nesting = self._given_nesting
        if self._pair.has_guide(guide):
            self.state.optimisers = optimisers
        else:
            self._forget_guide()
        self._pair = None

    def _forget_guide(self) -> None:
        """Drop networks that were trained together with another guide."""

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        """Refuse a site of a new guide that cannot be trained, and note an implicit one."""

    def _check_sum(self, discrete: DiscreteSum | None) -> None:
        """Refuse discrete latent variables if Pyro's own loop or plate runs the model."""

    # The loss

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return an estimate of the negative ELBO (nan for a skipped step)."""
        with self._explaining_memory(), torch.no_grad():
            try:
                return sum(value for value, _, _ in self._losses(model, guide, args, kwargs))
            except NonFiniteError as error:
                self._skip(error)
                return math.nan

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return a surrogate of the negative ELBO whose gradient is the estimator's.

        A skipped step returns a nan that depends on no parameter.
        """
        self._begin_step()
        with self._explaining_memory():
            known = self._traced_step(model, guide, args, kwargs)
            if known is not None:
                return known.differentiable()
            try:
                loss, surrogate = self.total(model, guide, args, kwargs)
                return loss + (surrogate - surrogate.detach())
            except NonFiniteError as error:
                self._skip(error)
                return torch.full((), math.nan, requires_grad=True)

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Add the gradients of the negative ELBO to the parameters.

        :returns: an estimate of the negative ELBO (nan for a skipped step).
        """
        self._begin_step()
        total = 0.0
        before: dict[Tensor, Tensor | None] = {}
        try:
            if self.compile is not False:
                known = self._traced_step(model, guide, args, kwargs)
                if known is not None:
                    return known.backward()
            with poutine.trace(param_only=True) as capture:
                for value, _, surrogate in self._losses(model, guide, args, kwargs):
                    total += value
                    if surrogate.requires_grad:
                        if not self.state.knows_parameters:
                            self._warn_of_unregistered(surrogate, capture.trace, (args, kwargs))
                        if self.nonfinite == "skip":
                            _keep_gradients(surrogate, before)
                        surrogate.backward(retain_graph=self.retain_graph)
            self._check_gradients(capture.trace)
            return total
        except NonFiniteError as error:
            self._skip(error)
        except (RuntimeError, MemoryError) as error:
            self._explain_memory(error)
            raise
        for site in capture.trace.nodes.values():
            before.setdefault(unconstrained(site), unconstrained(site).grad)
        for parameter, gradient in before.items():
            # With zeros in place of None, optimisers with momentum would move the parameter.
            parameter.grad = gradient if gradient is not None and gradient.any() else None
        return math.nan

    def _warn_of_unregistered(self, surrogate: Tensor, params: Trace, inputs: Any) -> None:
        """Warn of parameters in the loss that Pyro does not know, so that SVI cannot train them."""
        self.state.knows_parameters = True
        if pyro.settings.get("module_local_params"):
            return
        known = {id(unconstrained(site)) for site in params.nodes.values()}
        known |= {id(one) for _, one in pyro.get_param_store().named_parameters()}  # also hidden
        known |= {id(leaf) for leaf in leaves_of(inputs)}
        if isinstance(self, nn.Module):  # it trains networks of its own, such as a critic
            known |= {id(one) for one in self.parameters()}
        lost = [one for one in graph_leaves(surrogate) if isinstance(one, nn.Parameter)]
        shapes = [tuple(one.shape) for one in lost if id(one) not in known]
        if shapes:
            warn_user(
                f"{type(self).__name__}: SVI does not train parameters of shapes {shapes[:3]}, as "
                "neither model nor guide registers their module. Cure, unless something else "
                "trains them: pyro.module('name', network)"
            )

    def _begin_step(self) -> None:
        self.num_steps_taken += 1

    def total(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, a constant, and a surrogate that has its gradient.

        :raises NonFiniteError: as :meth:`loss_and_grads`.
        """
        total: Any = 0.0
        total_surrogate: Any = 0.0
        for _, loss, surrogate in self._losses(model, guide, args, kwargs):
            total, total_surrogate = total + loss, total_surrogate + surrogate
        return total, total_surrogate

    def weights(self) -> dict[str, float]:
        """Return the settings that may change from step to step."""
        return {name: getattr(self, name) for name in _WEIGHTS}

    @contextlib.contextmanager
    def weighed_by(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Use tensors in place of some of :meth:`weights`."""
        before = self.weights()
        self.__dict__.update(weights)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def settings(self) -> tuple[Any, ...]:
        """Return all other settings, functions and modules by identity, and which weights are 1."""
        varying = (*_WEIGHTS, *_COUNTERS, "state")
        values = [(n, v) for n, v in vars(self).items() if n[0] != "_" and n not in varying]
        simple = (bool, int, float, str, type(None))
        return (
            *((n, v if isinstance(v, simple) else Same(v)) for n, v in values),
            *(weight == 1.0 for weight in self.weights().values()),
        )

    def _get_traces(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[Trace, Trace]]:
        raise NotImplementedError

    def _losses(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Give shares of the loss, as numbers and as constants, each with its surrogate."""
        count = self.num_particles
        self.state.runs.error = None  # of earlier steps
        try:
            for model_trace, guide_trace in self._get_traces(model, guide, args, kwargs):
                loss, surrogate = loss_and_surrogate(model_trace, guide_trace)
                # The only value in a step that is read from the device.
                value = 0.0 if ACTIVE.recorder is not None else float(loss)
                if not math.isfinite(value):
                    loss, surrogate = self._of_possible(model_trace, guide_trace)
                    value = float(loss)
                yield value / count, loss / count, surrogate / count
        finally:
            self.state.step.clear()

    def _of_possible(self, model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
        """Return loss and surrogate without the particles at which the model has no density."""
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
            error = self.state.runs.error
            raised = "" if error is None else f"; the model raised {first_line(error)}"
            warn_user(
                f"{type(self).__name__}, step {self.num_steps_taken}: the model has no density at "
                f"{number} of {self.num_particles} particles, which are left out "
                f"({terms}{raised}). This warning is issued once; num_left_out counts them. Cure, "
                "if they are many: a smaller init_scale, or priors in whose range the data are "
                "possible"
            )
        self.num_left_out += number
        return loss, surrogate

    def _traced_step(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Evaluation | None:
        """Take the step from a recording; None if a plain step is to be taken."""
        if self.compile is False or not torch.is_grad_enabled():
            return None
        if self._pair is not None and not self._pair.has(model, guide):
            self._forget(guide)
        return self.state.traced.step(self, model, guide, args, kwargs)

    def _check_gradients(self, params: Trace) -> None:
        gradients = {}
        for name, site in params.nodes.items():
            value = site["value"]
            # With module_local_params a module announces its parameters as they are.
            tensor = value.unconstrained() if hasattr(value, "unconstrained") else value
            if tensor.grad is not None:
                gradients[name] = tensor.grad
        norm = torch.nn.utils.get_total_norm(list(gradients.values())) if gradients else None
        if norm is not None and not norm.isfinite().item():
            bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            if bad:
                raise NonFiniteError(
                    f"{type(self).__name__}, step {self.num_steps_taken}: the gradient of "
                    f"{', '.join(bad)} is not finite. {CURE}"
                )

    def _skip(self, error: NonFiniteError) -> None:
        if self.nonfinite == "raise":
            raise error
        self.num_skipped += 1

    @property
    def _memory_cure(self) -> str:
        return "a smaller num_particles, or minibatches"

    @contextlib.contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            self._explain_memory(error)
            raise

    def _explain_memory(self, error: Exception) -> None:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if known or "can't allocate memory" in str(error):  # a plain RuntimeError on the CPU
            error.add_note(
                f"{type(self).__name__} ran out of memory in a step of {self.num_particles} "
                f"particles. Cure: {self._memory_cure}"
            )


def _keep_gradients(surrogate: Tensor, kept: dict[Tensor, Tensor | None]) -> None:
    """Add copies of the gradients that ``surrogate.backward()`` changes, unless they are kept."""
    for leaf in graph_leaves(surrogate):
        if leaf not in kept:
            kept[leaf] = None if leaf.grad is None else leaf.grad.clone()
