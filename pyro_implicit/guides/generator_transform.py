# SPDX-License-Identifier: Apache-2.0
"""An injective generator as a transform of its noise."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributions import Transform, constraints

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import as_generator
from pyro_implicit.generators.base import Differentiable

__all__ = ["GeneratorTransform", "check_exact"]

CURE = (
    "Cure: AutoImplicit(model, AutoregressiveGenerator), or for many latents AutoImplicit(model, "
    "lambda size: ResidualGenerator(size, core_dim)), trained by InjectiveELBO"
)


class GeneratorTransform(Transform):
    """Noise to value, with the log-determinant that the generator knows.

    Without the generator's ``inverse``, only the last value computed has one, with
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

    :param generator: an injective :class:`~pyro_implicit.generators.Generator` of as many values as
        noise.
    :param cache_size: as in torch.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    def __init__(self, generator: Differentiable, cache_size: int = 0) -> None:
        super().__init__(cache_size)
        self.generator = generator

    def with_cache(self, cache_size: int = 1) -> GeneratorTransform:
        """The same transform with another cache."""
        return GeneratorTransform(self.generator, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def _inverse(self, y: Tensor) -> Tensor:
        noise = self.generator.inverse(y)
        # A value too far out for the numbers' range has its noise at infinity, of density 0.
        return noise.masked_fill(noise.isnan(), math.inf)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """The generator's, of the noise ``x``, ``(*batch, m)``; ``y`` is not needed.

        :returns: ``(*batch)``.
        """
        return self.generator.linearise(x).log_abs_det()


def check_exact(distribution: Implicit, noise_dim: int) -> None:
    """Refuse a guide's distribution that does not know its density.

    :param distribution: of the latents, without their frame.
    :param noise_dim: size of its noise.
    :raises NotImplementedError: saying why, and the cure.
    """
    (size,) = distribution.event_shape
    if isinstance(distribution, SemiImplicit):
        reason = (
            "the noise that a semi-implicit guide adds to its generator hides its exact density"
        )
    elif noise_dim != size:
        reason = (
            f"the generator turns {noise_dim} noise dimensions into {size} latents, but an exact "
            "density wants as many of both"
        )
    elif not as_generator(distribution.generator).injective:
        reason = f"{type(distribution.generator).__name__} may give one value to several noises"
    else:
        return
    raise NotImplementedError(f"{reason}. {CURE}")
