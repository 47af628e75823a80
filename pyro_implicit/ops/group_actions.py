# SPDX-License-Identifier: Apache-2.0
"""Permutations, reflections and rotations of units: random members, actions, canonical orders.

A member of a group is given for each of n points: a permutation by the old unit at each place,
``(n, size)``; a reflection by signs, ``(n, size)``; a rotation by an orthogonal matrix,
``(n, size, size)``. The *entries* of units are ``(n, num_entries, size)``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pyro_implicit.ops.permutations import along, entries_of, linear_assignment, permuted
from pyro_implicit.ops.policy import LEAST_SPREAD, NUM_KEYS

__all__ = [
    "Kind",
    "apply_members",
    "is_identity",
    "ordering_members",
    "random_members",
    "separating_key",
    "trial_members",
]

Kind = Literal["permutations", "reflections", "rotations"]


def random_members(
    kind: Kind, number: int, size: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw members uniformly; rotations by QR with positive diagonals (Mezzadri, 2007).

    **Example:**

    >>> random_members("permutations", 5, 3).sort(-1).values[0]
    tensor([0, 1, 2])

    :param kind: of the group.
    :param number: of members.
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

    :param kind: of the group.
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
        return value * along(members, value, dim)
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
