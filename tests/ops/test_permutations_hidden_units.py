# SPDX-License-Identifier: Apache-2.0
"""Hidden units in one order."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops import align_hidden_units
from pyro_implicit.ops.permutations import permute_units

UNITS = {"0.weight": -2, "0.bias": -1, "2.weight": -1}


def network(draws: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ draws["0.weight"].mT + draws["0.bias"].unsqueeze(-2))
    return hidden @ draws["2.weight"].mT


def some_draws(spread: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights around one network, and the same with units in random orders."""
    shapes = {"0.weight": (6, 2), "0.bias": (6,), "2.weight": (3, 6)}
    draws = {
        name: torch.randn(shape).double() + spread * torch.randn(30, *shape).double()
        for name, shape in shapes.items()
    }
    order = torch.rand(30, 6).argsort(-1)
    return draws, {**draws, **permute_units(draws, UNITS, order), "noise": torch.ones(30)}


def test_the_function_stays_and_the_order_is_found() -> None:
    draws, mixed = some_draws(0.1)
    x = torch.randn(4, 2).double()
    torch.testing.assert_close(network(mixed, x), network(draws, x))
    aligned = align_hidden_units(mixed, UNITS, {name: draws[name].mean(0) for name in UNITS})
    for name, value in draws.items():
        torch.testing.assert_close(aligned[name], value)
    assert (aligned["noise"] == 1).all()
    alone = align_hidden_units(mixed, UNITS)  # up to one order of all
    torch.testing.assert_close(network(alone, x), network(draws, x))
    assert all((alone[name].std(0) < 0.2).all() for name in UNITS)


def test_units_that_do_not_fit_are_refused() -> None:
    _, mixed = some_draws(0.1)
    with pytest.raises(ValueError, match="'1.weight'.*Cure"):
        align_hidden_units(mixed, {"1.weight": -1})
    with pytest.raises(ValueError, match="from the right"):
        align_hidden_units(mixed, {"0.weight": 0})
    with pytest.raises(ValueError, match="same number"):
        align_hidden_units(mixed, {"0.weight": -1, "2.weight": -1})
