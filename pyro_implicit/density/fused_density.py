# SPDX-License-Identifier: Apache-2.0
"""The log-density of models with loops, whose equal operations run as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_implicit.compiled import (
    ACTIVE,
    RECORDINGS,
    FusedFunction,
    Untraceable,
    disagreement,
)
from pyro_implicit.density.cost import count_operations
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["FusedDensity"]


class FusedDensity:
    """A log-density, recorded once and fused if the model has many operations, as loops do.

    The recording is compared with the model, gradients included, and again at the first, second,
    fourth, eighth ... call. Models that cannot be recorded, or whose operations differ, run as they
    are, and ``refusal`` says why.

    :param by_model: runs the model for many vectors, ``(num_draws, latent_dim)``.
    :param of_one: runs the model for one vector, ``(latent_dim,)``.
    """

    def __init__(
        self, by_model: Callable[[Tensor], Tensor], of_one: Callable[[Tensor], Tensor]
    ) -> None:
        self.by_model, self.of_one = by_model, of_one
        self.refusal: str | None = None
        self._function: FusedFunction | None = None
        self._num_calls = 0

    def __call__(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable, ``(num_draws,)``."""
        if ACTIVE.recorder is None and self.refusal is None:
            try:
                self._prepare(latent.detach())
            except Exception as error:  # of the model, too
                self.refusal, self._function = first_line(error), None
        if self._function is None:
            return self.by_model(latent)
        return torch.func.vmap(self._function)(latent)

    def _prepare(self, latent: Tensor) -> None:
        if self._function is None:
            with torch.no_grad():
                count = count_operations(lambda: self.by_model(latent[:1]))
            if count < RECORDINGS.least_operations:
                raise Untraceable(f"it has {count} operations")
            function = FusedFunction(self.of_one, latent[0])
            self._compare(function, latent[:2])
            self._function = function
        elif not self._function.holds():
            raise Untraceable("its data were changed in place")
        else:
            self._num_calls += 1
            if self._num_calls & (self._num_calls - 1) == 0:
                self._compare(self._function, latent[:2])

    def _compare(self, function: FusedFunction, latent: Tensor) -> None:
        found, expected = (
            _score(one, latent) for one in (torch.func.vmap(function), self.by_model)
        )
        if difference := disagreement(found, expected):
            raise Untraceable(f"a recording disagrees with the model: {difference}")


def _score(log_prob: Callable[[Tensor], Tensor], latent: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        latent = latent.requires_grad_()
        values = log_prob(latent)
        (score,) = torch.autograd.grad(values.sum(), latent)
    return [values.detach(), score]
