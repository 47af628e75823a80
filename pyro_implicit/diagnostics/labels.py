# SPDX-License-Identifier: Apache-2.0
"""Names of unconstrained coordinates, and errors in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributions import transforms

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.moments import Fault

__all__ = ["coordinate_labels", "describe_faults", "index_label"]

MAX_NAMED = 3


def coordinate_labels(density: Target) -> tuple[str, ...]:
    """What each coordinate of a model's unconstrained latent vector is.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    ...     pyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    >>> coordinate_labels(Target(model))
    ('log `tau`', '`theta[0]`', '`theta[1]`')

    :param density: of the model.
    """
    labels: list[str] = []
    for name, shape in density.shapes.items():
        prefix = _prefix(density.transforms[name])
        indices = itertools.product(*map(range, shape))
        labels += [f"{prefix}`{index_label(name, index)}`" for index in indices]
    return tuple(labels)


def index_label(name: str, index: Iterable[int]) -> str:
    """A site's element as Python writes it: ``"theta[3]"``, or ``"tau"`` of a scalar."""
    inside = ", ".join(map(str, index))
    return f"{name}[{inside}]" if inside else name


def describe_faults(faults: Sequence[Fault], labels: Sequence[str], given_rest: bool) -> str:
    """Errors of one kind in words.

    :param faults: the worst first, at least one.
    :param labels: of the coordinates.
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
    # A direction is named by coordinates that may be at fault themselves.
    singles = [f for f in others if len(f.terms) == 1]
    named = [f"{_direction(f, labels)} ({_short(f)})" for f in singles[: MAX_NAMED - 1]]
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


def _prefix(transform: Any) -> str:
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    parts = transform.parts if isinstance(transform, transforms.ComposeTransform) else [transform]
    parts = [part for part in parts if not _is_identity(part)]
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], transforms.ExpTransform):
        return "log "
    if len(parts) == 1 and isinstance(parts[0], transforms.SigmoidTransform):
        return "logit "
    return "unconstrained "


def _is_identity(transform: Any) -> bool:
    if not isinstance(transform, transforms.AffineTransform):
        return False
    return bool((torch.as_tensor(transform.loc) == 0).all()) and bool(
        (torch.as_tensor(transform.scale) == 1).all()
    )
