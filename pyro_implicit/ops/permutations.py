# SPDX-License-Identifier: Apache-2.0
"""Permutations: least-cost assignment, a distribution, and the order of hidden units."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_implicit.ops.policy import MAX_ALIGNMENTS, NUM_BALANCINGS, PERMUTATION_POWERS

__all__ = [
    "align_hidden_units",
    "along",
    "entries_of",
    "linear_assignment",
    "permutation_log_prob",
    "permute_units",
    "permuted",
    "unit_vectors",
]


def permutation_log_prob(log_weights: Tensor, permutation: Tensor) -> Tensor:
    r"""Log-probability of permutations under a normalised distribution near
    :math:`p(\pi) \propto \prod_i w_{i \pi(i)}`.

    The normalising constant of p is a permanent, which is intractable. The distribution here first
    scales the weights to unit sums of rows and columns. Then each row, in order of its largest
    weight, selects one of the remaining columns in proportion to a power of its weights; several
    powers are mixed. For seven rows it loses a few per cent of the information, and none if one
    permutation dominates or if all weights are equal.

    **Example:**

    >>> log_weights = torch.tensor([[0.0, -3.0], [-3.0, 0.0]])
    >>> both = torch.tensor([[0, 1], [1, 0]])
    >>> permutation_log_prob(log_weights.expand(2, 2, 2), both).exp()
    tensor([0.9..., 0.0...])

    :param log_weights: ``(*batch, n, n)``, finite.
    :param permutation: the column of each row, ``(*batch, n)``.
    :returns: ``(*batch)``, differentiable in the weights.

    **References:**

    1. Sinkhorn (1964), *A Relationship Between Arbitrary Positive Matrices and Doubly Stochastic
       Matrices*.
    """
    for _ in range(NUM_BALANCINGS):
        log_weights = log_weights.log_softmax(-1).log_softmax(-2)
    order = log_weights.detach().amax(-1).argsort(dim=-1, descending=True, stable=True)
    rows = log_weights.gather(-2, order.unsqueeze(-1).expand_as(log_weights))
    columns = permutation.gather(-1, order).unsqueeze(-2).expand_as(rows)
    # In the order of selection: the columns on the diagonal and to its right remain.
    rows = rows.gather(-1, columns)
    taken = torch.ones_like(rows, dtype=torch.bool).tril(-1)
    parts = []
    for power, share in PERMUTATION_POWERS:
        left = (power * rows).masked_fill(taken, -torch.inf)
        chosen = left.diagonal(dim1=-2, dim2=-1) - left.logsumexp(-1)
        parts.append(chosen.sum(-1) + math.log(share))
    return torch.stack(parts).logsumexp(0)


@torch.no_grad()
def linear_assignment(cost: Tensor) -> Tensor:
    """Find the permutation of least cost for each matrix.

    **Example:**

    >>> linear_assignment(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]]))
    tensor([1, 0, 2])

    :param cost: cost of assigning a column to a row, ``(*batch, n, n)``, finite.
    :returns: the column of each row, ``(*batch, n)``, on the device of ``cost``.
    """
    size = cost.shape[-1]
    matrices = cost.double().cpu().reshape(-1, size, size).numpy()
    columns = np.array([linear_sum_assignment(matrix)[1] for matrix in matrices], dtype=np.int64)
    return torch.as_tensor(columns.reshape(cost.shape[:-1]), device=cost.device)


def entries_of(value: Tensor, dim: int) -> Tensor:
    """Return the entries of units along a dimension, ``(n, num_entries, num_units)``.

    **Example:**

    >>> entries_of(torch.zeros(10, 4, 3, 2), -2).shape
    torch.Size([10, 8, 3])

    :param value: ``(n, *shape)``.
    :param dim: the dimension of ``shape`` that counts the units, from the right.
    """
    return value.movedim(dim, -1).reshape(len(value), -1, value.shape[dim])


def along(members: Tensor, value: Tensor, dim: int) -> Tensor:
    """Return ``(n, num_units)`` with the dimensions of ``value``, to broadcast along ``dim``."""
    shape = [len(value)] + [1] * (value.dim() - 1)
    shape[dim] = value.shape[dim]
    return members.reshape(shape)


def permuted(value: Tensor, dim: int, permutation: Tensor) -> Tensor:
    """Reorder the units along a dimension.

    **Example:**

    >>> permuted(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), -1, torch.tensor([[1, 0]]))
    tensor([[[2., 1.],
             [4., 3.]]])

    :param value: ``(n, *shape)``.
    :param dim: the dimension of ``shape`` that counts the units, from the right.
    :param permutation: index of the old unit for each new unit, ``(n, num_units)``.
    """
    return torch.take_along_dim(value, along(permutation, value, dim), dim)


Units = Mapping[str, int]


def unit_vectors(draws: Mapping[str, Tensor], units: Units) -> Tensor:
    """Concatenate all weights into and out of each unit.

    :param draws: by site, ``(num_draws, *site_shape)``.
    :param units: by site, the negative dimension that counts the units.
    :returns: ``(num_draws, num_units, weights_per_unit)``.
    """
    return torch.cat([entries_of(draws[name], dim) for name, dim in units.items()], 1).mT


def permute_units(
    draws: Mapping[str, Tensor], units: Units, permutation: Tensor
) -> dict[str, Tensor]:
    """Reorder the hidden units, which does not change the network's function.

    :param draws: by site, ``(num_draws, *site_shape)``.
    :param units: as in :func:`unit_vectors`.
    :param permutation: index of the old unit for each new unit, ``(num_draws, num_units)``.
    :returns: the sites in ``units``.
    """
    return {name: permuted(draws[name], dim, permutation) for name, dim in units.items()}


@torch.no_grad()
def align_hidden_units(
    draws: Mapping[str, Tensor], units: Units, reference: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    r"""Reorder the hidden units of each draw to be nearest to a reference.

    The order of hidden units differs between chains and guides, so that means and standard
    deviations of single weights cannot be compared. Reordering does not change the network's
    function. If the distributions of two units overlap, alignment truncates both: prefer to compare
    predictions.

    **Example:**

    >>> draws = {"0.weight": torch.randn(100, 5, 3), "2.weight": torch.randn(100, 1, 5)}
    >>> aligned = align_hidden_units(draws, {"0.weight": -2, "2.weight": -1})
    >>> aligned["2.weight"].shape
    torch.Size([100, 1, 5])

    :param draws: by site, ``(num_draws, *site_shape)``; sites without units are unchanged.
    :param units: for one hidden layer, the negative dimension of each site that counts the units:
        -2 for the weight into them, -1 for their bias and for the weight out of them. Call the
        function once for each layer, in their order.
    :param reference: one network's weights by site, ``site_shape``, such as the mean of aligned
        draws. By default the mean of the draws, starting from the first draw, until no unit moves.
    :returns: all sites of ``draws``.
    :raises ValueError: for a site without draws, a dimension that is not negative, or sites whose
        numbers of units differ.
    """
    check_units({name: value.shape[1:] for name, value in draws.items()}, units)
    aligned = {name: draws[name] for name in units}
    center = {name: value[0] for name, value in aligned.items()} if reference is None else reference
    for _ in range(1 if reference is not None else MAX_ALIGNMENTS):
        mine = unit_vectors(aligned, units)
        target = unit_vectors({name: center[name].unsqueeze(0) for name in units}, units)
        target = target.to(mine)
        permutation = linear_assignment(-target @ mine.mT)  # of least squared distance
        aligned = permute_units(aligned, units, permutation)
        if (permutation == torch.arange(permutation.shape[-1], device=mine.device)).all():
            break
        center = {name: value.mean(0) for name, value in aligned.items()}
    return {**draws, **aligned}


def check_units(shapes: Mapping[str, torch.Size], units: Units) -> int:
    """Check the sites and return their number of units.

    :raises ValueError: as :func:`align_hidden_units`.
    """
    sizes = {}
    for name, dim in units.items():
        if name not in shapes:
            raise ValueError(
                f"units names the site '{name}', but the sites are {sorted(shapes)}. Cure: the "
                "sites of one hidden layer's weights, with the dimension that counts its units"
            )
        if not -len(shapes[name]) <= dim < 0:
            raise ValueError(
                f"the dimension {dim} of site '{name}', of shape {tuple(shapes[name])}, must count "
                "from the right: -2 for a weight into the units, -1 for a weight out of them"
            )
        sizes[name] = shapes[name][dim]
    if len(set(sizes.values())) != 1:
        raise ValueError(f"all sites of units must have the same number of them, but have {sizes}")
    return next(iter(sizes.values()))
