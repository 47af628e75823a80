# SPDX-License-Identifier: Apache-2.0
"""Steps of an ELBO that were recorded once and run without Pyro."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import pyro
import torch

from pyro_implicit.compiled import CompilerError, RandomState, Untraceable
from pyro_implicit.infer.engine.evaluation import Evaluation
from pyro_implicit.infer.engine.nonfinite import NonFiniteError
from pyro_implicit.infer.engine.step_call import Program, StepCall
from pyro_implicit.runtime.user_warnings import warn_user

if TYPE_CHECKING:
    from pyro_implicit.infer.implicit_elbo import ImplicitELBO

__all__ = ["TracedSteps"]

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
