# SPDX-License-Identifier: Apache-2.0
"""What tells a training when it was best: draws that it does not learn from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_implicit.mcmc.density_at_draws import DensityAtDraws

__all__ = ["Best", "HeldOut"]

CHUNK = 256


class Best:
    """The likeliest parameters so far."""

    def __init__(self, parameters: list[Tensor], score: float) -> None:
        self.parameters, self.score, self.age = parameters, score, 0
        self._values = [parameter.detach().clone() for parameter in parameters]

    def update(self, score: float) -> None:
        self.age += 1
        if score > self.score:
            self.score, self.age = score, 0
            self._values = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in zip(self.parameters, self._values, strict=True):
            parameter.copy_(value)


class HeldOut:
    """The mean log-density of held-out draws; those where it is not finite at first do not count,
    unless that is all of them."""

    def __init__(self, density: DensityAtDraws) -> None:
        self._density = density
        self._rows = torch.arange(density.num_draws, device=density.device)
        finite = self._log_q().isfinite()
        if finite.any():
            self._rows = self._rows[finite]

    def __call__(self) -> float:
        return self._log_q().nan_to_num(nan=-math.inf, neginf=-math.inf).mean().item()

    @torch.no_grad()
    def _log_q(self) -> Tensor:
        return torch.cat([self._density.log_prob(rows) for rows in self._rows.split(CHUNK)])
