# SPDX-License-Identifier: Apache-2.0
"""Langevin dynamics under stochastic gradients, for an ensemble of chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GradientNoise", "gradient_noise", "largest_curvature", "sghmc_step", "sgld_step"]

Gradient = Callable[[Tensor], Tensor]

DISTANCE = 0.1  # of two points whose gradients are compared


def sghmc_step(
    gradient: Gradient, position: Tensor, velocity: Tensor, step_size: float, friction: float
) -> tuple[Tensor, Tensor]:
    r"""One step of stochastic gradient Hamiltonian Monte Carlo with unit masses.

    With step size h, friction :math:`\gamma`, :math:`c = e^{-\gamma h}` and normal :math:`\xi`,

    .. math:: z_{1/2} = z + \tfrac h2 v, \quad v_{1/2} = c v + \sqrt{1 - c^2} \xi, \quad
        z' = z_{1/2} + \tfrac h2 v_{1/2}, \quad v' = v_{1/2} + h \hat g(z').

    This is the dynamics of Chen et al. in the splitting of Leimkuhler and Matthews. With exact
    gradients positions have exactly the right distribution if it is normal, at any
    :math:`h < 2 / \sqrt{\lambda}`, where :math:`\lambda` is its largest precision. Noise of
    covariance :math:`\Sigma` in the gradient raises the temperature of velocities from 1 to
    :math:`1 + h^2 \Sigma / (1 - c^2)`, about :math:`1 + h \Sigma / 2 \gamma`.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> z, v = torch.zeros(10_000, 1), torch.randn(10_000, 1)
    >>> for _ in range(20):
    ...     z, v = sghmc_step(lambda z: -z, z, v, step_size=1.0, friction=1.0)
    >>> f"{z.var():.1f}"
    '1.0'

    :param gradient: of points ``(num_chains, d)``, an unbiased estimate of the log-density's.
    :param position: ``(num_chains, d)``.
    :param velocity: ``(num_chains, d)``.
    :param step_size: h.
    :param friction: :math:`\gamma`.
    :returns: position and velocity, each ``(num_chains, d)``.

    **References:**

    1. Chen, Fox and Guestrin (2014), *Stochastic Gradient Hamiltonian Monte Carlo*.
    2. Leimkuhler and Matthews (2013), *Rational Construction of Stochastic Numerical Methods for
       Molecular Sampling*.
    """
    keep = math.exp(-friction * step_size)
    position = position + 0.5 * step_size * velocity
    velocity = keep * velocity + math.sqrt(1 - keep**2) * torch.randn_like(velocity)
    position = position + 0.5 * step_size * velocity
    return position, velocity + step_size * gradient(position)


def sgld_step(gradient: Gradient, position: Tensor, step_size: float) -> Tensor:
    r"""One step of stochastic gradient Langevin dynamics,

    .. math:: z' = z + \tfrac{h^2}{2} \hat g(z) + h \xi.

    Of a normal distribution of precision :math:`\lambda` it makes one whose variance is too large
    by a factor of :math:`(1 + h^2 \Sigma / 4) / (1 - h^2 \lambda / 4)`, with noise of variance
    :math:`\Sigma` in the gradient.

    **Example:**

    >>> sgld_step(lambda z: -z, torch.zeros(3, 2), 0.1).shape
    torch.Size([3, 2])

    :param gradient: of points ``(num_chains, d)``, an unbiased estimate of the log-density's.
    :param position: ``(num_chains, d)``.
    :param step_size: the square root of Welling and Teh's :math:`\epsilon`.

    **References:**

    1. Welling and Teh (2011), *Bayesian Learning via Stochastic Gradient Langevin Dynamics*.
    """
    kick = 0.5 * step_size**2 * gradient(position)
    return position + kick + step_size * torch.randn_like(position)


class GradientNoise(NamedTuple):
    r"""How much minibatches' gradients differ, by their covariance :math:`\Sigma`: of the variances
    in its d principal directions ``mean`` is the mean, :math:`\operatorname{tr} \Sigma / d`, and
    ``rms`` the root mean square, :math:`\sqrt{\operatorname{tr} \Sigma^2 / d}`."""

    mean: float
    rms: float


def gradient_noise(gradients: Tensor) -> GradientNoise:
    r"""The noise in minibatches' gradients, from few of them.

    Differences of disjoint pairs have covariance :math:`2 \Sigma`, and the expected squared inner
    product of two independent ones is :math:`4 \operatorname{tr} \Sigma^2`: both traces are found
    without bias, in however many dimensions.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> noise = gradient_noise(torch.tensor([3.0, 1.0]) * torch.randn(16, 4000, 2))
    >>> f"{noise.mean:.1f}, {noise.rms:.1f}"  # of 9 and 1
    '5.0, 6.4'

    :param gradients: of minibatches at the same points, ``(num_batches, num_points, d)``; at least
        four.
    """
    even = len(gradients) // 2 * 2
    differences = (gradients[:even:2] - gradients[1:even:2]).transpose(0, 1)
    products = differences @ differences.mT  # (num_points, pairs, pairs)
    num_points, pairs, dim = differences.shape
    squares = products.diagonal(dim1=-2, dim2=-1)
    mean = squares.mean().item() / (2 * dim)
    off_diagonal = (products.square().sum() - squares.square().sum()).item()
    trace_of_square = off_diagonal / (4 * num_points * pairs * (pairs - 1))
    return GradientNoise(mean, max(math.sqrt(trace_of_square / dim), mean))


def largest_curvature(gradient: Gradient, position: Tensor, iterations: int = 10) -> Tensor:
    """The largest curvature of log-densities at points, by power iteration on differences of
    gradients.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> largest_curvature(lambda z: -z * torch.tensor([1.0, 9.0]), torch.zeros(1, 2))
    tensor([9.])

    :param gradient: of points ``(num_points, d)``; the same function in every call.
    :param position: ``(num_points, d)``.
    :param iterations: of power iteration, with a gradient each.
    :returns: absolute values, ``(num_points,)``; power iteration comes from below.
    """
    here = gradient(position)
    direction = torch.randn_like(position)
    curvature = position.new_zeros(len(position))
    for _ in range(iterations):
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        direction = (gradient(position + DISTANCE * direction) - here) / DISTANCE
        curvature = direction.norm(dim=-1)
    return curvature
