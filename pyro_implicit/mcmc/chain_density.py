# SPDX-License-Identifier: Apache-2.0
"""The density that chains walk on, over the latents or over a guide's noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from pyro import poutine
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.target import Target
from pyro_implicit.density.traced_score import TracedScore
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.nuts import NoiseSpaceReparam

__all__ = ["ChainDensity", "NoiseDensity"]


class ChainDensity:
    """A model's log-density over its unconstrained latents, for chains.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> density = ChainDensity(Target(model))
    >>> density.score(torch.ones(2, 1))[1]
    tensor([[-1.],
            [-1.]])

    :param density: of the model.
    :param num_calls: of :meth:`score` that are to come, by which it is recorded or not.
    """

    space = "latent"
    middle: Tensor | None = None
    """Of the posterior, ``(latent_dim,)``, where the space was made from it."""
    reparams: dict[str, ConditionalReparam] = {}
    """By site, those of the space."""

    def __init__(self, density: Target, num_calls: float = math.inf) -> None:
        self.density = density
        self._traced = TracedScore(self._score, num_calls)

    def compiled(self, mode: CompileMode) -> Self:
        """This, with scores that are run so, as the steps of an ELBO."""
        self._traced.compile = mode
        return self

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density ``(num_chains,)`` and gradient ``(num_chains, d)`` at ``(num_chains, d)``."""
        return self._traced(points)

    def _score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self.density.score(points)

    def to_latent(self, points: Tensor) -> Tensor:
        """Unconstrained latents ``(num_chains, latent_dim)`` of points."""
        return points

    def to_points(self, latent: Tensor) -> Tensor:
        """The points ``(num_chains, d)`` of unconstrained latents ``(num_chains, latent_dim)``."""
        return latent

    def check(self, points: Tensor) -> None:
        """Warn of what makes draws wrong; here nothing does."""


class NoiseDensity(ChainDensity):
    r"""The same over the noise of an injective guide,

    .. math:: \log p(x, f(z)) + \log |\det J_f(z)|,

    which is the standard normal if the guide is the posterior.

    :param density: of the model.
    :param guide: an :class:`~pyro_implicit.AutoImplicit` whose ``get_transform`` knows f.
    :param num_calls: as of a :class:`ChainDensity`.
    """

    space = "noise"

    def __init__(self, density: Target, guide: AutoImplicit, num_calls: float = math.inf) -> None:
        super().__init__(density, num_calls)
        self.guide = guide

    def _score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), _frozen(self.guide):
            noise = points.detach().requires_grad_()
            transform = self.guide.get_transform()
            latent = transform(noise)
            log_det = transform.log_abs_det_jacobian(noise, latent)
            log_prob = self.density.log_prob(latent) + log_det
            (gradient,) = torch.autograd.grad(log_prob.sum(), noise)
        return log_prob.detach(), gradient

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """The generator's values, in the guide's frame, ``(num_chains, latent_dim)``."""
        return self.guide.get_transform()(points)

    def check(self, points: Tensor) -> None:
        """Warn if the generator folds the noise among these points."""
        NoiseSpaceReparam(self.guide).transform_sample(points)


@contextmanager
def _frozen(guide: AutoImplicit) -> Iterator[None]:
    """Without gradients of the guide's parameters, which nobody wants here."""
    wanted = [parameter for parameter in guide.parameters() if parameter.requires_grad]
    with poutine.block():
        for parameter in wanted:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in wanted:
                parameter.requires_grad_(True)
