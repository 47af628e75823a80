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
    ProgramCache,
    RecordedFunction,
    disagreement,
)
from pyro_implicit.density.cost import count_operations
from pyro_implicit.density.policy import COST

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
        self._programs: ProgramCache[RecordedFunction] = ProgramCache(compile)
        self._seen: set[Any] = set()

    @property
    def compile(self) -> CompileMode:
        """How it runs; may be changed between calls."""
        return self._programs.compile

    @compile.setter
    def compile(self, mode: CompileMode) -> None:
        self._programs.compile = mode

    @property
    def refusal(self) -> str | None:
        """Why it is not recorded; None if it is."""
        return self._programs.refusal

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        programs = self._programs
        if programs.compile is False or programs.refusal is not None or len(latent) == 0:
            return self.plain(latent)
        latent = latent.detach().contiguous()
        key = (latent.shape, latent.dtype, latent.device)
        program, is_due = programs.find(key)
        if program is not None and not is_due:
            log_prob, score = program([latent])
            return log_prob, score
        if program is None and key not in self._seen:
            # Sizes that occur once, as when chains are started anew, are not worth a recording.
            self._seen.add(key)
            return self._first(latent)
        found = self.plain(latent)
        if program is None:
            inputs = latent.clone()
            programs.record(
                "the log-density",
                key,
                lambda: RecordedFunction(lambda: self.plain(inputs), [inputs]),
                lambda _: [inputs],
            )
        elif difference := disagreement(program([latent]), found):
            cause = f"a recording disagrees with it: {difference}"
            programs.give_up("the log-density", cause, is_wrong=True)
        return found

    def log_prob(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable once, ``(num_draws,)``."""
        with torch.no_grad():
            log_prob, score = self(latent)
        return log_prob + ((latent - latent.detach()) * score).sum(-1)

    def _first(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate it, and decide whether the expected calls repay a recording."""
        if self._programs.compile != "auto" or not math.isfinite(self.num_calls):
            return self.plain(latent)
        found: list[tuple[Tensor, Tensor]] = []
        operations = count_operations(lambda: found.append(self.plain(latent)))
        saved = self.num_calls * (COST.per_run + COST.saved_per_operation * operations)
        if saved < 2 * COST.per_recorded * operations:
            self._programs.give_up(
                "the log-density",
                f"{self.num_calls:g} calls do not repay the recording of {operations} operations",
            )
        return found[0]
