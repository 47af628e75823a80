# SPDX-License-Identifier: Apache-2.0
"""An injective generator as a transform of its noise."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributions import Transform, constraints

from pyro_implicit.distributions import Implicit, SemiImplicit

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

    :param generator: a module from ``(*batch, m)`` to ``(*batch, m)``, injective, with a method
        ``log_abs_det_jacobian(noise)`` of shape ``batch``, and perhaps ``inverse(value)``, as
        :class:`~pyro_implicit.generators.autoregressive.AutoregressiveGenerator` has it.
    :param cache_size: as in torch.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    def __init__(self, generator: Any, cache_size: int = 0) -> None:
        super().__init__(cache_size)
        self.generator = generator

    def with_cache(self, cache_size: int = 1) -> GeneratorTransform:
        """The same transform with another cache."""
        return GeneratorTransform(self.generator, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def _inverse(self, y: Tensor) -> Tensor:
        if not hasattr(self.generator, "inverse"):
            raise NotImplementedError(
                f"{type(self.generator).__name__} has no method inverse, so its density is known "
                "only at the value that it computed last. Cure: AutoImplicit(model, "
                "AutoregressiveGenerator)"
            )
        noise = self.generator.inverse(y)
        # A value too far out for the numbers' range has its noise at infinity, of density 0.
        return noise.masked_fill(noise.isnan(), math.inf)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """The generator's, of the noise ``x``, ``(*batch, m)``; ``y`` is not needed.

        :returns: ``(*batch)``.
        """
        return self.generator.log_abs_det_jacobian(x)


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
    elif not hasattr(distribution.generator, "log_abs_det_jacobian"):
        reason = (
            f"{type(distribution.generator).__name__} has no method log_abs_det_jacobian, which a "
            "generator has that is injective and knows its density"
        )
    else:
        return
    raise NotImplementedError(f"{reason}. {CURE}")
