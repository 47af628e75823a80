# SPDX-License-Identifier: Apache-2.0
"""Priors that are not location-scale families, as seen in unconstrained coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions.transforms import ExpTransform, Transform

__all__ = ["Unconstrained", "transform_of"]


def _of_gamma(fn: Any) -> tuple[Tensor, Tensor]:
    return (fn.concentration / fn.rate).log(), fn.concentration.rsqrt()


def _of_inverse_gamma(fn: Any) -> tuple[Tensor, Tensor]:
    return (fn.rate / fn.concentration).log(), fn.concentration.rsqrt()


#: By family, the map from unconstrained coordinates, and location and scale in them.
_FAMILIES: dict[type, tuple[Transform, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    dist.Gamma: (ExpTransform(), _of_gamma),
    dist.InverseGamma: (ExpTransform(), _of_inverse_gamma),
    dist.Weibull: (ExpTransform(), lambda fn: (fn.scale.log(), fn.concentration.reciprocal())),
}


class Unconstrained:
    r"""A prior in unconstrained coordinates, and the normal distribution at its mode there.

    For a value :math:`T(u)` with density p, the density of u is :math:`p(T(u)) |T'(u)|`. Its mode
    :math:`l` and its curvature at the mode, :math:`s^{-2}`, are functions of the parents:

    ================== ============================ =============================
    family             location :math:`l`           scale :math:`s`
    ================== ============================ =============================
    Gamma(a, b)        :math:`\log(a / b)`          :math:`a^{-1/2}`
    InverseGamma(a, b) :math:`\log(b / a)`          :math:`a^{-1/2}`
    Weibull(c, k)      :math:`\log c`               :math:`1 / k`
    ================== ============================ =============================

    T is the exponential function. The affine map
    :math:`u = l + s \epsilon` is a bijection with a known determinant, so that densities are exact
    although :math:`\epsilon` is only approximately standard normal.

    Exponential and half families have no row: s would be constant, so that priors have no funnel,
    and the linear frame of the chains suffices. Beta has none: its chains in ``fit`` stayed apart.

    **Example:**

    >>> prior = Unconstrained(dist.Gamma(torch.tensor(4.0), torch.tensor(2.0)))
    >>> round(prior.loc.item(), 3), round(prior.scale.item(), 3)
    (0.693, 0.5)

    :param fn: a distribution of one of the families, without ``to_event``.
    """

    def __init__(self, fn: Any) -> None:
        self.fn, self.batch_shape, self.event_shape = fn, fn.batch_shape, fn.event_shape
        self._transform, location_scale = _entry(fn)
        self.loc, self.scale = location_scale(fn)

    @staticmethod
    def suits(fn: Any) -> bool:
        """Return whether a distribution belongs to one of the families."""
        return isinstance(fn, tuple(_FAMILIES))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of unconstrained values."""
        constrained = self._transform(value)
        log_det = self._transform.log_abs_det_jacobian(value, constrained)
        return self.fn.log_prob(constrained) + log_det


def transform_of(fn: Any) -> Transform | None:
    """Return the map from unconstrained coordinates; None for location-scale families.

    :param fn: a distribution, without ``to_event``.
    """
    if isinstance(fn, torch.distributions.LogNormal):
        return ExpTransform()
    return _entry(fn)[0] if Unconstrained.suits(fn) else None


def _entry(fn: Any) -> tuple[Transform, Callable[[Any], tuple[Tensor, Tensor]]]:
    return next(entry for family, entry in _FAMILIES.items() if isinstance(fn, family))
