# SPDX-License-Identifier: Apache-2.0
"""Implicit sites whose generator turns noise into as many values: the density is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.engine.flat_site import FlatSite, check_generator, check_standard_normal
from pyro_implicit.infer.engine.sites import ImplicitSite
from pyro_implicit.ops import batch_jacobian
from pyro_implicit.ops.functional_gradient import InverseTransposed

__all__ = ["SquareSite", "check_square"]


class SquareSite:
    r"""The generator f of a site and its square Jacobian :math:`J_f`, with vectors for values.

    A generator may know its Jacobian better than as a dense matrix: it is asked for
    ``log_abs_det_jacobian``, ``solve_jacobian_transposed`` and ``inverse_jacobian_transposed``, as
    :class:`~pyro_implicit.ResidualGenerator` has them, then for ``value_and_jacobian``.

    :param site: one that :func:`check_square` has let pass.
    """

    def __init__(self, site: ImplicitSite) -> None:
        self._q = site.distribution
        self.noise = site.noise

    def generate(self, noise: Tensor) -> Tensor:
        """Values ``(*batch, m)`` of noise ``(*batch, m)``."""
        return self._q.generate(noise).reshape(noise.shape)

    def log_density(self, noise: Tensor) -> Tensor:
        r""":math:`\log q(f(z)) = \log N(z) - \log |\det J_f(z)|`, differentiable in z and f.

        :param noise: z, ``(*batch, m)``.
        :returns: ``(*batch)``.
        """
        method = self._method("log_abs_det_jacobian")
        if method is not None:
            log_det = method(noise, **self._context(noise))
        else:
            log_det = torch.linalg.slogdet(self.jacobian(noise)).logabsdet
        return self._q.noise_distribution.log_prob(noise) - log_det

    def solve_transposed(self, noise: Tensor, vector: Tensor) -> Tensor:
        r""":math:`J_f(z)^{-\top} v`, a constant.

        :param noise: z, ``(*batch, m)``.
        :param vector: v, ``(*batch, m)``.
        :returns: ``(*batch, m)``.
        """
        method = self._method("solve_jacobian_transposed")
        if method is not None:
            return method(noise, vector, **self._context(noise))
        with torch.no_grad():
            return torch.linalg.solve(self.jacobian(noise).mT, vector)

    @torch.no_grad()
    def inverse_transposed(self, noise: Tensor) -> InverseTransposed:
        r""":math:`J_f(z)^{-\top}`, a constant.

        :param noise: z, ``(*batch, m)``.
        """
        method = self._method("inverse_jacobian_transposed")
        if method is not None:
            return method(noise, **self._context(noise))
        return InverseTransposed(torch.linalg.inv(self.jacobian(noise)).mT, noise.new_empty(0))

    def _method(self, name: str) -> Any:
        return getattr(self._q.generator, name, None)

    def _context(self, noise: Tensor) -> dict[str, Tensor]:
        context = self._q.context
        return {} if context is None else {"context": context.expand(noise.shape[:-1] + (-1,))}

    def jacobian(self, noise: Tensor) -> Tensor:
        r""":math:`J_f(z)`, dense: ``(*batch, m, m)`` for noise ``(*batch, m)``."""
        method = self._method("value_and_jacobian")
        if method is not None:
            return method(noise, **self._context(noise))[1]
        return batch_jacobian(self.generate, noise)[1]


def check_square(site: ImplicitSite, method: str) -> None:
    """Refuse a site without an exact density.

    :param method: that wants it, for the message.
    :raises ValueError: naming site and cure.
    """
    q = site.distribution
    noise_dim, size = site.noise.shape[-1], q.event_shape.numel()
    if isinstance(q, SemiImplicit):
        raise ValueError(
            f"{method} cannot train site '{site.name}', whose distribution is SemiImplicit: the "
            "noise around the generator hides its exact density. Cure: use an ELBO for "
            "semi-implicit guides (LIVI_ELBO), or AutoImplicit or Implicit for the site"
        )
    if noise_dim != size:
        raise ValueError(
            f"{method} wants as many noise dimensions as values, but the generator of site "
            f"'{site.name}' turns {noise_dim} into {size}. Cure: "
            "AutoImplicit(model, AutoregressiveGenerator), or another "
            f"invertible generator with noise_dim={size}"
        )
    check_standard_normal(site.name, q.noise_distribution, method)
    value = site.value.reshape(site.noise.shape)
    generate = SquareSite(site).generate
    flat = FlatSite(value, torch.zeros_like(value), site.noise, generate, shared=False)
    check_generator(site.name, flat)
