# SPDX-License-Identifier: Apache-2.0
"""What an ELBO remembers from step to step: one value, saved with a run, new for a new model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyro_implicit.density.engine import BatchedRuns

__all__ = ["ElboState", "Pair"]


@dataclass
class ElboState:
    """What was found out about one model and guide, and what an estimator keeps.

    ``runs`` knows how the model can be run; ``value_ndims`` are the dimensions of each of the
    guide's values outside the particle plate, None before the first run; ``has_implicit_sites`` and
    ``checked_sites`` tell what the guide draws and which sites have passed a method's checks;
    ``memory`` is what a method keeps, by purpose and site.
    """

    runs: BatchedRuns
    value_ndims: dict[str, int] | None = None
    has_implicit_sites: bool = False
    checked_sites: set[str] = field(default_factory=set)
    memory: dict[tuple[str, str], Any] = field(default_factory=dict)


class Pair:
    """The model and guide that a state belongs to, without keeping them alive."""

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any]) -> None:
        self._model, self._guide = _reference(model), _reference(guide)

    def has(self, model: Callable[..., Any], guide: Callable[..., Any]) -> bool:
        """Whether it is of these two."""
        return self._model() == model and self.has_guide(guide)

    def has_guide(self, guide: Callable[..., Any]) -> bool:
        """Whether it is of this guide."""
        return self._guide() == guide

    def __getstate__(self) -> dict[str, Any]:
        return {}  # weak references cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = self._guide = lambda: None


def _reference(target: Callable[..., Any]) -> Callable[[], Any]:
    if inspect.ismethod(target):  # made anew at each access
        return weakref.WeakMethod(target)
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target
