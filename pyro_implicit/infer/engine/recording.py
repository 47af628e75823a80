# SPDX-License-Identifier: Apache-2.0
"""Recorded steps: run a step of an ELBO without Python and Pyro."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn

from pyro_implicit.compiled import (
    CompilerError,
    RandomState,
    RecordedFunction,
    Untraceable,
    flatten_arguments,
    rounding,
)
from pyro_implicit.infer.engine.traces import NonFiniteError
from pyro_implicit.runtime.sites import graph_leaves, unconstrained
from pyro_implicit.runtime.user_warnings import warn_user

if TYPE_CHECKING:
    from pyro_implicit.infer.implicit_elbo import ImplicitELBO

__all__ = ["Evaluation", "Program", "StepCall", "TracedSteps"]


class Evaluation(NamedTuple):
    """A loss, constant, with the gradients of its surrogate for some tensors."""

    loss: Tensor
    targets: list[Tensor]
    gradients: list[Tensor]

    def backward(self) -> float:
        """Add the gradients to the targets' own; the loss as a number."""
        if self.targets:
            torch.autograd.backward(self.targets, self.gradients)
        return self.loss.item()

    def differentiable(self) -> Tensor:
        """The loss as a function of the targets."""
        return _Known.apply(self.loss, self.gradients, *self.targets)

    def differs_from(self, other: Evaluation) -> str | None:
        """In what it differs by more than rounding errors, in words.

        :param other: may have further targets, which were made in the step (noise, say).
        """
        tolerance = rounding(self.loss.dtype)
        loss, other_loss = self.loss.item(), other.loss.item()
        if not abs(loss - other_loss) <= tolerance * (1 + abs(other_loss)):
            return f"the loss is {loss:.6g} and {other_loss:.6g}"
        known = {id(t): g for t, g in zip(other.targets, other.gradients, strict=True)}
        if not known.keys() >= {id(target) for target in self.targets}:
            return "other parameters have a gradient"
        norm = torch.nn.utils.get_total_norm(other.gradients)
        for target, gradient in zip(self.targets, self.gradients, strict=True):
            expected = known[id(target)]
            scale = expected.norm() + 0.01 * norm
            if not (gradient - expected).norm() <= tolerance * scale:
                return f"a gradient of shape {tuple(gradient.shape)} differs"
        return None


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *targets: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *torch._foreach_mul(ctx.gradients, factor))


class Plain(NamedTuple):
    """A step by Pyro: the outcome, all parameters in it, and by name those of Pyro's store."""

    evaluation: Evaluation
    leaves: list[Tensor]
    params: dict[str, Tensor]


class Outcome(NamedTuple):
    """``check`` is finite if loss and gradients are."""

    evaluation: Evaluation
    check: Tensor
    carried: dict[Any, Tensor]


class StepCall:
    """A step to be taken.

    ``key`` tells which recording it can use.

    :raises Untraceable: for arguments that a recording cannot have.
    """

    def __init__(
        self, elbo: ImplicitELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        self.elbo, self.model, self.guide = elbo, model, guide
        self.arguments = flatten_arguments(args, kwargs)
        self.carried = elbo.carried()
        """What it takes over from the step before."""
        carried = tuple((k, t.shape, t.dtype) for k, t in self.carried.items())
        self.key = (self.arguments.key, elbo.settings(), carried)

    def plain(self) -> Plain:
        """Take it by Pyro.

        :raises NonFiniteError: as the ELBO; for a gradient, a plain step names the parameter.
        """
        tensors, with_gradient = self._own_tensors()
        args, kwargs = self.arguments.rebuild(tensors)
        with poutine.trace(param_only=True) as capture:
            loss, surrogate = self.elbo.total(self.model, self.guide, args, kwargs)
        own = {id(tensor) for tensor in with_gradient}
        leaves = [leaf for leaf in graph_leaves(surrogate) if id(leaf) not in own]
        targets = leaves + self._differentiable()
        gradients = _gradients(surrogate, leaves + with_gradient)
        _refuse_nonfinite(gradients)
        store = pyro.get_param_store()  # without those of modules with module_local_params
        params = {
            name: unconstrained(site)
            for name, site in capture.trace.nodes.items()
            if site["type"] == "param" and name in store
        }
        return Plain(_evaluation(loss, targets, gradients), leaves, params)

    def record(self, plain: Plain) -> Program:
        """Record it.

        :param plain: the same, taken by Pyro.
        :raises Untraceable: naming the cause.
        """
        elbo, leaves, carried = self.elbo, plain.leaves, list(self.elbo.carried().values())
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
            return [loss, check, *gradients, *elbo.carried().values()]

        inputs = [*leaves, *tensors, *weights.values(), *carried]
        candidates = (self.model, self.guide, elbo, *vars(elbo).values())
        modules = [part for part in candidates if isinstance(part, nn.Module)]
        recorded = RecordedFunction(function, inputs, modules, carried)
        return Program(recorded, leaves, plain.params, has_gradient)

    def inputs(self, leaves: list[Tensor]) -> list[Tensor]:
        """What a recording wants."""
        weights = self._weights(leaves).values()
        return [*leaves, *self.arguments.tensors, *weights, *self.carried.values()]

    def _weights(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Those that are not 1, which a recording knows, as tensors like the parameters."""
        like = leaves[0] if leaves else torch.zeros(())
        values = self.elbo.weights().items()
        return {name: like.new_tensor(value) for name, value in values if value != 1.0}

    def _differentiable(self) -> list[Tensor]:
        return [tensor for tensor in self.arguments.tensors if tensor.requires_grad]

    def _own_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Others for the arguments' tensors, which may be known to the model by another way too;
        and those that have a gradient."""
        tensors = [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in self.arguments.tensors
        ]
        return tensors, [tensor for tensor in tensors if tensor.requires_grad]


class Program:
    """A recorded step, whose inputs are parameters, arguments, weights and what is carried."""

    def __init__(
        self,
        function: RecordedFunction,
        leaves: list[Tensor],
        params: dict[str, Tensor],
        has_gradient: list[bool],
    ) -> None:
        self.function, self.leaves, self.params = function, leaves, params
        self.has_gradient = has_gradient
        self.num_run = 0

    def holds(self) -> bool:
        """Whether its parameters are still those of store and modules."""
        known = pyro.get_param_store()._params
        return self.function.holds() and all(
            known.get(name) is value for name, value in self.params.items()
        )

    def show_params(self) -> None:
        """Let handlers around the step, like that of ``SVI``, see its parameters."""
        if _PYRO_STACK:
            with torch.no_grad():
                for name in self.params:
                    pyro.param(name)

    def run(self, call: StepCall) -> Outcome:
        """The step."""
        loss, check, *others = self.function(call.inputs(self.leaves))
        targets = self.leaves + call._differentiable()
        targets = [t for t, has in zip(targets, self.has_gradient, strict=True) if has]
        gradients, carried = others[: len(targets)], others[len(targets) :]
        return Outcome(
            Evaluation(loss, targets, gradients),
            check,
            dict(zip(call.carried, carried, strict=True)),
        )

    def compile(self, call: StepCall) -> None:
        """Let inductor make kernels of it.

        :raises CompilerError: if it cannot.
        """
        self.function.compile(call.inputs(self.leaves))


def _gradients(surrogate: Tensor, wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(surrogate, wanted, allow_unused=True) if wanted else ()


def _refuse_nonfinite(gradients: tuple[Tensor | None, ...]) -> None:
    norm = torch.nn.utils.get_total_norm([one for one in gradients if one is not None])
    if not norm.isfinite():
        raise NonFiniteError("a gradient is not finite")


def _evaluation(loss: Tensor, targets: list[Tensor], gradients: Any) -> Evaluation:
    pairs = [(t, g) for t, g in zip(targets, gradients, strict=True) if g is not None]
    return Evaluation(loss, [t for t, _ in pairs], [g for _, g in pairs])


MAX_PROGRAMS = 8
MAX_RECORDINGS = 24
#: Steps before ``compile="auto"`` records one, which takes as long as some tens of them.
AUTO_STEPS = 20


class TracedSteps:
    """The recorded steps of an ELBO with one model and guide."""

    def __init__(self) -> None:
        self.num_recorded = self.num_run = 0
        self.refusal: str | None = None
        """Why steps are not recorded."""
        self._programs: dict[Hashable, Program] = {}
        self._num_plain = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # another process records anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def step(
        self, elbo: ImplicitELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Evaluation | None:
        """A step of the ELBO; None if a plain one is to be taken.

        It draws the same random numbers as that. The first, second, fourth, eighth ... call of each
        recording is compared with a plain step.
        """
        if elbo.compile is False or self.refusal is not None:
            return None
        if elbo.compile == "auto" and not elbo.records_to_the_bit:
            return None
        if self._num_plain < (AUTO_STEPS if elbo.compile == "auto" else 1):
            # The first has all checks, and finds out how the model can be run.
            self._num_plain += 1
            return None
        try:
            call = StepCall(elbo, model, guide, args, kwargs)
        except Untraceable as error:
            self._give_up(elbo, str(error))
            return None
        key = (call.key, pyro.settings.get("module_local_params"), torch.get_default_dtype())
        program = self._programs.pop(key, None)  # put back as the latest
        if program is not None and not program.holds():
            program = None
        if program is None:
            return self._record(key, call)
        self._programs[key] = program
        program.show_params()
        program.num_run += 1
        self.num_run += 1
        if program.num_run & (program.num_run - 1) == 0:
            return self._compare(program, call)
        return self._run(program, call)

    def _run(self, program: Program, call: StepCall) -> Evaluation | None:
        before = _Before(call)
        outcome = program.run(call)
        if not math.isfinite(outcome.check.item()):
            before.restore()  # a plain step finds out why, or leaves particles out
            return None
        call.elbo.carry(outcome.carried)
        return outcome.evaluation

    def _record(self, key: Hashable, call: StepCall) -> Evaluation | None:
        """A plain step, and a recording of it for later ones."""
        elbo = call.elbo
        if self.num_recorded == MAX_RECORDINGS:
            self._give_up(
                elbo,
                f"it was recorded {MAX_RECORDINGS} times, as arguments other than the values of "
                "tensors, or parameters, change from step to step. Cure: pass tensors of one shape",
            )
            return None
        self.num_recorded += 1
        before = _Before(call)
        try:
            plain = call.plain()
        except NonFiniteError:
            before.restore()
            return None
        after = _Before(call)
        before.restore()
        try:
            program = call.record(plain)
        except Exception as error:
            self._give_up(elbo, _first_line(error))
        else:
            if len(self._programs) == MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = program
            if elbo.compile is True:
                self._compile(program, call)
        finally:
            after.restore()
        return plain.evaluation

    def _compare(self, program: Program, call: StepCall) -> Evaluation | None:
        """A plain step, which the recording must agree with."""
        before = _Before(call)
        outcome = program.run(call)
        before.restore()
        agrees = math.isfinite(outcome.check.item())
        try:
            plain = call.plain()
        except NonFiniteError:
            before.restore()
            if agrees:
                self._tell(call.elbo, "a recorded step is finite where a plain one is not")
            return None
        if any(value is not program.params.get(name) for name, value in plain.params.items()):
            self._programs.clear()  # a new parameter: record again
        elif agrees:
            difference = outcome.evaluation.differs_from(plain.evaluation)
            if difference:
                self._tell(call.elbo, f"a recorded step disagrees with a plain one: {difference}")
        return plain.evaluation

    def _compile(self, program: Program, call: StepCall) -> None:
        try:
            program.compile(call)
        except CompilerError as error:
            warn_user(
                f"{type(call.elbo).__name__} runs recorded, but not compiled: {error}. Cure: a C++ "
                'compiler, or compile="trace"',
            )

    def _give_up(self, elbo: ImplicitELBO, cause: str) -> None:
        """Take plain steps from now on; who did not ask for others need not know."""
        if elbo.compile == "auto":
            self.refusal = cause
            self._programs.clear()
        else:
            self._tell(elbo, cause)

    def _tell(self, elbo: ImplicitELBO, cause: str) -> None:
        self.refusal = cause
        self._programs.clear()
        warn_user(
            f"{type(elbo).__name__} runs without compilation from step {elbo.num_steps_taken} on: "
            f"{cause}. A step is recorded once, so what it reads beside the tensors of its "
            "arguments must stay the same. Cure: pass what changes as a tensor argument, or "
            "compile=False",
        )


class _Before:
    """What a step draws and takes over, to take it again."""

    def __init__(self, call: StepCall) -> None:
        self.elbo = call.elbo
        self.random = RandomState(call.arguments.tensors)
        self.carried = {name: tensor.clone() for name, tensor in self.elbo.carried().items()}

    def restore(self) -> None:
        self.random.restore()
        self.elbo.carry(self.carried)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, Untraceable) else f"{type(error).__name__}: {text}"
