# SPDX-License-Identifier: Apache-2.0
r"""The sinh-arcsinh transformation: an increasing function of a real number for skew and tails.

It is shifted and scaled to have value 0 and slope 1 at 0 for all parameters:

.. math:: h(z; \epsilon, \delta) = \frac{\sinh(e^\delta \operatorname{arsinh} z + \epsilon)
    - \sinh \epsilon}{e^\delta \cosh \epsilon}.

A positive skew :math:`\epsilon` makes the right side steeper, asymptotically by a factor
:math:`e^{2 \epsilon}`. A positive tail parameter :math:`\delta` makes the tails heavier: h grows
like :math:`z^{e^\delta}`. If both parameters are 0, h is the identity.

**References:**

1. Jones and Pewsey (2009), *Sinh-arcsinh distributions*, Biometrika 96, section 2.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import softplus

__all__ = [
    "sinh_arcsinh",
    "sinh_arcsinh_inverse",
    "sinh_arcsinh_log_derivative",
    "sinh_arcsinh_slopes",
]


def sinh_arcsinh(z: Tensor, skew: Tensor, tail: Tensor) -> Tensor:
    r"""Evaluate the transformation :math:`h(z; \epsilon, \delta)`.

    **Example:**

    >>> import torch
    >>> sinh_arcsinh(torch.tensor([-2.0, 0.0, 2.0]), torch.tensor(1.0), torch.tensor(0.0))
    tensor([-1.0586,  0.0000,  2.9414])

    :param z: any shape; it and the parameters broadcast.
    :param skew: :math:`\epsilon`.
    :param tail: :math:`\delta`.
    :returns: :math:`h(z; \epsilon, \delta)`.
    """
    angle = tail.exp() * z.asinh()
    # By the addition theorem, which avoids cancellation.
    return (angle.sinh() + skew.tanh() * (angle.cosh() - 1)) / tail.exp()


def sinh_arcsinh_inverse(value: Tensor, skew: Tensor, tail: Tensor) -> Tensor:
    r"""Invert the transformation.

    **Example:**

    >>> import torch
    >>> skew, tail = torch.tensor(1.0), torch.tensor(0.2)
    >>> z = sinh_arcsinh_inverse(torch.tensor([-1.0, 3.0]), skew, tail)
    >>> sinh_arcsinh(z, skew, tail).round(decimals=3)
    tensor([-1.,  3.])

    :param value: any shape; it and the parameters broadcast.
    :param skew: :math:`\epsilon`.
    :param tail: :math:`\delta`.
    :returns: the z of :math:`h(z; \epsilon, \delta)` = ``value``.
    """
    angle = (value * tail.exp() * skew.cosh() + skew.sinh()).asinh() - skew
    return (angle / tail.exp()).sinh()


def sinh_arcsinh_log_derivative(z: Tensor, skew: Tensor, tail: Tensor) -> Tensor:
    r"""Return the logarithm of the slope in z.

    **Example:**

    >>> import torch
    >>> z = torch.tensor([-1e4, 0.0, 1e4])
    >>> sinh_arcsinh_log_derivative(z, torch.tensor(1.0), torch.tensor(0.0))
    tensor([-1.4338,  0.0000,  0.5662])

    :param z: any shape; it and the parameters broadcast.
    :param skew: :math:`\epsilon`.
    :param tail: :math:`\delta`.
    :returns: :math:`\log \partial h / \partial z`.
    """
    angle = tail.exp() * z.asinh()
    return _log_cosh(angle + skew) - _log_cosh(skew) - 0.5 * z.square().log1p()


def sinh_arcsinh_slopes(z: Tensor, skew: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the slopes in z and in both parameters.

    **Example:**

    >>> import torch
    >>> sinh_arcsinh_slopes(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0.5))
    (tensor(1.), tensor(0.), tensor(0.))

    :param z: any shape; it and the parameters broadcast.
    :param skew: :math:`\epsilon`.
    :param tail: :math:`\delta`.
    :returns: the derivatives of h with respect to z, :math:`\epsilon` and :math:`\delta`.
    """
    power, lean = tail.exp(), skew.tanh()
    angle = power * z.asinh()
    sinh, cosh = angle.sinh(), angle.cosh()
    slope = cosh + lean * sinh
    bent = sinh + lean * (cosh - 1)
    return (
        slope * (1 + z.square()).rsqrt(),
        (cosh - 1) * (1 - lean.square()) / power,
        (angle * slope - bent) / power,
    )


def _log_cosh(x: Tensor) -> Tensor:
    return x.abs() + softplus(-2 * x.abs()) - math.log(2.0)
