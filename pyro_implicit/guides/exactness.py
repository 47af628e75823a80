# SPDX-License-Identifier: Apache-2.0
"""Exact densities of guides: injective generators as transforms, and which guides have them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, constraints

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import as_generator
from pyro_implicit.generators.base import Differentiable

__all__ = ["GeneratorTransform", "check_exact", "has_exact_density", "why_inexact"]


def why_inexact(guide: Any) -> str:
    """Say why an :class:`AutoImplicit` has no exact density, with the cure; empty if it has one.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoImplicit(model)
    >>> _ = guide()
    >>> why_inexact(guide).split(".")[0]
    'GatedMLP may give one value to several noises'

    :param guide: a guide that was called before.
    """
    try:
        guide.get_transform()
    except NotImplementedError as error:
        return str(error)
    return ""


@torch.no_grad()
def has_exact_density(guide: Any) -> bool:
    """Check whether a guide has an exact density.

    Such guides are injective :class:`AutoImplicit` guides, and mixtures of guides whose generators
    have an ``inverse``.

    :param guide: a guide that was called before.
    """
    check = getattr(guide, "_has_exact_density", None)
    return check is not None and check()


CURE = (
    "Cure: AutoImplicit(model, AutoregressiveGenerator), or for many latents AutoImplicit(model, "
    "lambda size: ResidualGenerator(size, core_dim)), trained by InjectiveELBO"
)


class GeneratorTransform(Transform):
    """The map from noise to value, with the generator's log-determinant.

    For a generator without ``inverse``, only the last computed value can be inverted, with
    ``cache_size=1``.

    **Example:**

    >>> import torch
    >>> from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
    >>> transform = GeneratorTransform(AutoregressiveGenerator(output_dim=3))
    >>> noise = torch.randn(5, 3)
    >>> transform.log_abs_det_jacobian(noise, transform(noise)).shape
    torch.Size([5])
    >>> torch.allclose(transform.inv(transform(noise)), noise, atol=1e-4)
    True

    :param generator: an injective :class:`~pyro_implicit.generators.Generator` of equal noise and
        output dimension.
    :param cache_size: as in torch.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    def __init__(self, generator: Differentiable, cache_size: int = 0) -> None:
        super().__init__(cache_size)
        self.generator = generator

    def with_cache(self, cache_size: int = 1) -> GeneratorTransform:
        """Return the transform with another cache size."""
        return GeneratorTransform(self.generator, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def _inverse(self, y: Tensor) -> Tensor:
        noise = self.generator.inverse(y)
        # The noise of an overflowing value is infinite, of density 0.
        return noise.masked_fill(noise.isnan(), math.inf)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the generator's log-determinant, ``(*batch)``, at the noise x, ``(*batch, m)``."""
        return self.generator.linearise(x).log_abs_det()


def check_exact(distribution: Implicit, noise_dim: int) -> None:
    """Check that a guide's distribution, without its frame, has an exact density.

    :raises NotImplementedError: if it has none.
    """
    (size,) = distribution.event_shape
    if isinstance(distribution, SemiImplicit):
        reason = (
            "the noise that a semi-implicit guide adds to its generator hides its exact density"
        )
    elif noise_dim != size:
        reason = (
            f"the generator turns {noise_dim} noise dimensions into {size} latents, but an exact "
            "density requires equal numbers"
        )
    elif not as_generator(distribution.generator).injective:
        reason = f"{type(distribution.generator).__name__} may give one value to several noises"
    else:
        return
    raise NotImplementedError(f"{reason}. {CURE}")
