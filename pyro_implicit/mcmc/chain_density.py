# SPDX-License-Identifier: Apache-2.0
"""The density that chains walk on, and where a guide lets them start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.mcmc.noise_space import NoiseSpaceReparam

__all__ = ["ChainDensity", "NoiseDensity", "Starts", "latent_draws"]

Guide = Callable[..., Any] | Mapping[str, Tensor]


class ChainDensity:
    """A model's log-density over its unconstrained latents, for chains.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> density = ChainDensity(LatentDensity(model))
    >>> density.score(torch.ones(2, 1))[1]
    tensor([[-1.],
            [-1.]])

    :param density: of the model.
    """

    space = "latent"

    def __init__(self, density: LatentDensity) -> None:
        self.density = density

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density ``(num_chains,)`` and gradient ``(num_chains, d)`` at ``(num_chains, d)``."""
        return self.density.score(points)

    def to_latent(self, points: Tensor) -> Tensor:
        """Unconstrained latents ``(num_chains, latent_dim)`` of points."""
        return points

    def check(self, points: Tensor) -> None:
        """Warn of what makes draws wrong; here nothing does."""


class NoiseDensity(ChainDensity):
    r"""The same over the noise of an injective guide,

    .. math:: \log p(x, f(z)) + \log |\det J_f(z)|,

    which is the standard normal if the guide is the posterior.

    :param density: of the model.
    :param guide: an :class:`~pyro_implicit.AutoImplicit` whose ``get_transform`` knows f.
    """

    space = "noise"

    def __init__(self, density: LatentDensity, guide: AutoImplicit) -> None:
        super().__init__(density)
        self.guide = guide

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density ``(num_chains,)`` and gradient ``(num_chains, d)`` at noise."""
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


class Starts(NamedTuple):
    """Where chains start, ``(num_chains, d)``, and how many starts were replaced because the
    density was not finite there."""

    points: Tensor
    replaced: int


@torch.no_grad()
def latent_draws(
    density: LatentDensity, guide: Guide, num_draws: int, args: tuple, kwargs: dict[str, Any]
) -> Tensor:
    """Draws of a guide, or given ones, as vectors ``(num_draws, latent_dim)``.

    Given draws are taken in turn: of fewer draws than are wanted each starts several chains.

    :raises ValueError: for a guide, or draws, of another model.
    """
    if isinstance(guide, Mapping):
        draws = dict(guide)
    else:
        draws = draw(guide, num_draws, *args, **kwargs)
    _check_sites(density, draws, "the draws" if isinstance(guide, Mapping) else _name(guide))
    like = density.init_loc
    vectors = density.unconstrain({name: draws[name].to(like) for name in density.shapes})
    return vectors[torch.arange(num_draws, device=like.device) % len(vectors)]


def finite_starts(score: Any, points: Tensor, who: str) -> Starts:
    """Replace starts at which the density or its gradient is not finite by others of them.

    :raises ValueError: if it is finite at none.
    """
    log_prob, gradient = score(torch.where(points.isfinite(), points, torch.zeros_like(points)))
    finite = points.isfinite().all(-1) & log_prob.isfinite() & gradient.isfinite().all(-1)
    lost = int((~finite).sum())
    if lost == len(points):
        raise ValueError(
            f"the model's log-density or its gradient is finite at none of {lost} draws of {who}. "
            "Cure: check the data for NaN and the supports of the observed sites; train the guide "
            "first, or start from draws of the prior"
        )
    if lost:
        warnings.warn(
            f"the model's log-density is not finite at {lost} of {len(points)} draws of {who}: "
            "these chains start from others of the draws",
            stacklevel=4,
        )
        good = finite.nonzero().squeeze(-1)
        points = points.clone()
        points[~finite] = points[good[torch.randint(len(good), (lost,), device=good.device)]]
    return Starts(points, lost)


def _check_sites(density: LatentDensity, draws: dict[str, Tensor], who: str) -> None:
    missing = sorted(set(density.shapes) - set(draws))
    extra = sorted(set(draws) - set(density.shapes))
    if missing:
        raise ValueError(
            f"{who} has no draws of {missing}, which the model samples"
            + (f", but has {extra}, which it does not" if extra else "")
            + ". Cure: a guide of this model, with every latent site"
        )
    if extra:
        warnings.warn(f"{who} has {extra}, which the model does not sample: left out", stacklevel=4)
    expected = density.constrain(density.init_loc.unsqueeze(0))
    counts = set()
    for name in density.shapes:
        shape, wanted = tuple(draws[name].shape), tuple(expected[name].shape[1:])
        counts.add(shape[:1])
        if len(shape) == 0 or shape[1:] != wanted or shape[0] == 0:
            raise ValueError(
                f"{who} has draws of shape {shape} at site '{name}', but the model wants "
                f"{('num_draws', *wanted)}. Cure: a guide of this model, called with the same data"
            )
    if len(counts) > 1:
        raise ValueError(f"{who} has different numbers of draws by site: {sorted(counts)}")


def _name(guide: Any) -> str:
    return f"the guide {getattr(guide, '__name__', type(guide).__name__)}"


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
