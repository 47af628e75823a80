# SPDX-License-Identifier: Apache-2.0
"""What chains can walk on: the latents, their own noise, or a guide's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.target import Target
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.guides.exactness import why_inexact
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.chain_density import ChainDensity, NoiseDensity
from pyro_implicit.mcmc.conditional_space import ConditionalDensity, middle_of
from pyro_implicit.mcmc.frame import FrameKind
from pyro_implicit.runtime.user_warnings import first_line

__all__ = ["Plan", "density_of"]


@dataclass(frozen=True)
class Plan:
    """What chains are to be, before there are any."""

    sampler: Sampler
    num_chains: int
    frame: str
    kind: FrameKind
    max_gradients: int
    max_leapfrogs: int
    max_draws: int
    compile: CompileMode = "auto"


def density_of(
    density: Target, plan: Plan, space: str, middle: Tensor | None = None
) -> ChainDensity:
    """What chains in a space walk on.

    :param space: ``"latent"``, ``"noise"`` of the guide, or ``"conditional"``.
    :param middle: of the guide's draws, ``(latent_dim,)``, from which the last is made; by default
        their median.
    :raises ValueError: for the noise of a guide that is not injective, or where no latent's prior
        changes with others.
    """
    if space == "conditional":
        return _conditional(density, plan, middle)
    if space == "latent":
        return ChainDensity(density, plan.max_gradients).compiled(plan.compile)
    guide = plan.sampler.guide
    reason = f"it is a {type(guide).__name__}, and not an AutoImplicit"
    if isinstance(guide, AutoImplicit):
        reason = why_inexact(guide)
        if not reason:
            return NoiseDensity(density, guide, plan.max_gradients).compiled(plan.compile)
    raise ValueError(f'frame="noise" wants an injective guide: {reason}')


def _conditional(density: Target, plan: Plan, middle: Tensor | None) -> ConditionalDensity:
    if middle is None:
        middle = middle_of(plan.sampler)
    try:
        walked = ConditionalDensity(density, middle, plan.max_gradients)
    except RuntimeError as error:
        raise ValueError(
            'frame="conditional" wants second derivatives of the log-density, but the model raises '
            f'{first_line(error)}. Cure: frame="auto"'
        ) from error
    if not walked.reparams:
        raise ValueError(
            'frame="conditional" wants latents of location and scale that depend on other latents, '
            "or are multiplied by functions of them, and this model has none. Cure: "
            'frame="auto"'
        )
    return walked.compiled(plan.compile)
