# SPDX-License-Identifier: Apache-2.0
"""What is compared and diagnosed: latents, or functions of them such as a network's predictions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.labels import index_label
from pyro_implicit.diagnostics.whitening import CollapsedError
from pyro_implicit.nn import FunctionValues, NetworkModel

__all__ = ["Function", "Observed", "Quantities", "describe", "find_quantities", "values_of"]

Function: TypeAlias = Callable[[dict[str, Tensor]], "Tensor | dict[str, Tensor]"]
Quantities: TypeAlias = Function | Literal["auto", "latents"]


def find_quantities(
    quantities: Quantities, model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Function | None:
    """What to look at, None for the latents themselves.

    :param quantities: ``"auto"``: of a network, its predictions at the inputs among the arguments;
        else ``"latents"``, or a function.
    :raises ValueError: for another word, or a network without inputs.
    """
    if callable(quantities):
        return quantities
    if quantities not in ("auto", "latents"):
        raise ValueError(f'quantities must be "auto", "latents" or a function, got {quantities!r}')
    if quantities == "latents" or not isinstance(model, NetworkModel):
        return None
    x = args[0] if args else kwargs.get("x")
    if not isinstance(x, Tensor):
        raise ValueError(
            "a network is judged by its predictions, for which there are no inputs. Cure: give "
            'those of the model, (model, guide, ..., x, y), or quantities="latents" for the weights'
        )
    return FunctionValues(model, x)


def values_of(function: Function, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its values by name, each ``(num_draws, *shape)``.

    :raises ValueError: for values of other shapes.
    """
    count = len(next(iter(draws.values())))
    found = function(dict(draws))
    found = found if isinstance(found, Mapping) else {"quantity": found}
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (count,):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"quantities gave {shape} for '{name}' of {count} draws. Cure: a function of draws "
                "by site, (num_draws, *site_shape), that gives one value for each draw, first"
            )
    return {name: value.detach() for name, value in found.items()}


def describe(function: Function) -> str:
    """In words."""
    return str(function) if isinstance(function, FunctionValues) else "the given quantities"


class Observed:
    """Quantities of unconstrained latents, in units of their standard deviations.

    Those that are the same at all draws are left out.

    :param function: of constrained draws by site.
    :param density: of the model.
    :param points: draws of the guide, ``(num_draws, latent_dim)``.
    :raises CollapsedError: if all are the same, or any is not finite.
    """

    def __init__(self, function: Function, density: Target, points: Tensor) -> None:
        self.function, self.density = function, density
        values = self._values(points)
        labels = [
            f"`{index_label(name, index)}`"
            for name, value in values.items()
            for index in itertools.product(*map(range, value.shape[1:]))
        ]
        rows = self._rows(values, points)
        self.loc, scale = rows.mean(0), rows.std(0)
        rounding = 10 * torch.finfo(rows.dtype).eps * rows.abs().amax(0)
        self.moves = scale > rounding
        if not rows.isfinite().all() or not self.moves.any():
            raise CollapsedError("the quantities are not finite, or the same at all draws")
        self.scale = scale[self.moves]
        self.labels = tuple(label for label, moves in zip(labels, self.moves, strict=True) if moves)

    def __call__(self, points: Tensor) -> Tensor:
        """``(num_points, num_quantities)`` of ``(num_points, latent_dim)``."""
        rows = self._rows(self._values(points), points) - self.loc
        return rows[:, self.moves] / self.scale

    def _values(self, points: Tensor) -> dict[str, Tensor]:
        return values_of(self.function, self.density.constrain(points))

    @staticmethod
    def _rows(values: dict[str, Tensor], points: Tensor) -> Tensor:
        return torch.cat([value.reshape(len(points), -1) for value in values.values()], -1)
