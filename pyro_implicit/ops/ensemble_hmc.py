# SPDX-License-Identifier: Apache-2.0
"""Hamiltonian Monte Carlo for an ensemble of chains that share one step size and length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "ChainState",
    "Move",
    "Score",
    "chees",
    "chosen",
    "ensemble_move",
    "score_of",
    "van_der_corput",
]

Score = Callable[[Tensor], tuple[Tensor, Tensor]]
Values = TypeVar("Values", bound=tuple)


class ChainState(NamedTuple):
    """Position ``(*num_chains, d)``, its log-density ``(*num_chains,)`` and the gradient
    ``(*num_chains, d)``."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class Move(NamedTuple):
    """One transition of all chains.

    ``state`` is where they are after it; ``proposal`` and ``velocity``, ``(num_chains, d)``, are
    the trajectories' ends, accepted or not; ``acceptance``, ``(num_chains,)``, are the
    probabilities of acceptance, 0 for a trajectory that left the finite numbers.
    """

    state: ChainState
    proposal: Tensor
    velocity: Tensor
    acceptance: Tensor


def chosen(mask: Tensor, first: Values, second: Values) -> Values:
    """Return the first values in the chains of a mask, the second in the others.

    :param mask: ``(*num_chains,)``.
    :param first: a NamedTuple of tensors ``(*num_chains, ...)``, such as :class:`ChainState`.
    :param second: the same with other values.
    """

    def one_of(one: Tensor, other: Tensor) -> Tensor:
        wide = mask.reshape(mask.shape + (1,) * (one.dim() - mask.dim()))
        return torch.where(wide, one, other)

    return type(first)(*map(one_of, first, second))


def score_of(log_density: Callable[[Tensor], Tensor]) -> Score:
    """A log-density with its gradient, also under ``torch.no_grad``.

    **Example:**

    >>> score_of(lambda z: -0.5 * z.square().sum(-1))(torch.tensor([[1.0, 2.0]]))
    (tensor([-2.5000]), tensor([[-1., -2.]]))

    :param log_density: function from ``(*batch, d)`` to ``(*batch,)``, each row on its own.
    :returns: of points ``(*batch, d)`` the log-density ``(*batch,)`` and its gradient
        ``(*batch, d)``, both detached.
    """

    def score(points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            value = log_density(points)
            (gradient,) = torch.autograd.grad(value.sum(), points)
        return value.detach(), gradient

    return score


def ensemble_move(
    score: Score, state: ChainState, step_size: Tensor | float, num_steps: int
) -> Move:
    r"""One transition of Hamiltonian Monte Carlo with unit masses, exact by Metropolis' rule.

    **Example:**

    >>> score = lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> start = torch.zeros(1000, 2)
    >>> move = ensemble_move(score, ChainState(start, *score(start)), 0.3, 5)
    >>> bool(move.acceptance.mean() > 0.9), move.state.position.shape
    (True, torch.Size([1000, 2]))

    :param score: function from points ``(num_chains, d)`` to the log-density ``(num_chains,)`` and
        its gradient. Where one of them is not finite the trajectory is rejected.
    :param state: positions with finite log-density and gradient.
    :param step_size: step size of the leapfrog integrator, broadcastable to ``(num_chains, 1)``.
    :param num_steps: leapfrog steps, at least one.
    """
    momentum = torch.randn_like(state.position)
    energy = state.log_density - 0.5 * momentum.square().sum(-1)
    position, gradient, log_density = state.position, state.gradient, state.log_density
    finite = torch.ones_like(energy, dtype=torch.bool)
    momentum = momentum + 0.5 * step_size * gradient
    for step in range(num_steps):
        position = position + step_size * momentum
        log_density, gradient = score(position)
        finite = finite & gradient.isfinite().all(-1)
        # A lost trajectory stays where it is, and gives no NaN to models that would raise.
        gradient = torch.where(finite.unsqueeze(-1), gradient, torch.zeros_like(gradient))
        position = torch.where(finite.unsqueeze(-1), position, state.position)
        size = step_size if step + 1 < num_steps else 0.5 * step_size
        momentum = momentum + size * gradient
    change = log_density - 0.5 * momentum.square().sum(-1) - energy
    change = torch.where(finite & change.isfinite(), change, torch.full_like(change, -math.inf))
    acceptance = change.clamp(max=0.0).exp()
    accepted = torch.rand_like(acceptance) < acceptance
    after = chosen(accepted, ChainState(position, log_density, gradient), state)
    return Move(after, position, momentum, acceptance)


def chees(start: Tensor, move: Move, length: Tensor | float) -> tuple[Tensor, Tensor]:
    r"""The ChEES criterion, and its derivative by the logarithm of the trajectories' length.

    The criterion is the expected squared change of the squared distance from the centre,

    .. math:: \tfrac14 E \big[ (\|z' - \bar z\|^2 - \|z - \bar z\|^2)^2 \big],

    which is large if a transition leaves scale and place of its start behind. With the velocity
    :math:`v` at the proposal :math:`z'` its derivative by the logarithm of the length :math:`t` is

    .. math:: E \big[ t (\|z' - \bar z\|^2 - \|z - \bar z\|^2)
        \langle z' - \bar z, v \rangle \big].

    :param start: ``(num_chains, d)``, before the move.
    :param move: weighted by its probabilities of acceptance.
    :param length: length of the trajectories, broadcastable to ``(num_chains,)``.
    :returns: two scalars.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*, section 4.
    """
    weight = move.acceptance / move.acceptance.sum().clamp(min=torch.finfo(start.dtype).tiny)
    before = start - start.mean(0)
    after = move.proposal - weight @ move.proposal
    change = after.square().sum(-1) - before.square().sum(-1)
    slope = length * change * (after * move.velocity).sum(-1)
    return 0.25 * weight @ change.square(), weight @ slope


def van_der_corput(index: int) -> float:
    """The low-discrepancy sequence in (0, 1) of base 2: 1/2, 1/4, 3/4, 1/8, ...

    **Example:**

    >>> [van_der_corput(index) for index in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]

    :param index: from 1 on.
    """
    value, unit = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        value, unit = value + bit * unit, unit / 2
    return value
