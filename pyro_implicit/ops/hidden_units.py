# SPDX-License-Identifier: Apache-2.0
"""Weights of networks, whose hidden units have no order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_implicit.ops.assignment import linear_assignment

__all__ = ["align_hidden_units", "permute_units", "unit_vectors"]

Units = Mapping[str, int]

MAX_ROUNDS = 20


def unit_vectors(draws: Mapping[str, Tensor], units: Units) -> Tensor:
    """All weights into and out of each unit, side by side.

    :param draws: by site, ``(num_draws, *site_shape)``.
    :param units: of each site the negative dimension that counts the units.
    :returns: ``(num_draws, num_units, weights_per_unit)``.
    """
    parts = [draws[name].movedim(dim, 1) for name, dim in units.items()]
    return torch.cat([part.reshape(*part.shape[:2], -1) for part in parts], -1)


def permute_units(
    draws: Mapping[str, Tensor], units: Units, permutation: Tensor
) -> dict[str, Tensor]:
    """The weights with the units in another order, which is the same network.

    :param draws: by site, ``(num_draws, *site_shape)``.
    :param units: as in :func:`unit_vectors`.
    :param permutation: which old unit each new one is, ``(num_draws, num_units)``.
    :returns: of the sites in ``units``.
    """
    result = {}
    for name, dim in units.items():
        value = draws[name].movedim(dim, 1)
        index = permutation.reshape(permutation.shape + (1,) * (value.dim() - 2))
        result[name] = value.gather(1, index.expand(value.shape)).movedim(1, dim)
    return result


@torch.no_grad()
def align_hidden_units(
    draws: Mapping[str, Tensor], units: Units, reference: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    r"""Draws of a network's weights, with the hidden units of each in the order that brings it
    nearest to a reference.

    Two chains, or a chain and a guide, number hidden units each in its own way, so that means and
    standard deviations of single weights cannot be compared. The function that the network computes
    is left as it is. What overlaps is cut apart, where one unit's range meets another's:
    predictions are the better thing to compare.

    **Example:**

    >>> draws = {"0.weight": torch.randn(100, 5, 3), "2.weight": torch.randn(100, 1, 5)}
    >>> aligned = align_hidden_units(draws, {"0.weight": -2, "2.weight": -1})
    >>> aligned["2.weight"].shape
    torch.Size([100, 1, 5])

    :param draws: by site, ``(num_draws, *site_shape)``; those that have no units stay as they are.
    :param units: of one hidden layer: of each site the negative dimension that counts the units,
        -2 for the weight into them, -1 for their bias and for the weight out of them. Further
        layers want further calls, the first layer's first.
    :param reference: one network's weights by site, ``site_shape``, such as the mean of aligned
        draws. By default the mean of the draws, which are aligned to it in turn, from the first
        draw on, until no unit moves.
    :returns: all sites of ``draws``.
    :raises ValueError: for a site without draws, a dimension that is not negative, or sites whose
        numbers of units differ.
    """
    check_units({name: value.shape[1:] for name, value in draws.items()}, units)
    aligned = {name: draws[name] for name in units}
    center = {name: value[0] for name, value in aligned.items()} if reference is None else reference
    for _ in range(1 if reference is not None else MAX_ROUNDS):
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
    """The number of units, the same at all sites.

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
