# SPDX-License-Identifier: Apache-2.0
"""Quantities of draws in place of latents: functions, names of elements, mixing of chains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.moments import CollapsedError, Fault, rounding
from pyro_implicit.diagnostics.policy import MOMENTS, REPORT
from pyro_implicit.nn import FunctionValues, NetworkModel

__all__ = [
    "Function",
    "Mixing",
    "Observed",
    "Quantities",
    "describe",
    "describe_faults",
    "find_quantities",
    "mixing",
    "values_of",
]


def describe_faults(faults: Sequence[Fault], labels: Sequence[str], given_rest: bool) -> str:
    """Describe errors of one kind.

    :param faults: the worst first, at least one.
    :param labels: labels of the coordinates.
    :param given_rest: whether standard deviations are those given all other coordinates.
    """
    worst, *others = faults
    where = f"{'of' if len(worst.terms) == 1 else 'along'} {_direction(worst, labels)}"
    if worst.kind == "mean":
        side = "low" if worst.error < 0 else "high"
        text = f"the mean {where} is {abs(worst.error):.2f} sd too {side}"
    else:
        rest = ", given the rest," if given_rest and len(labels) > 1 else ""
        text = f"the sd {where}{rest} is {worst.error:.2f} times what it should be"
    # Single coordinates of a direction may have errors, too. Each is named once, with its worst.
    singles: list[Fault] = []
    for fault in others:
        known = [worst.terms, *(one.terms for one in singles)]
        if len(fault.terms) == 1 and fault.terms not in known:
            singles.append(fault)
    named = [f"{_direction(f, labels)} ({_short(f)})" for f in singles[: REPORT.max_named - 1]]
    if len(singles) > len(named):
        named.append(f"{len(singles) - len(named)} more")
    return text + (f"; likewise {', '.join(named)}" if named else "")


def _short(fault: Fault) -> str:
    return f"{fault.error:+.2f}" if fault.kind == "mean" else f"{fault.error:.2f}"


def _direction(fault: Fault, labels: Sequence[str]) -> str:
    text = ""
    for number, (index, weight) in enumerate(fault.terms):
        size = "" if round(abs(weight), 2) == 1 else f"{abs(weight):.2g} "
        sign = "" if number == 0 else (" - " if weight < 0 else " + ")
        label = labels[index] if index < len(labels) else f"coordinate {index}"
        text += f"{sign}{size}{label}"
    return text


Function: TypeAlias = Callable[[dict[str, Tensor]], "Tensor | dict[str, Tensor]"]
Quantities: TypeAlias = Function | Literal["auto", "latents"]


def find_quantities(
    quantities: Quantities, model: Any, args: tuple, kwargs: Mapping[str, Any]
) -> Function | None:
    """Return the function to be checked, or None for the latent variables.

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
            "a network is judged by its predictions, but no inputs were given. Cure: the arguments "
            'of the model, (model, guide, ..., x, y), or quantities="latents" for the weights'
        )
    return FunctionValues(model, x)


def values_of(function: Function, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of a function by name, each ``(num_draws, *shape)``.

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
    """Describe quantities for a report."""
    return str(function) if isinstance(function, FunctionValues) else "the given quantities"


class Observed:
    """Quantities of unconstrained latents, in units of their standard deviations.

    Those that are the same at all draws are left out.

    :param function: function of constrained draws by site.
    :param target: the posterior.
    :param points: draws of the guide, ``(num_draws, latent_dim)``.
    :raises CollapsedError: if all are the same, or any is not finite.
    """

    def __init__(self, function: Function, target: Target, points: Tensor) -> None:
        self.function, self.target = function, target
        values = self._values(points)
        names = (element_labels(name, value.shape[1:]) for name, value in values.items())
        labels = [f"`{label}`" for label in itertools.chain.from_iterable(names)]
        rows = self._rows(values, points)
        self.loc, scale = rows.mean(0), rows.std(0)
        self.moves = scale > rounding(rows)
        if not rows.isfinite().all() or not self.moves.any():
            raise CollapsedError("the quantities are not finite, or the same at all draws")
        self.scale = scale[self.moves]
        self.labels = tuple(label for label, moves in zip(labels, self.moves, strict=True) if moves)

    def __call__(self, points: Tensor) -> Tensor:
        """``(num_points, num_quantities)`` of ``(num_points, latent_dim)``."""
        rows = self._rows(self._values(points), points) - self.loc
        return rows[:, self.moves] / self.scale

    def _values(self, points: Tensor) -> dict[str, Tensor]:
        return values_of(self.function, self.target.constrain(points))

    @staticmethod
    def _rows(values: dict[str, Tensor], points: Tensor) -> Tensor:
        return torch.cat([value.reshape(len(points), -1) for value in values.values()], -1)


class Mixing(NamedTuple):
    """R-hat of quantities between chains and within them, and their median effective sample size.

    ``within`` is the R-hat of the two halves of each chain. If it is near 1 and ``between`` is
    large, every chain is stationary, but stays in a region of its own.
    """

    between: float
    within: float
    effective_sample_size: float

    def __str__(self) -> str:
        return (
            f"R-hat {self.between:.2f} between chains, {self.within:.2f} within; effective sample "
            f"size {self.effective_sample_size:.0f}"
        )


@torch.no_grad()
def mixing(values: Mapping[str, Tensor]) -> Mixing | None:
    r"""Measure how chains mix, by all elements of all quantities together.

    With B the variance of the means of chains (or of halves of chains about their chain's mean) and
    W the mean variance inside of them, both averaged over the elements of a quantity,
    :math:`\hat R = \sqrt{1 + B / W}`. The worst quantity counts.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> apart = torch.randn(4, 500, 10) + torch.arange(4.0).reshape(4, 1, 1)
    >>> print(mixing({"mean": apart}))
    R-hat 1.6... between chains, 1.00 within; effective sample size ...

    :param values: by name, ``(num_chains, num_draws, *shape)``.
    :returns: None for a single chain, fewer than 8 draws of a chain, or constant quantities.
    """
    rows = [value.reshape(*value.shape[:2], -1).double() for value in values.values()]
    if len(rows[0]) < 2 or rows[0].shape[1] < MOMENTS.least_chain_draws:
        return None
    half = rows[0].shape[1] // 2
    halves = [row[:, -2 * half :].unflatten(1, (2, half)) for row in rows]
    between, within = (max(map(_r_hat, parts)) for parts in (rows, halves))
    sizes = torch.cat([effective_sample_size(row, 0, 1).flatten() for row in rows])
    sizes = sizes[sizes.isfinite()]
    if not len(sizes) or not between < float("inf"):
        return None
    return Mixing(between, within, sizes.median().item())


def _r_hat(parts: Tensor) -> float:
    """Compare parts of chains, ``(..., num_parts, num_draws, size)``."""
    inside = parts.var(-2).mean().item()
    apart = parts.mean(-2).var(-2).mean().item()
    return (1 + apart / inside) ** 0.5 if inside > 0 else float("inf")
