# SPDX-License-Identifier: Apache-2.0
r"""Densities of semi-implicit distributions, and the noise behind a value.

:math:`\theta = g(z) + s \odot \eta` has the explicit conditional :math:`N(g(z),
\mathrm{diag}(s^2))`; its marginal is a mixture over the noise z, and :math:`q(z \mid \theta)`, the
reverse conditional, is known up to a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "HMCState",
    "conditional_log_density",
    "hmc_state",
    "hmc_transition",
    "linearised_reverse_conditional",
    "mixture_log_density",
]

Generate = Callable[[Tensor], Tensor]
MAX_ENTRIES = 2**24


def conditional_log_density(value: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    r""":math:`\log N(\theta \mid g, \mathrm{diag}(s^2))`.

    **Example:**

    >>> conditional_log_density(torch.zeros(2), torch.zeros(3, 2), torch.ones(2))
    tensor([-1.8379, -1.8379, -1.8379])

    :param value: ``(*batch, m)``.
    :param mean: ``(*batch, m)``.
    :param scale: positive, ``(*batch, m)``; all three broadcast.
    :returns: ``(*batch,)``.
    """
    square = ((value - mean) / scale).square()
    return -(0.5 * square + scale.log() + 0.5 * math.log(2 * math.pi)).sum(-1)


def mixture_log_density(
    value: Tensor,
    generate: Generate,
    scale: Tensor,
    noises: Sequence[Tensor],
    log_weights: Sequence[Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    r""":math:`\log \frac1S \sum_s w_s\, N(\theta \mid g(z_s), \mathrm{diag}(s^2))`, in log space.

    The values of the generator are made in chunks of the S noises and, where there are several,
    made again for the gradient, so that they never exist for all S at once.

    **Example:**

    >>> noise = torch.zeros(4, 1, 2)
    >>> mixture_log_density(torch.zeros(3, 2), lambda z: z, torch.ones(2), [noise])
    tensor([-1.8379, -1.8379, -1.8379])

    :param value: ``(*batch, m)``.
    :param generate: from ``(*any, d)`` to ``(*any, m)``, each row on its own.
    :param scale: positive, broadcastable to ``(*batch, m)``.
    :param noises: one or more sets of noise, each ``(num_noises, *batch, d)``, with size 1 in the
        batch dimensions whose elements share it; S is the sum of their sizes.
    :param log_weights: :math:`\log w`, one tensor for each set, ``(num_noises, *batch)`` or with
        size 1 where all elements share it; by default 0.
    :param chunk_size: noises at a time; by default as many as make at most 2^24 numbers.
    :returns: ``(*batch,)``.
    """
    chunk_size = chunk_size or max(1, MAX_ENTRIES // value.numel())
    num_noises = sum(len(noise) for noise in noises)

    def term(noise: Tensor, log_weight: Tensor) -> Tensor:
        log_density = conditional_log_density(value, generate(noise), scale)
        return (log_density + log_weight).logsumexp(0)

    terms = []
    for i, noise in enumerate(noises):
        log_weight = log_weights[i] if log_weights else noise.new_zeros(noise.shape[:-1])
        chunks = zip(noise.split(chunk_size), log_weight.split(chunk_size), strict=True)
        if len(noise) <= chunk_size or not torch.is_grad_enabled():
            terms += [term(*chunk) for chunk in chunks]
        else:
            terms += [checkpoint(term, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(terms).logsumexp(0) - math.log(num_noises)


def linearised_reverse_conditional(
    value: Tensor,
    value_and_jacobian: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale: Tensor,
    start: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    r"""A Gaussian near :math:`q(z \mid \theta)` that depends on :math:`\theta` and a start alone.

    A fixed number of damped Gauss-Newton (Levenberg-Marquardt) steps from the start lower
    :math:`\|(\theta - g(z)) / s\|^2 + \|z\|^2`; at the z found, with Jacobian J, the precision is
    :math:`I + J^\top \mathrm{diag}(s^{-2}) J`. Exact for linear generators and standard normal
    noise. Without gradient.

    **Example:**

    >>> identity = lambda z: (z, torch.eye(2).expand(z.shape[:-1] + (2, 2)))
    >>> mean, factor = linearised_reverse_conditional(
    ...     torch.ones(2), identity, torch.ones(2), torch.zeros(2), num_steps=8)
    >>> mean, factor[0, 0]
    (tensor([0.5000, 0.5000]), tensor(1.4142))

    :param value: ``(*batch, m)``.
    :param value_and_jacobian: from ``(*batch, d)`` to the generator's value ``(*batch, m)`` and its
        Jacobian ``(*batch, m, d)``.
    :param scale: positive, broadcastable to ``(*batch, m)``.
    :param start: ``(*batch, d)``.
    :param num_steps: evaluations of the Jacobian beyond the first.
    :returns: the mean ``(*batch, d)`` and the lower Cholesky factor of the precision
        ``(*batch, d, d)``.
    """

    def evaluate(noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Half the sum of squares, its negative gradient, and the precision (in float64)."""
        mean, jacobian = value_and_jacobian(noise)
        residual = ((value - mean) / scale).double()
        jacobian = (jacobian / scale.unsqueeze(-1)).double()
        loss = 0.5 * (residual.square().sum(-1) + noise.double().square().sum(-1))
        descent = (jacobian.mT @ residual.unsqueeze(-1)).squeeze(-1) - noise
        return loss, descent, jacobian.mT @ jacobian + identity

    with torch.no_grad():
        noise = start
        identity = torch.eye(start.shape[-1], dtype=torch.double, device=value.device)
        loss, descent, precision = evaluate(noise)
        damping = torch.full_like(loss, 1e-2)
        for _ in range(num_steps):
            factor = torch.linalg.cholesky_ex(precision + damping[..., None, None] * identity)[0]
            step = torch.cholesky_solve(descent.unsqueeze(-1), factor).squeeze(-1)
            trial = noise + step.to(noise.dtype)
            trial_loss, trial_descent, trial_precision = evaluate(trial)
            better = trial_loss < loss
            loss = torch.where(better, trial_loss, loss)
            noise = torch.where(better[..., None], trial, noise)
            descent = torch.where(better[..., None], trial_descent, descent)
            precision = torch.where(better[..., None, None], trial_precision, precision)
            damping = torch.where(better, damping / 10, damping * 10)
        return noise, torch.linalg.cholesky(precision).to(noise.dtype)


class HMCState(NamedTuple):
    """Position ``(*batch, d)``, its log-density ``(*batch,)`` and the gradient ``(*batch, d)``."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


def hmc_state(log_density: Callable[[Tensor], Tensor], position: Tensor) -> HMCState:
    """The state of independent chains, one for each row. Works under ``torch.no_grad``.

    **Example:**

    >>> hmc_state(lambda z: -0.5 * z.square().sum(-1), torch.tensor([[1.0, 2.0]])).gradient
    tensor([[-1., -2.]])

    :param log_density: from ``(*batch, d)`` to ``(*batch,)``, each row on its own.
    :param position: ``(*batch, d)``.
    :returns: the state there, without a gradient's graph.
    """
    with torch.enable_grad():
        position = position.detach().requires_grad_()
        value = log_density(position)
        gradient = torch.autograd.grad(value.sum(), position)[0]
    return HMCState(position.detach(), value.detach(), gradient)


def hmc_transition(
    log_density: Callable[[Tensor], Tensor],
    state: HMCState,
    step_size: Tensor,
    num_leapfrog: int,
) -> tuple[HMCState, Tensor]:
    """One step of Hamiltonian Monte Carlo with unit masses, for all chains at once.

    **Example:**

    >>> log_density = lambda z: -0.5 * z.square().sum(-1)
    >>> state = hmc_state(log_density, torch.zeros(100, 3))
    >>> state, acceptance = hmc_transition(log_density, state, torch.tensor(0.1), 5)
    >>> bool(acceptance.mean() > 0.9)
    True

    :param log_density: see :func:`hmc_state`.
    :param state: of the chains.
    :param step_size: of the leapfrog integrator, broadcastable to ``(*batch, 1)``.
    :param num_leapfrog: leapfrog steps.
    :returns: the new state and each chain's probability of acceptance ``(*batch,)``, which is 0
        for a trajectory that diverged.
    """
    momentum = torch.randn_like(state.position)
    start = state.log_density - 0.5 * momentum.square().sum(-1)
    end = state
    for _ in range(num_leapfrog):
        momentum = momentum + 0.5 * step_size * end.gradient
        end = hmc_state(log_density, end.position + step_size * momentum)
        momentum = momentum + 0.5 * step_size * end.gradient
    change = end.log_density - 0.5 * momentum.square().sum(-1) - start
    acceptance = change.clamp(max=0.0).exp().nan_to_num(nan=0.0)
    accepted = torch.rand_like(acceptance) < acceptance
    result = HMCState(
        torch.where(accepted[..., None], end.position, state.position),
        torch.where(accepted, end.log_density, state.log_density),
        torch.where(accepted[..., None], end.gradient, state.gradient),
    )
    return result, acceptance
