# SPDX-License-Identifier: Apache-2.0
"""A log-density and its gradient, recorded once for each number of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.compiled import (
    CompileMode,
    CompilerError,
    RecordedFunction,
    Untraceable,
    rounding,
)
from pyro_implicit.density.cost import count_operations
from pyro_implicit.density.policy import COST, RUNS
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["TracedScore"]

Score = Callable[[Tensor], tuple[Tensor, Tensor]]


class TracedScore:
    """A log-density with its gradient, without the overhead of Pyro, ``vmap`` and autograd.

    The second call for a number of vectors records the operations. The first, second, fourth,
    eighth ... call after it is compared with the log-density itself. If it cannot be recorded,
    because the model branches on values or cannot run inside ``torch.func.vmap``, every call
    evaluates it as it is, and ``refusal`` says why. Results are bit-identical.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_implicit.density import Target
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> score = TracedScore(Target(model).score)
    >>> log_prob, gradient = score(torch.ones(3, 1))
    >>> gradient.flatten()
    tensor([-1., -1., -1.])

    :param score: a function of vectors ``(num_draws, latent_dim)``, such as :meth:`Target.score`,
        of a model and data that stay the same.
    :param num_calls: the number of calls that are expected; too few for a recording to save time
        give no recording.
    :param compile: ``"auto"`` as above. ``"trace"`` always records, and warns if it cannot. With
        ``True`` inductor compiles the recording, and results differ by rounding. ``False`` never
        records.
    """

    def __init__(
        self, score: Score, num_calls: float = math.inf, compile: CompileMode = "auto"
    ) -> None:
        self.plain, self.num_calls = score, num_calls
        self.compile: CompileMode = compile
        #: Why it is not recorded, if it is not.
        self.refusal: str | None = None
        self._programs: dict[Any, _Program | None] = {}

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        if self.compile is False or self.refusal is not None or len(latent) == 0:
            return self.plain(latent)
        latent = latent.detach().contiguous()
        key = (latent.shape, latent.dtype, latent.device)
        is_new = key not in self._programs
        program = self._programs.pop(key, None)  # put back as the latest
        if program is None or not program.function.holds():
            if len(self._programs) == RUNS.max_recordings:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = None
            # Sizes that occur once, as when chains are started anew, are not worth a recording.
            return self._first(latent) if is_new else self._record(key, latent)
        self._programs[key] = program
        program.num_calls += 1
        if program.num_calls & (program.num_calls - 1):
            log_prob, score = program.function([latent])
            return log_prob, score
        return self._checked(program, latent)

    def log_prob(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable once, ``(num_draws,)``."""
        with torch.no_grad():
            log_prob, score = self(latent)
        return log_prob + ((latent - latent.detach()) * score).sum(-1)

    def _first(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        if self.compile != "auto" or not math.isfinite(self.num_calls):
            return self.plain(latent)
        found: list[tuple[Tensor, Tensor]] = []
        operations = count_operations(lambda: found.append(self.plain(latent)))
        saved = self.num_calls * (COST.per_run + COST.saved_per_operation * operations)
        if saved < 2 * COST.per_recorded * operations:
            self.refusal = (
                f"{self.num_calls:g} calls do not repay the recording of {operations} operations"
            )
        return found[0]

    def _record(self, key: Any, latent: Tensor) -> tuple[Tensor, Tensor]:
        found = self.plain(latent)
        inputs = latent.clone()
        try:
            function = RecordedFunction(lambda: self.plain(inputs), [inputs])
        except Untraceable as error:
            self._refuse(str(error))
        except Exception as error:  # of the model, which a plain call did not raise
            self._refuse(first_line(error))
        else:
            self._programs[key] = _Program(function)
            if self.compile is True:
                self._compile(function, inputs)
        return found

    def _compile(self, function: RecordedFunction, inputs: Tensor) -> None:
        try:
            function.compile([inputs])
        except CompilerError as error:
            warn_user(
                f"the log-density runs recorded, but not compiled: {error}. Cure: a C++ compiler, "
                'or compile="trace"'
            )

    def _refuse(self, cause: str) -> None:
        """Never record from now on; warn if recording was asked for."""
        self.refusal = cause
        self._programs.clear()
        if self.compile != "auto":
            warn_user(f"the log-density runs without compilation: {cause}. Cure: compile=False")

    def _checked(self, program: _Program, latent: Tensor) -> tuple[Tensor, Tensor]:
        found = self.plain(latent)
        for part, expected in zip(program.function([latent]), found, strict=True):
            finite = expected.isfinite()
            scale = expected.where(finite, 0).abs().max()
            tolerance = rounding(part.dtype) * (1 + scale)
            same = (part == expected) | (part.isnan() & expected.isnan())
            difference = torch.where(same, 0.0, (part - expected).abs())
            if not (difference <= tolerance).all():
                self._refuse("the recording disagrees with the density itself")
                break
        return found


class _Program:
    def __init__(self, function: RecordedFunction) -> None:
        self.function = function
        self.num_calls = 0
