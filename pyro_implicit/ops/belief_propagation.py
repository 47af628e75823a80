# SPDX-License-Identifier: Apache-2.0
"""Sums over discrete variables whose pairwise terms form trees, and draws of these variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components
from torch import Tensor
from torch.distributions import Categorical

from pyro_implicit.ops import log_space

__all__ = ["Forest", "draw_values", "find_forest", "log_marginals", "sum_product"]


class Forest(NamedTuple):
    """Trees of variables.

    ``parent`` is ``(num_variables,)``, and ``levels`` are the variables of each depth, roots first.
    The parent of a root means nothing.
    """

    parent: Tensor
    levels: list[Tensor]

    @property
    def children(self) -> Tensor:
        """All variables but the roots, level by level."""
        return torch.cat([*self.levels[1:], self.parent[:0]])

    def to(self, device: torch.device) -> Forest:
        """Return the same trees on a device."""
        return Forest(self.parent.to(device), [level.to(device) for level in self.levels])

    @property
    def is_odd(self) -> Tensor:
        """Whether the depth of a variable is odd, ``(num_variables,)``."""
        found = torch.zeros_like(self.parent, dtype=torch.bool)
        for level in self.levels[1::2]:
            found[level] = True
        return found


def find_forest(edges: Tensor, num_variables: int) -> Forest | None:
    """Return the trees that edges form; None if they contain a cycle.

    **Example:**

    >>> forest = find_forest(torch.tensor([[0, 1], [2, 1]]), 4)
    >>> forest.levels
    [tensor([0, 3]), tensor([1]), tensor([2])]

    :param edges: ``(num_edges, 2)``; repeated edges count once.
    :param num_variables: their number.
    """
    edges = edges.cpu().sort(-1).values.unique(dim=0)
    size = num_variables + 1
    number, component = connected_components(_graph(edges, size), directed=False)
    if len(edges) != size - number:
        return None
    # The last node is joined to the root of each tree, so that one search visits all.
    firsts = torch.from_numpy(np.unique(component[:-1], return_index=True)[1])
    joined = torch.stack([firsts, torch.full_like(firsts, num_variables)], -1)
    graph = _graph(torch.cat([edges, joined]), size)
    order, before = breadth_first_order(graph, num_variables, directed=False)
    depth = np.zeros(size, dtype=int)
    for variable in order[1:]:
        depth[variable] = depth[before[variable]] + 1
    levels = [torch.from_numpy(np.flatnonzero(depth == k)) for k in range(1, depth.max() + 1)]
    return Forest(torch.from_numpy(before[:-1] % num_variables).long(), levels)


def _graph(edges: Tensor, size: int) -> csr_array:
    row, column = edges.T.numpy()
    return csr_array((np.ones(len(row)), (row, column)), shape=(size, size))


def sum_product(unary: Tensor, pairs: Tensor, forest: Forest) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sum the exponential of pairwise terms over all values (Pearl, 1988).

    Each variable c sends to its parent p the message

    .. math:: m_c(n_p) = \log \sum_{n_c} \exp \Bigl( u_c(n_c) + t_c(n_c, n_p)
        + \sum_{c' \text{ child of } c} m_{c'}(n_c) \Bigr).

    **Example:**

    >>> forest = find_forest(torch.tensor([[0, 1]]), 2)
    >>> sum_product(torch.zeros(1, 2, 3), torch.zeros(1, 1, 3, 3), forest)[0].exp()  # 3 * 3
    tensor([[9.]])

    :param unary: u, ``(num_points, num_variables, num_values)``, -inf for impossible values.
    :param pairs: t of ``forest.children``, ``(num_points, num_children, num_values, num_values)``:
        a variable's own values first, then those of its parent.
    :returns: the logarithms of the sums of the trees, ``(num_points, num_trees)``; the beliefs,
        ``unary`` with the messages of all children added; and the messages to the parents, 0 of
        roots, of the same shape.

    **References:**

    1. Pearl (1988), *Probabilistic Reasoning in Intelligent Systems*, section 4.2.
    """
    beliefs, messages = unary, torch.zeros_like(unary)
    levels = zip(forest.levels[1:], _by_level(pairs, forest), strict=True)
    for level, part in reversed([*levels]):
        message = log_space.einsum("icv,icvp->icp", _at(beliefs, level), part)
        messages = messages.index_copy(1, level, message)
        beliefs = beliefs.index_add(1, forest.parent[level], message)
    return log_space.einsum("icv->ic", _at(beliefs, forest.levels[0])), beliefs, messages


def log_marginals(beliefs: Tensor, messages: Tensor, pairs: Tensor, forest: Forest) -> Tensor:
    """Return the log-probability of each value, by messages from the roots to the leaves.

    :param beliefs: those of :func:`sum_product`, like the other parameters.
    :returns: ``(num_points, num_variables, num_values)``; NaN for a sum of 0.
    """
    for level, part in zip(forest.levels[1:], _by_level(pairs, forest), strict=True):
        parent, message = forest.parent[level], _at(messages, level)
        others = beliefs[:, parent] - torch.where(message > -math.inf, message, math.inf)
        message = log_space.einsum("icp,icvp->icv", others, part)
        beliefs = beliefs.index_add(1, level, message)
    return beliefs.log_softmax(-1)


def draw_values(beliefs: Tensor, pairs: Tensor, forest: Forest) -> tuple[Tensor, Tensor]:
    """Draw all variables jointly, each given its parent.

    :param beliefs: those of :func:`sum_product`, like the other parameters.
    :returns: the places of the values ``(num_points, num_variables)``, and their log-probability
        ``(num_points,)``; 0 without a density.
    """
    points = torch.arange(len(beliefs), device=beliefs.device).unsqueeze(-1)
    places = torch.zeros(beliefs.shape[:-1], dtype=torch.long, device=beliefs.device)
    log_prob = beliefs.new_zeros(len(beliefs))
    for level, part in zip(forest.levels, [None, *_by_level(pairs, forest)], strict=True):
        logits = beliefs[:, level]
        if part is not None:
            own = torch.arange(len(level), device=level.device)
            logits = logits + part[points, own, :, places[:, forest.parent[level]]]
        density = Categorical(logits=logits.nan_to_num(0.0), validate_args=False)
        places[:, level] = density.sample()
        log_prob = log_prob + density.log_prob(places[:, level]).sum(-1)
    return places, log_prob.nan_to_num(0.0)


def _by_level(pairs: Tensor, forest: Forest) -> Sequence[Tensor]:
    """Return the terms of each level but the roots; the gradient is a single concatenation."""
    return pairs.split([len(level) for level in forest.levels[1:]], 1)


def _at(values: Tensor, level: Tensor) -> Tensor:
    """Return the variables of a level; neighbours without a copy."""
    first, number = int(level[0]), len(level)
    if int(level[-1]) == first + number - 1:  # they ascend
        return values.narrow(1, first, number)
    return values[:, level]
