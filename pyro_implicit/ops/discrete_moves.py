# SPDX-License-Identifier: Apache-2.0
"""Moves of discrete elements: windows of candidates, informed choices, independent classes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose_other", "classes_of", "windows"]


def choose_other(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Move to another candidate by the Metropolised Gibbs sampler.

    Candidate 0 is the current value. Another one, j, is proposed with probability
    :math:`\pi_j / (1 - \pi_0)` and accepted with probability

    .. math:: \min \left( 1, \frac{1 - \pi_0}{1 - \pi_j} \right).

    The target :math:`\pi` stays invariant, and no autocorrelation exceeds that of Gibbs sampling.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> chosen, probability = choose_other(torch.zeros(2, 5))
    >>> chosen, probability  # of two equal candidates, it always takes the other one
    (tensor([1, 1, 1, 1, 1]), tensor([1., 1., 1., 1., 1.]))

    :param log_weights: unnormalised log-probabilities, ``(num_candidates, *batch)``; -inf for
        impossible ones, finite for candidate 0.
    :returns: the chosen candidates ``(*batch)``, and the probabilities that the chain moves.

    **References:**

    1. Liu (1996), *Peskun's Theorem and a Modified Discrete-State Gibbs Sampler*, section 3.
    """
    others = log_weights[1:]
    if len(others) == 1:
        chosen = torch.zeros_like(others[0], dtype=torch.long)
    else:
        uniform = torch.rand_like(others).clamp(min=torch.finfo(others.dtype).tiny)
        chosen = (others - (-uniform.log()).log()).argmax(0)  # Gumbel's maximum
    is_chosen = torch.arange(1, len(log_weights), device=chosen.device).reshape(
        -1, *(1,) * chosen.dim()
    ) == (chosen + 1)
    rest = torch.cat([log_weights[:1], others.masked_fill(is_chosen, -torch.inf)])
    change = others.logsumexp(0) - rest.logsumexp(0)
    # Without possible candidates both sums are of the current value alone, or none.
    change = torch.where(others.isfinite().any(0), change, -torch.inf)
    probability = change.clamp(max=0.0).exp()
    moves = torch.rand_like(probability) < probability
    return torch.where(moves, chosen + 1, 0), probability


def windows(
    value: Tensor, low: Tensor, high: Tensor, stride: Tensor, num_values: int, is_whole: bool
) -> tuple[Tensor, Tensor]:
    r"""Return windows of candidates for discrete elements, the current values first.

    A window has the values :math:`x + s (j - u)`, j = 0, ..., W - 1. The offset u is uniform, so
    that the window is as likely at any of its values, and a choice that leaves the target invariant
    within the window does so altogether. A whole window has all values from ``low`` to ``high``.

    **Example:**

    >>> value, low = torch.tensor([[1.0]]), torch.tensor([0.0])
    >>> candidates, is_possible = windows(value, low, low + 2, torch.ones(1, 1), 3, is_whole=True)
    >>> candidates.flatten(), is_possible.flatten()
    (tensor([1., 2., 0.]), tensor([True, True, True]))

    :param value: the current values, ``(num_chains, num_elements)``.
    :param low: the least values, ``(num_elements,)``.
    :param high: the largest values, ``(num_elements,)``.
    :param stride: the distances of candidates, ``(num_chains, num_elements)``.
    :param num_values: the number of candidates W.
    :param is_whole: whether the windows are whole: W values from ``low`` on.
    :returns: candidates ``(num_values, num_chains, num_elements)``, with the current value in place
        of impossible ones; and which are possible, of the same shape.
    """
    places = torch.arange(num_values, device=value.device).reshape(-1, 1, 1)
    if is_whole:
        offset, stride = value - low, torch.ones_like(value)
    else:
        offset = torch.randint(num_values, value.shape, device=value.device).to(value)
    # The places follow the current one in a circle, which it begins.
    steps = (places + offset).remainder(num_values) - offset
    candidates = value + stride * steps
    is_possible = (candidates >= low) & (candidates <= high)
    return torch.where(is_possible, candidates, value), is_possible


def classes_of(depends: Tensor, kind: Tensor) -> list[Tensor]:
    """Divide elements into classes of one kind, no two of which share a term.

    Elements of one class are independent given all others. The colouring is greedy, the elements
    with most terms first.

    **Example:**

    >>> depends = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()  # a path
    >>> classes_of(depends, torch.zeros(3))
    [tensor([0, 2]), tensor([1])]

    :param depends: which terms depend on which elements, ``(num_elements, num_terms)``.
    :param kind: the kind of each element, ``(num_elements,)``.
    :returns: the elements of each class.
    """
    order = depends.sum(-1).argsort(descending=True, stable=True).tolist()
    members: list[list[int]] = []
    taken: list[Tensor] = []
    kinds: list[float] = []
    for element in order:
        own, of_kind = depends[element], kind[element].item()
        for index, used in enumerate(taken):
            if kinds[index] == of_kind and not (used & own).any():
                members[index].append(element)
                used |= own
                break
        else:
            members.append([element])
            taken.append(own.clone())
            kinds.append(of_kind)
    return [torch.tensor(sorted(some), device=depends.device) for some in members]
