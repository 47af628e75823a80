# SPDX-License-Identifier: Apache-2.0
"""Permutations, reflections and rotations of units, such as hidden units of a network.

A member of a group is given for each of n points: a permutation by the old unit at each place,
``(n, size)``; a reflection by signs, ``(n, size)``; a rotation by an orthogonal matrix,
``(n, size, size)``. The *entries* of units are ``(n, num_entries, size)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_implicit.ops.policy import (
    LEAST_SPREAD,
    MAX_ALIGNMENTS,
    NUM_BALANCINGS,
    NUM_KEYS,
    PERMUTATION_POWERS,
)

__all__ = [
    "Kind",
    "align_hidden_units",
    "apply_members",
    "entries_of",
    "is_identity",
    "linear_assignment",
    "ordering_members",
    "permutation_log_prob",
    "permute_units",
    "permuted",
    "random_members",
    "separating_key",
    "trial_members",
    "unit_vectors",
]

Kind = Literal["permutations", "reflections", "rotations"]


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


def _along(members: Tensor, value: Tensor, dim: int) -> Tensor:
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
    return torch.take_along_dim(value, _along(permutation, value, dim), dim)


# Members of groups


def random_members(
    kind: Kind, number: int, size: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw members uniformly; rotations by QR with positive diagonals (Mezzadri, 2007).

    **Example:**

    >>> random_members("permutations", 5, 3).sort(-1).values[0]
    tensor([0, 1, 2])

    :param kind: kind of the group.
    :param number: number of members.
    :param size: the number of units.
    :param generator: the source of random numbers, on the CPU.
    :returns: on the CPU.
    """
    options: dict[str, Any] = {"generator": generator, "device": "cpu"}
    if kind == "permutations":
        return torch.rand(number, size, **options).argsort(-1)
    if kind == "reflections":
        return 1 - 2 * torch.randint(2, (number, size), **options)
    q, r = torch.linalg.qr(torch.randn(number, size, size, dtype=torch.float64, **options))
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def trial_members(kind: Kind, size: int) -> Tensor:
    """Return members that generate a group, or a dense part of it, and a random one.

    A cycle of all units and an exchange of two generate all permutations. The trial reflections are
    those of the first and of the last unit; a single unit has only one.

    **Example:**

    >>> trial_members("permutations", 2)[:2]
    tensor([[1, 0],
            [1, 0]])

    :param kind: kind of the group.
    :param size: the number of units.
    :returns: up to three members, on the CPU.
    """
    if kind == "reflections" and size == 1:
        return torch.tensor([[-1]], device="cpu")
    if kind == "rotations":
        return random_members(kind, 3, size)
    if kind == "permutations":
        units = torch.arange(size, device="cpu")
        exchange = torch.cat([units[:2].flip(0), units[2:]])
        known = torch.stack([units.roll(1), exchange])
    else:
        known = torch.ones(2, size, dtype=torch.long, device="cpu")
        known[0, 0] = known[1, -1] = -1
    return torch.cat([known, random_members(kind, 1, size)])


def apply_members(kind: Kind, members: Tensor, value: Tensor, dim: int) -> Tensor:
    """Apply a member to each point along a dimension.

    **Example:**

    >>> swap = torch.tensor([[1, 0]])
    >>> apply_members("permutations", swap, torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), -1)
    tensor([[[2., 1.],
             [4., 3.]]])

    :param members: one for each point.
    :param value: ``(n, *shape)``.
    :param dim: the dimension of ``shape`` that counts the units, from the right.
    """
    if kind == "permutations":
        return permuted(value, dim, members)
    if kind == "reflections":
        return value * _along(members, value, dim)
    units = value.movedim(dim, -1)
    moved = (entries_of(value, dim).to(members) @ members).to(value)
    return moved.reshape(units.shape).movedim(-1, dim)


def ordering_members(kind: Kind, entries: Tensor, key: tuple[float, ...]) -> Tensor:
    """Return the members that bring units in order.

    Permutations sort the units by a weighted sum of their entries, reflections make this sum
    positive, rotations make the first entries a lower triangle of positive diagonal.

    **Example:**

    >>> ordering_members("permutations", torch.tensor([[[3.0, 1.0, 2.0]]]), (1.0,))
    tensor([[1, 2, 0]])

    :param entries: ``(n, num_entries, size)``.
    :param key: weights of the first entries.
    """
    if kind == "rotations":
        q, r = torch.linalg.qr(entries[:, : entries.shape[-1]].mT, mode="complete")
        diagonal, signs = r.diagonal(dim1=-2, dim2=-1), torch.ones(q.shape[:-1]).to(q)
        signs[:, : diagonal.shape[-1]] = torch.where(diagonal < 0, -1.0, 1.0)
        return q * signs.unsqueeze(-2)
    sums = torch.tensor(key).to(entries) @ entries[:, : len(key)]
    return sums.argsort(-1) if kind == "permutations" else 1 - 2 * (sums < 0).long()


def is_identity(kind: Kind, members: Tensor) -> Tensor:
    """Return which members leave all points as they are, ``(n,)``."""
    if kind == "permutations":
        return (members.diff(dim=-1) == 1).all(-1)
    if kind == "reflections":
        return (members == 1).all(-1)
    return torch.isclose(members, torch.eye(members.shape[-1]).to(members)).all(-1).all(-1)


def separating_key(kind: Kind, entries: Tensor) -> tuple[float, ...]:
    """Return a key by which units differ far, for :func:`ordering_members`.

    The units of all points are aligned with those of the first one. The key is the best of many
    random combinations of their means, by the least difference of two units, or from 0, in standard
    deviations.

    **Example:**

    >>> points = torch.tensor([[[0.0, 0.0], [-5.0, 5.0]]]) + 0.1 * torch.randn(100, 2, 2)
    >>> first, second = separating_key("permutations", points)
    >>> abs(second) > abs(first)
    True

    :param kind: ``"permutations"`` or ``"reflections"``.
    :param entries: ``(n, num_entries, size)``.
    :returns: a weight of each entry.
    """
    scale = entries.std((0, 2)).unsqueeze(-1)
    scale = torch.where(scale > 0, scale, 1.0)
    entries = entries / scale
    if kind == "permutations":
        order = linear_assignment(-(entries[0].mT @ entries))
        entries = entries.gather(-1, order.unsqueeze(1).expand_as(entries))
    else:
        entries = entries * (entries[0] * entries).sum(1, keepdim=True).sign()
    means = entries.mean(0)
    variance = entries.var(0).mean(-1, keepdim=True).clamp(min=LEAST_SPREAD**2)
    if kind == "permutations":
        means = means - means.mean(-1, keepdim=True)
    generator = torch.Generator("cpu").manual_seed(0)
    shares = torch.randn(NUM_KEYS, means.shape[-1], generator=generator, device="cpu")
    keys = shares.to(means) @ (means / variance).mT
    sums = torch.einsum("kr,nru->knu", keys, entries)
    middle, sds = sums.mean(1), sums.std(1)
    if kind == "permutations":
        middle, order = middle.sort(-1)
        sds = sds.gather(-1, order)
        gaps = middle.diff(dim=-1) / torch.maximum(sds[:, 1:], sds[:, :-1])
    else:
        gaps = middle.abs() / sds
    best = gaps.amin(-1).nan_to_num(0.0).argmax()
    return tuple((keys[best] / scale.squeeze(-1)).tolist())


# Hidden units

Units = Mapping[str, int]


def unit_vectors(draws: Mapping[str, Tensor], units: Units) -> Tensor:
    """Concatenate all weights into and out of each unit.

    :param draws: draws by site, ``(num_draws, *site_shape)``.
    :param units: the negative dimension that counts the units, by site.
    :returns: ``(num_draws, num_units, weights_per_unit)``.
    """
    return torch.cat([entries_of(draws[name], dim) for name, dim in units.items()], 1).mT


def permute_units(
    draws: Mapping[str, Tensor], units: Units, permutation: Tensor
) -> dict[str, Tensor]:
    """Reorder the hidden units, which does not change the network's function.

    :param draws: draws by site, ``(num_draws, *site_shape)``.
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

    :param draws: draws by site, ``(num_draws, *site_shape)``; sites without units are unchanged.
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
