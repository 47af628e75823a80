# SPDX-License-Identifier: Apache-2.0
"""The score of a latent density, recorded once for each number of vectors."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from pyro_implicit.compiled import RecordedFunction, Untraceable
from pyro_implicit.density.latent_density import LatentDensity

__all__ = ["TracedScore"]

MAX_PROGRAMS = 8
TOLERANCE = {torch.float64: 1e-8}
DEFAULT_TOLERANCE = 1e-3


class TracedScore:
    """:meth:`LatentDensity.score` without Pyro's and autograd's share of the time.

    The first call for a number of vectors records the operations, and each first, second, fourth,
    eighth ... call after that is compared with the density itself. A density that cannot be
    recorded, because its model branches on values or cannot run inside ``torch.func.vmap``, is
    called as it is.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(1.0, 2.0))
    >>> score = TracedScore(LatentDensity(model))
    >>> score(torch.zeros(3, 1))
    (tensor([-1.7371, -1.7371, -1.7371]), tensor([[0.2500],
            [0.2500],
            [0.2500]]))

    :param density: whose model and data stay as they are.
    """

    def __init__(self, density: LatentDensity) -> None:
        self.density = density
        self.refusal: str | None = None
        """Why the density is called as it is, if it cannot be recorded."""
        self._programs: dict[tuple, tuple[RecordedFunction, int]] = {}

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        if self.refusal is not None or len(latent) == 0:
            return self.density.score(latent)
        latent = latent.detach().contiguous()
        key = (latent.shape, latent.dtype, latent.device)
        program, num_calls = self._programs.pop(key, (None, 0))
        if program is None or not program.holds():
            return self._record(key, latent)
        num_calls += 1
        self._programs[key] = program, num_calls
        log_prob, score = program([latent])
        if num_calls & (num_calls - 1) == 0:
            self._check(latent, log_prob, score)
        return log_prob, score
