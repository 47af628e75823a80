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
from pyro_implicit.density.cost import PER_RUN, count_operations
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["TracedScore"]

Score = Callable[[Tensor], tuple[Tensor, Tensor]]

MAX_PROGRAMS = 8
# Seconds for each operation, measured as those in density/cost.py.
PER_RECORDED = 2.5e-4
PER_SAVED = 6e-6


class TracedScore:
    """A log-density with its gradient, without what Pyro, vmap and autograd take beside kernels.

    The second call for a number of vectors records the operations, and the first, second, fourth,
    eighth ... call after that is compared with the density itself. One that cannot be recorded,
    because its model branches on values or cannot run inside ``torch.func.vmap``, is called as it
    is, and ``refusal`` says why. Numbers are the same to the last bit.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_implicit.density import Target
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> score = TracedScore(Target(model).score)
    >>> log_prob, gradient = score(torch.ones(3, 1))
    >>> gradient.flatten()
    tensor([-1., -1., -1.])

    :param score: of vectors ``(num_draws, latent_dim)``, as :meth:`Target.score`; the model
        and its data stay as they are.
    :param num_calls: how many are to come; where they do not repay a recording, there is none.
    :param compile: ``"auto"`` as above. ``"trace"`` records however few are to come, and warns
        where it cannot; with ``True`` inductor makes few kernels of the recording, and numbers
        differ by rounding; ``False`` calls it as it is.
    """

    def __init__(
        self, score: Score, num_calls: float = math.inf, compile: CompileMode = "auto"
    ) -> None:
        self.plain, self.num_calls = score, num_calls
        self.compile: CompileMode = compile
        self.refusal: str | None = None
        """Why it is called as it is, None if it is recorded."""
        self._programs: dict[Any, _Program | None] = {}

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The log-density and its gradient, constants.

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
            if len(self._programs) == MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = None
            # A single call of its size, as of chains that are started anew, is not worth it.
            return self._first(latent) if is_new else self._record(key, latent)
        self._programs[key] = program
        program.num_calls += 1
        if program.num_calls & (program.num_calls - 1):
            log_prob, score = program.function([latent])
            return log_prob, score
        return self._checked(program, latent)

    def log_prob(self, latent: Tensor) -> Tensor:
        """The log-density, which can be differentiated once, ``(num_draws,)``."""
        with torch.no_grad():
            log_prob, score = self(latent)
        return log_prob + ((latent - latent.detach()) * score).sum(-1)

    def _first(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        if self.compile != "auto" or not math.isfinite(self.num_calls):
            return self.plain(latent)
        found: list[tuple[Tensor, Tensor]] = []
        operations = count_operations(lambda: found.append(self.plain(latent)))
        saved = self.num_calls * (PER_RUN + PER_SAVED * operations)
        if saved < 2 * PER_RECORDED * operations:
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
        """Call it as it is from now on; who did not ask for more need not know."""
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
