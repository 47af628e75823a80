# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients from traces: where they are no numbers, and by a recording of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.compiled import CompileMode, Same, check_mode, is_tracing
from pyro_implicit.infer.engine.evaluation import Evaluation
from pyro_implicit.infer.engine.memory import noting_memory
from pyro_implicit.infer.engine.nonfinite import (
    NonFiniteError,
    check_gradients,
    nonfinite_terms,
    refuse_nonfinite,
)
from pyro_implicit.infer.engine.parameters import graph_leaves, unconstrained
from pyro_implicit.infer.engine.particles import Particles
from pyro_implicit.infer.engine.state import CarriedMemory, StatefulELBO
from pyro_implicit.infer.engine.traces import (
    apply_weights,
    leave_out_impossible,
    loss_and_surrogate,
)
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["SIMPLE", "StepELBO"]

SIMPLE = (bool, int, float, str, type(None))

_WEIGHTS = ("prior_weight", "entropy_weight", "inverse_temperature")
_COUNTERS = ("num_steps_taken", "num_skipped", "num_left_out")


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
