# SPDX-License-Identifier: Apache-2.0
"""A target in the coordinates in which chains walk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.target import Target
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.mcmc.frame import WhiteningFrame
from pyro_implicit.mcmc.nuts import warn_of_folds
from pyro_implicit.mcmc.spaces.conditional_reparam import ConditionalReparam

__all__ = ["Fitted", "GuideNoise", "MixedSpace", "Space", "traced_value"]


class Fitted(NamedTuple):
    """The parameters that a conditional space learnt from draws; they determine the space.

    ``choice`` is the index of a map among all found maps; its scaled blocks have the ``laws``.
    """

    choice: int
    laws: tuple[Tensor, ...]


class Space:
    """The latents themselves; subclasses map other points to latents, one to one.

    A kernel only sees :meth:`white_score`. It does not know in which space it walks.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> Space(Target(model)).score(torch.ones(2, 1))[1]
    tensor([[-1.],
            [-1.]])

    :param target: the posterior of the latents.
    :param num_calls: expected calls of :meth:`score`, which decide whether it is recorded.
    :param compile: how the score is run, as a step of an ELBO.
    """

    name = "latent"
    middle: Tensor | None = None
    """The middle of the posterior, ``(latent_dim,)``, if the space was made from it."""
    fitted: Fitted | None = None
    """The parameters learnt from draws; see :meth:`refitted`."""
    reparams: dict[str, ConditionalReparam] = {}
    """The maps of the space by site."""

    def __init__(
        self, target: Target, num_calls: float = math.inf, compile: CompileMode = "auto"
    ) -> None:
        self.target = target
        self._traced = TracedScore(self.plain_score, num_calls, compile)

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density ``(num_chains,)`` and gradient ``(num_chains, d)`` at ``(num_chains, d)``."""
        return self._traced(points)

    def white_score(self, frame: WhiteningFrame, white: Tensor) -> tuple[Tensor, Tensor]:
        """The same at white coordinates of a frame."""
        log_density, gradient = self.score(frame.to_points(white))
        return log_density, frame.pull_back(gradient)

    def plain_score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The score without a recording, whose operations would count in the cost of chains."""
        return self.target.score(points)

    def to_latent(self, points: Tensor) -> Tensor:
        """Map points to unconstrained latents, ``(num_chains, latent_dim)``."""
        return points

    def to_points(self, latent: Tensor) -> Tensor:
        """Map unconstrained latents to points, ``(num_chains, d)``."""
        return latent

    def check(self, points: Tensor) -> None:
        """Warn if the map is not one to one at some points."""

    def refitted(self, latent: Tensor, anew: bool = False) -> Space | None:
        """Return the space that suits draws of the posterior better; None if this one suits.

        :param latent: the draws, ``(num_draws, latent_dim)``.
        :param anew: whether chains have shown that this space does not suit.
        """
        return None


def traced_value(
    function: Callable[[Tensor], Tensor], num_calls: float, compile: CompileMode
) -> Callable[[Tensor], Tensor]:
    """Record a function of points that needs no gradient."""

    @torch.no_grad()
    def score(points: Tensor) -> tuple[Tensor, Tensor]:
        return function(points), points[:, :0]  # a recording has a value and a gradient

    traced = TracedScore(score, num_calls, compile)
    return lambda points: traced(points)[0]


class MixedSpace(Space):
    """Latents of which the last coordinates are discrete, with the terms of their log-density.

    :param target: the posterior of the latents.
    :param num_calls: expected calls of :meth:`score` and :meth:`terms`.
    :param compile: how both are run, as a step of an ELBO.
    """

    def __init__(
        self, target: Target, num_calls: float = math.inf, compile: CompileMode = "auto"
    ) -> None:
        super().__init__(target, num_calls, compile)
        assert target.elements is not None
        self.elements = target.elements
        self._traced_terms = traced_value(target.terms, num_calls, compile)
        self._traced_log_prob = traced_value(target.log_prob, num_calls, compile)

    def terms(self, points: Tensor) -> Tensor:
        """Return the terms of the log-density, ``(num_points, num_terms)``."""
        return self._traced_terms(points)

    def log_prob(self, points: Tensor) -> Tensor:
        """Return the log-density without its gradient, ``(num_points,)``."""
        return self._traced_log_prob(points)


class GuideNoise(Space):
    r"""The noise of an injective guide,

    .. math:: \log p(x, f(z)) + \log |\det J_f(z)|,

    which is the standard normal if the guide is the posterior.

    :param target: the posterior of the latents.
    :param guide: an :class:`~pyro_implicit.AutoImplicit` whose ``get_transform`` is f.
    :param num_calls: see :class:`Space`.
    :param compile: see :class:`Space`.
    """

    name = "noise"

    def __init__(
        self,
        target: Target,
        guide: AutoImplicit,
        num_calls: float = math.inf,
        compile: CompileMode = "auto",
    ) -> None:
        super().__init__(target, num_calls, compile)
        self.guide = guide

    def plain_score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), _frozen(self.guide):
            noise = points.detach().requires_grad_()
            transform = self.guide.get_transform()
            latent = transform(noise)
            log_det = transform.log_abs_det_jacobian(noise, latent)
            log_prob = self.target.log_prob(latent) + log_det
            (gradient,) = torch.autograd.grad(log_prob.sum(), noise)
        return log_prob.detach(), gradient

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """Map noise to latents in the guide's frame, ``(num_chains, latent_dim)``."""
        return self.guide.get_transform()(points)

    def check(self, points: Tensor) -> None:
        """Warn if the generator folds the noise at some points."""
        warn_of_folds(self.guide, points)


@contextmanager
def _frozen(guide: AutoImplicit) -> Iterator[None]:
    wanted = [parameter for parameter in guide.parameters() if parameter.requires_grad]
    with poutine.block():
        for parameter in wanted:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in wanted:
                parameter.requires_grad_(True)
