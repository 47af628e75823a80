# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.kernels.step_choice import Score, finite_gradient
from pyro_implicit.mcmc.policy import DEFAULT

__all__ = ["Info", "Settings", "State", "init", "step"]


class State(NamedTuple):
    """Position and velocity, each ``(num_chains, d)``."""

    position: Tensor
    velocity: Tensor


class Settings(NamedTuple):
    """Step size h and friction."""

    step_size: float
    friction: float = DEFAULT.langevin.friction


class Info(NamedTuple):
    """Gradients of each chain."""

    num_gradients: int = 1


def init(position: Tensor, score: Score | None = None) -> State:
    """Start chains at positions ``(num_chains, d)`` with standard normal velocities.

    :param score: not used; see :class:`~pyro_implicit.mcmc.kernels.protocol.Init`.
    """
    return State(position, torch.randn_like(position))


def step(state: State, score: Score, settings: Settings) -> tuple[State, Info]:
    r"""Make one step with unit masses.

    With step size h, friction :math:`\gamma`, :math:`c = e^{-\gamma h}` and normal :math:`\xi`,

    .. math:: z_{1/2} = z + \tfrac h2 v, \quad v_{1/2} = c v + \sqrt{1 - c^2} \xi, \quad
        z' = z_{1/2} + \tfrac h2 v_{1/2}, \quad v' = v_{1/2} + h \hat g(z').

    This is the dynamics of Chen et al. in the splitting of Leimkuhler and Matthews. With exact
    gradients, positions have exactly the right distribution if it is normal, at any
    :math:`h < 2 / \sqrt{\lambda}`, where :math:`\lambda` is its largest precision. Noise of
    covariance :math:`\Sigma` in the gradient raises the temperature of velocities from 1 to
    :math:`1 + h^2 \Sigma / (1 - c^2)`, about :math:`1 + h \Sigma / 2 \gamma`.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> state, score = init(torch.zeros(10_000, 1)), lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> for _ in range(20):
    ...     state, info = step(state, score, Settings(step_size=1.0, friction=1.0))
    >>> f"{state.position.var():.1f}"
    '1.0'

    :param state: positions and velocities.
    :param score: log-densities and gradients of one minibatch, unbiased for all data.
    :param settings: step size and friction.
    :returns: the next state, NaN in chains whose log-density is not finite, and the info.

    **References:**

    1. Chen, Fox and Guestrin (2014), *Stochastic Gradient Hamiltonian Monte Carlo*.
    2. Leimkuhler and Matthews (2013), *Rational Construction of Stochastic Numerical Methods for
       Molecular Sampling*.
    """
    size = settings.step_size
    keep = math.exp(-settings.friction * size)
    position = state.position + 0.5 * size * state.velocity
    noise = torch.randn_like(state.velocity)
    velocity = keep * state.velocity + math.sqrt(1 - keep**2) * noise
    position = position + 0.5 * size * velocity
    return State(position, velocity + size * finite_gradient(score)(position)), Info()
