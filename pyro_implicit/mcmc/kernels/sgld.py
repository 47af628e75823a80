# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.kernels.step_choice import Score, StepLaw, finite_gradient
from pyro_implicit.mcmc.policy import DEFAULT, LangevinPolicy

__all__ = ["Info", "Settings", "State", "init", "law", "step"]


class State(NamedTuple):
    """Position ``(num_chains, d)``."""

    position: Tensor


class Settings(NamedTuple):
    r"""Step size, the square root of Welling and Teh's :math:`\epsilon`."""

    step_size: float


class Info(NamedTuple):
    """Gradients of each chain."""

    num_gradients: int = 1


def init(position: Tensor, score: Score | None = None) -> State:
    """Start chains at positions ``(num_chains, d)``."""
    return State(position)


def step(state: State, score: Score, settings: Settings) -> tuple[State, Info]:
    r"""Make one step,

    .. math:: z' = z + \tfrac{h^2}{2} \hat g(z) + h \xi.

    For a normal target of precision :math:`\lambda`, the variance is too large by a factor of
    :math:`(1 + h^2 \Sigma / 4) / (1 - h^2 \lambda / 4)`, with noise of variance :math:`\Sigma` in
    the gradient.

    **Example:**

    >>> score = lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> step(init(torch.zeros(3, 2)), score, Settings(0.1))[0].position.shape
    torch.Size([3, 2])

    :param state: positions.
    :param score: log-densities and gradients of one minibatch, unbiased for all data.
    :param settings: step size.
    :returns: the next state, NaN in chains whose log-density is not finite, and the info.

    **References:**

    1. Welling and Teh (2011), *Bayesian Learning via Stochastic Gradient Langevin Dynamics*.
    """
    position, size = state.position, settings.step_size
    kick = 0.5 * size**2 * finite_gradient(score)(position)
    return State(position + kick + size * torch.randn_like(position)), Info()


def law(policy: LangevinPolicy = DEFAULT.langevin) -> StepLaw:
    """Return heat and relaxation times per squared step size, and the largest stable step size.

    At the latter, the variance of the narrowest direction is too large by
    ``policy.max_discretisation``.
    """
    stable = math.sqrt(4 * policy.max_discretisation)
    return StepLaw(
        power=2,
        heat=lambda noise: noise / 4,
        relaxations=lambda steps: steps / 2,
        stable=lambda curvature: stable / math.sqrt(max(curvature, 1.0)),
        settings=Settings,
    )
