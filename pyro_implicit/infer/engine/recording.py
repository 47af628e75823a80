# SPDX-License-Identifier: Apache-2.0
"""Recorded steps: run a step of an ELBO without Python and Pyro."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn

from pyro_implicit.compiled import (
    RECORDINGS,
    CompileMode,
    CompilerError,
    ProgramCache,
    RandomState,
    RecordedFunction,
    Untraceable,
    disagreement,
    flatten_arguments,
)
from pyro_implicit.infer.engine.traces import NonFiniteError
from pyro_implicit.runtime.sites import graph_leaves, unconstrained

__all__ = ["Evaluation", "TracedSteps"]


class _ELBO(Protocol):
    compile: CompileMode
    records_to_the_bit: Any
    num_steps_taken: int
    state: Any

    def total(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor]: ...

    def weights(self) -> dict[str, float]: ...

    def weighed_by(self, weights: dict[str, Tensor]) -> Any: ...

    def settings(self) -> Hashable: ...


class Evaluation(NamedTuple):
    """A loss, constant, with the gradients of its surrogate for some tensors."""

    loss: Tensor
    targets: list[Tensor]
    gradients: list[Tensor]

    def backward(self) -> float:
        """Add the gradients to those of the targets, and return the loss as a number."""
        if self.targets:
            torch.autograd.backward(self.targets, self.gradients)
        return self.loss.item()

    def differentiable(self) -> Tensor:
        """Return the loss as a function of the targets."""
        return _Known.apply(self.loss, self.gradients, *self.targets)

    def differs_from(self, other: Evaluation) -> str | None:
        """Compare with a plain step, which may have further targets (noise, for instance)."""
        known = {id(t): g for t, g in zip(other.targets, other.gradients, strict=True)}
        if not known.keys() >= {id(target) for target in self.targets}:
            return "other parameters have a gradient"
        expected = [known[id(target)] for target in self.targets]
        return disagreement([self.loss, *self.gradients], [other.loss, *expected])


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *targets: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(gradient * factor for gradient in ctx.gradients))


class _Plain(NamedTuple):
    """A plain step: its result, all parameters in it, and by name those of Pyro's store."""

    evaluation: Evaluation
    leaves: list[Tensor]
    params: dict[str, Tensor]


class _StepCall:
    """The function that is recorded: one step, with the ELBO's memory as inputs and outputs."""

    def __init__(
        self, elbo: _ELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        self.elbo, self.model, self.guide = elbo, model, guide
        self.arguments = flatten_arguments(args, kwargs)
        self.memory = elbo.state.tensors()
        self.key = (
            self.arguments.key,
            elbo.settings(),
            tuple((k, t.shape, t.dtype) for k, t in self.memory.items()),
            pyro.settings.get("module_local_params"),
            torch.get_default_dtype(),
        )

    def plain(self) -> _Plain:
        tensors, with_gradient = self._own_tensors()
        args, kwargs = self.arguments.rebuild(tensors)
        with poutine.trace(param_only=True) as capture:
            loss, surrogate = self.elbo.total(self.model, self.guide, args, kwargs)
        own = {id(tensor) for tensor in with_gradient}
        leaves = [leaf for leaf in graph_leaves(surrogate) if id(leaf) not in own]
        gradients = _gradients(surrogate, leaves + with_gradient)
        norm = torch.nn.utils.get_total_norm([one for one in gradients if one is not None])
        if not norm.isfinite():
            raise NonFiniteError("a gradient is not finite")
        targets = zip(leaves + self.differentiable(), gradients, strict=True)
        pairs = [(target, one) for target, one in targets if one is not None]
        evaluation = Evaluation(loss, [t for t, _ in pairs], [g for _, g in pairs])
        store = pyro.get_param_store()  # without those of modules with module_local_params
        params = {
            name: unconstrained(site)
            for name, site in capture.trace.nodes.items()
            if site["type"] == "param" and name in store
        }
        return _Plain(evaluation, leaves, params)

    def record(self, plain: _Plain) -> _StepProgram:
        elbo, leaves, memory = self.elbo, plain.leaves, list(self.elbo.state.tensors().values())
        tensors, with_gradient = self._own_tensors()
        args, kwargs = self.arguments.rebuild(tensors)
        weights = self._weights(leaves)
        has_gradient: list[bool] = []

        def function() -> list[Tensor]:
            with poutine.block(), elbo.weighed_by(weights):
                loss, surrogate = elbo.total(self.model, self.guide, args, kwargs)
            found = _gradients(surrogate, leaves + with_gradient)
            has_gradient[:] = [gradient is not None for gradient in found]
            gradients = [gradient for gradient in found if gradient is not None]
            check = 0 * torch.nn.utils.get_total_norm(gradients) + loss
            return [loss, check, *gradients, *elbo.state.tensors().values()]

        inputs = [*leaves, *tensors, *weights.values(), *memory]
        candidates = (self.model, self.guide, elbo, *vars(elbo).values())
        modules = [part for part in candidates if isinstance(part, nn.Module)]
        recorded = RecordedFunction(function, inputs, modules, memory)
        return _StepProgram(recorded, leaves, plain.params, has_gradient)

    def inputs(self, leaves: list[Tensor]) -> list[Tensor]:
        weights = self._weights(leaves).values()
        return [*leaves, *self.arguments.tensors, *weights, *self.memory.values()]

    def differentiable(self) -> list[Tensor]:
        """Return the arguments that have a gradient."""
        return [tensor for tensor in self.arguments.tensors if tensor.requires_grad]

    def _weights(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Return the weights other than 1 as tensors; a recording holds those of 1 constant."""
        like = leaves[0] if leaves else torch.zeros(())
        values = self.elbo.weights().items()
        return {name: like.new_tensor(value) for name, value in values if value != 1.0}

    def _own_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the arguments, which the model may also reach in other ways."""
        tensors = [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in self.arguments.tensors
        ]
        return tensors, [tensor for tensor in tensors if tensor.requires_grad]


class _StepProgram:
    def __init__(
        self,
        function: RecordedFunction,
        leaves: list[Tensor],
        params: dict[str, Tensor],
        has_gradient: list[bool],
    ) -> None:
        self.function, self.leaves, self.params = function, leaves, params
        self.has_gradient = has_gradient
        self.num_calls = 0
        #: Whether the next step is compared with a plain one, as inductor has failed.
        self.is_suspect = False

    def holds(self) -> bool:
        """Tell whether its parameters are still those of store and modules, and still trained."""
        known = pyro.get_param_store()._params
        return (
            self.function.holds()
            and all(leaf.requires_grad for leaf in self.leaves)
            and all(known.get(name) is value for name, value in self.params.items())
        )

    def show_params(self) -> None:
        """Show its parameters to the handlers around the step, such as that of ``SVI``."""
        if _PYRO_STACK:
            with torch.no_grad():
                for name in self.params:
                    pyro.param(name)

    def run(self, call: _StepCall) -> tuple[Evaluation, bool, dict[Any, Tensor]]:
        """Return the step's result, whether it is finite, and the ELBO's memory after it."""
        self.num_calls += 1
        loss, check, *others = self.function(call.inputs(self.leaves))
        targets = self.leaves + call.differentiable()
        targets = [t for t, has in zip(targets, self.has_gradient, strict=True) if has]
        gradients, memory = others[: len(targets)], others[len(targets) :]
        evaluation = Evaluation(loss, targets, gradients)
        return evaluation, math.isfinite(check.item()), dict(zip(call.memory, memory, strict=True))

    def compile(self, inputs: Sequence[Tensor]) -> None:
        self.function.compile(inputs)

    def compile_if_due(self, call: _StepCall) -> bool:
        """Compile once that would have paid so far; return whether it has just been done."""
        if self.function.is_compiled or not self.function.repays_compilation(self.num_calls):
            return False
        try:
            self.compile(call.inputs(self.leaves))
        except CompilerError:
            self.function.undo_compilation()
        return self.function.is_compiled

    def undo_compilation(self) -> bool:
        """Run as recorded from now on; return whether it was compiled."""
        was_compiled = self.function.is_compiled
        if was_compiled:
            self.function.undo_compilation()
            self.is_suspect = True
        return was_compiled


class TracedSteps:
    """The recorded steps of an ELBO with one model and guide."""

    def __init__(self) -> None:
        self.programs: ProgramCache[_StepProgram] = ProgramCache("auto")
        self._num_plain = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # another process records anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def step(
        self, elbo: _ELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Evaluation | None:
        """Take a step from a recording, with the random numbers of a plain one.

        :returns: its result; None if a plain step is to be taken.
        """
        programs, is_auto = self.programs, elbo.compile == "auto"
        if programs.refusal is not None or (is_auto and not elbo.records_to_the_bit):
            return None
        if self._num_plain < (RECORDINGS.auto_steps if is_auto else 1):
            # The first step has all checks, and finds out how the model can be run.
            self._num_plain += 1
            return None
        programs.compile = elbo.compile
        who = f"{type(elbo).__name__} (step {elbo.num_steps_taken})"
        try:
            call = _StepCall(elbo, model, guide, args, kwargs)
        except Untraceable as error:
            programs.give_up(who, str(error))
            return None
        program, is_due = programs.find(call.key)
        before = _Before(call)
        if program is None:
            return self._record(who, call, before)
        is_due |= program.is_suspect or (is_auto and program.compile_if_due(call))
        program.is_suspect = False
        program.show_params()
        try:
            evaluation, is_finite, memory = program.run(call)
        except Exception:
            before.restore()
            if not (is_auto and program.undo_compilation()):
                raise
            return None
        if is_due:
            before.restore()
            return self._compare(who, call, before, program, evaluation if is_finite else None)
        if is_finite:
            elbo.state.put(memory)
            return evaluation
        before.restore()  # a plain step finds out why, or leaves particles out
        return None

    def _record(self, who: str, call: _StepCall, before: _Before) -> Evaluation | None:
        try:
            plain = call.plain()
        except NonFiniteError:
            before.restore()
            return None
        after = _Before(call)
        before.restore()
        try:
            self.programs.record(
                who,
                call.key,
                lambda: call.record(plain),
                lambda program: call.inputs(program.leaves),
            )
        finally:
            after.restore()
        return plain.evaluation

    def _compare(
        self,
        who: str,
        call: _StepCall,
        before: _Before,
        program: _StepProgram,
        found: Evaluation | None,
    ) -> Evaluation | None:
        try:
            plain = call.plain()
        except NonFiniteError:
            before.restore()
            if found is not None:
                self._refuse(who, program, "is finite where a plain one is not")
            return None
        if any(value is not program.params.get(name) for name, value in plain.params.items()):
            self.programs.clear()  # a new parameter: record again
        elif found is not None and (difference := found.differs_from(plain.evaluation)):
            self._refuse(who, program, f"disagrees with a plain one: {difference}")
        elif found is None and self.programs.compile == "auto":
            program.undo_compilation()
        return plain.evaluation

    def _refuse(self, who: str, program: _StepProgram, fault: str) -> None:
        """Give a wrong recording up; one that ``"auto"`` has compiled is tried uncompiled first."""
        if not (self.programs.compile == "auto" and program.undo_compilation()):
            self.programs.give_up(who, f"a recorded step {fault}", is_wrong=True)


class _Before:
    """The random state and the ELBO's memory, to take a step again."""

    def __init__(self, call: _StepCall) -> None:
        self.elbo = call.elbo
        self.random = RandomState()
        self.memory = {name: tensor.clone() for name, tensor in self.elbo.state.tensors().items()}

    def restore(self) -> None:
        self.random.restore()
        self.elbo.state.put(self.memory)


def _gradients(surrogate: Tensor, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(surrogate, wanted, allow_unused=True) if wanted else ()
