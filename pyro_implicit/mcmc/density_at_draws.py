# SPDX-License-Identifier: Apache-2.0
"""A guide's exact log-density at draws that are not its own, differentiable in its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.guides import AutoImplicit, AutoMixture

__all__ = ["DensityAtDraws", "InjectiveDensity", "MixtureDensity"]

FEW_STEPS, MANY_STEPS = 1, 30
NEAR = 1e-4  # relative; the last step of Newton's method squares it
LEAST_SHARE = 1e-3


class DensityAtDraws:
    """Log q at draws ``(num_draws, latent_dim)`` in unconstrained space.

    :param guide: one of Pyro's autoguides with a density over the latent vector.
    :param latent: in the guide's order of its sites.
    """

    def __init__(self, guide: Any, latent: Tensor) -> None:
        self.guide, self.latent = guide, latent
        self.num_draws, self.device = len(latent), latent.device

    def log_prob(self, rows: Tensor) -> Tensor:
        """The log-density of some of the draws.

        :param rows: their indices, ``(n,)``.
        :returns: ``(n,)``.
        """
        return self.guide.get_posterior().log_prob(self.latent[rows])

    def objective(self, rows: Tensor) -> Tensor:
        """What training maximises, ``()``: the mean log-density."""
        return self.log_prob(rows).mean()


class InjectiveDensity(DensityAtDraws):
    r"""Of an injective generator, :math:`\log q(f(z)) = \log N(z; 0, I) - \log |\det J_f(z)|`.

    The noise of each draw is found by Newton's method, from where it was the last time, and its
    gradient by the parameters of f by the implicit function theorem: with h the right-hand side as
    a function of z,

    .. math:: \log q(\theta) = h(z) - (f(z) - \theta)^\top J_f^{-\top} \nabla h(z),

    whose last factor is a constant, has the right gradient where :math:`f(z) = \theta`, and near
    there the right value, but for the square of the distance.
    """

    def __init__(self, guide: AutoImplicit, latent: Tensor) -> None:
        super().__init__(guide, latent)
        self._noise = torch.full_like(latent, torch.nan)

    def log_prob(self, rows: Tensor) -> Tensor:
        """As above; -inf at a draw whose noise is not found."""
        transform, *frame = self.guide.get_transform().parts
        value = self.latent[rows]
        log_det = value.new_zeros(len(rows))
        for part in reversed(frame):
            outer, value = value, part.inv(value)
            log_det = log_det + part.log_abs_det_jacobian(value, outer)
        generator = transform.generator
        start, found = self._solve(generator, value.detach(), rows)
        if not found.any():
            return value.new_full((len(rows),), -math.inf)
        start, value = start[found], value[found]
        with torch.enable_grad():
            noise = start.requires_grad_()
            around = generator.linearise(noise)
            log_q = self.guide.get_base_dist().log_prob(noise) - around.log_abs_det()
            (slope,) = torch.autograd.grad(log_q.sum(), noise, retain_graph=True)
        pull = around.solve_transposed(slope)
        log_q = log_q - ((around.value - value) * pull).sum(-1)
        result = log_q.new_full((len(rows),), -math.inf).masked_scatter(found, log_q)
        return result - log_det

    def objective(self, rows: Tensor) -> Tensor:
        log_q = self.log_prob(rows)
        return log_q[log_q > -math.inf].mean()

    @torch.no_grad()
    def _solve(self, generator: Any, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The noise of generator values, nearly, and where it was found."""
        noise = self._noise[rows]
        found = ~noise.isnan().any(-1)
        if found.any():
            noise[found], near = _newton(generator, value[found], noise[found], FEW_STEPS)
            found = found.masked_scatter(found, near)
        if not found.all():
            noise[~found], near = _from_scratch(generator, value[~found])
            found = found.masked_scatter(~found, near)
        self._noise[rows] = noise.masked_fill(~found.unsqueeze(-1), torch.nan)
        return noise, found


class MixtureDensity(DensityAtDraws):
    """Of a mixture, each of whose components learns from the draws that it is responsible for.

    The responsibilities are those at the start, as in one round of expectation maximisation; the
    weights stay.
    """

    def __init__(self, guide: AutoMixture, latent: Tensor) -> None:
        super().__init__(guide, latent)
        self._parts = [InjectiveDensity(part, latent) for part in guide.components]
        self._shares: Tensor | None = None

    def log_prob(self, rows: Tensor) -> Tensor:
        return self.log_joint(rows).logsumexp(-1)

    def objective(self, rows: Tensor) -> Tensor:
        if self._shares is None:
            with torch.no_grad():
                parts = torch.arange(self.num_draws, device=self.device).split(512)
                log_q = torch.cat([self.log_joint(part) for part in parts])
            self._shares = log_q.softmax(-1).nan_to_num()
        total = self.latent.new_zeros(())
        for k, part in enumerate(self._parts):
            own = rows[self._shares[rows, k] > LEAST_SHARE]
            if len(own):
                log_q = part.log_prob(own)
                share = self._shares[own, k].masked_fill(log_q == -math.inf, 0.0)
                total = total + share @ log_q.clamp(min=torch.finfo(log_q.dtype).min)
        return total / len(rows)

    def log_joint(self, rows: Tensor) -> Tensor:
        """Of each component, its weight included, ``(n, num_components)``."""
        parts = torch.stack([part.log_prob(rows) for part in self._parts], -1)
        return parts + self.guide.log_weights.detach().log_softmax(0)


def _from_scratch(generator: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`_newton`, without a start."""
    try:
        noise = generator.inverse(value)
    except NotImplementedError:
        return _newton(generator, value, torch.zeros_like(value), MANY_STEPS)
    return noise, noise.isfinite().all(-1)


def _newton(generator: Any, value: Tensor, noise: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Newton's method from a start, damped, each row by itself.

    :returns: noise, and where it gives the value but for a ten-thousandth.
    """
    allowed = NEAR * (1 + value.abs().amax(-1))
    error = (generator(noise) - value).abs().amax(-1)
    noise, size = noise.clone(), torch.ones_like(allowed)
    for _ in range(num_steps):
        rows = (~(error <= allowed)).nonzero().squeeze(-1)
        if len(rows) == 0:
            break
        around = generator.linearise(noise[rows])
        step = torch.linalg.solve_ex(around.jacobian(), around.value - value[rows])[0]
        trial = noise[rows] - size[rows].unsqueeze(-1) * step
        trial_error = (generator(trial) - value[rows]).abs().amax(-1)
        better = trial_error < error[rows]
        noise[rows] = torch.where(better.unsqueeze(-1), trial, noise[rows])
        error[rows] = torch.where(better, trial_error, error[rows])
        size[rows] = torch.where(better, (2 * size[rows]).clamp(max=1), size[rows] / 4)
    return noise, error <= allowed
