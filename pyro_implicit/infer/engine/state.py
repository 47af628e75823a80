# SPDX-License-Identifier: Apache-2.0
"""What an ELBO remembers from step to step: one value, saved with a run, new for a new model."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pyro.infer import Trace_ELBO

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import DiscreteSum
from pyro_implicit.infer.engine.first_run import first_run
from pyro_implicit.infer.engine.traced_steps import TracedSteps
from pyro_implicit.runtime.locks import refuse_outer_plates

__all__ = ["CarriedMemory", "ElboState", "Pair", "StatefulELBO"]

T = TypeVar("T")


class CarriedMemory:
    """What is remembered of a site in attributes that are tensors, and changes from step to step by
    others in their place: a recorded step takes and gives them."""


@dataclass
class ElboState:
    """What was found out about one model and guide, and what an estimator keeps.

    ``runs`` knows how the model can be run, and ``discrete`` which of its latents are summed out;
    ``value_ndims`` are the dimensions of each of the
    guide's values outside the particle plate, None before the first run; ``has_implicit_sites`` and
    ``checked_sites`` tell what the guide draws and which sites have passed a method's checks;
    ``memory`` is what a method keeps, by purpose and site, and ``traced`` are recorded steps.
    """

    runs: BatchedRuns
    discrete: DiscreteSum | None = None
    value_ndims: dict[str, int] | None = None
    has_implicit_sites: bool = False
    checked_sites: set[str] = field(default_factory=set)
    memory: dict[tuple[str, str], Any] = field(default_factory=dict)
    traced: TracedSteps = field(default_factory=TracedSteps)


class Pair:
    """The model and guide that a state belongs to, without keeping them alive."""

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any]) -> None:
        self._model, self._guide = _reference(model), _reference(guide)

    def has(self, model: Callable[..., Any], guide: Callable[..., Any]) -> bool:
        """Whether it is of these two."""
        return _is(self._model(), model) and self.has_guide(guide)

    def has_guide(self, guide: Callable[..., Any]) -> bool:
        """Whether it is of this guide."""
        return _is(self._guide(), guide)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        return self  # a copy of the ELBO goes on with the same model and guide

    def __getstate__(self) -> dict[str, Any]:
        return {}  # weak references cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = self._guide = lambda: None


def _is(known: Any, target: Callable[..., Any]) -> bool:
    # Not by ==, which models may define; but methods are made anew at each access.
    return known is target or (inspect.ismethod(target) and known == target)


def _reference(target: Callable[..., Any]) -> Callable[[], Any]:
    if inspect.ismethod(target):
        return weakref.WeakMethod(target)
    try:
        return weakref.ref(target)
    except TypeError:
        return lambda: target


class StatefulELBO(Trace_ELBO):
    """A ``Trace_ELBO`` that remembers, for as long as model and guide stay the same.

    :param num_particles: draws of the guide per step.
    :param vectorize_particles: how the model runs for all of them; the guide runs under Pyro's
        particle plate in any case.
    :param kwargs: all others of :class:`pyro.infer.Trace_ELBO`.
    """

    def __init__(
        self,
        num_particles: int,
        vectorize_particles: Literal["vmap", "plate", False],
        **kwargs: Any,
    ) -> None:
        self.max_plate_nesting: float
        # Pyro counts the guide's particle plate in max_plate_nesting.
        super().__init__(num_particles, vectorize_particles=True, **kwargs)
        self.vectorize_particles = vectorize_particles
        self.num_steps_taken = 0  # not num_steps, which subclasses have as a setting
        self.num_skipped = 0
        self._given_nesting = self.max_plate_nesting
        self._pair: Pair | None = None
        self.state = self._new_state()

    def remember(self, purpose: str, site: str, make: Callable[[], T]) -> T:
        """What is kept of a site from step to step; made the first time."""
        memory = self.state.memory
        if (purpose, site) not in memory:
            memory[purpose, site] = make()
        return memory[purpose, site]

    def remembered(self, kind: type[T]) -> dict[str, T]:
        """By site, what of one kind is kept."""
        memory = self.state.memory
        return {site: kept for (_, site), kept in memory.items() if isinstance(kept, kind)}

    def get_state(self) -> dict[str, Any]:
        """All that the next step depends on beside parameters and random streams, for a file."""
        return {
            "memory": copy.deepcopy(self.state.memory),
            "num_steps": self.num_steps_taken,
            "num_skipped": self.num_skipped,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`get_state` gave; the next step goes on from there."""
        self.state.memory.update(copy.deepcopy(state["memory"]))
        self.num_steps_taken, self.num_skipped = state["num_steps"], state["num_skipped"]

    def _new_state(self) -> ElboState:
        mode: Literal["vmap", False] = "vmap" if self.vectorize_particles == "vmap" else False
        return ElboState(BatchedRuns(type(self).__name__, mode))

    def _meet(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> None:
        """Forget what belonged to another model or guide, and run a new pair once.

        :raises ValueError: inside a plate.
        """
        refuse_outer_plates(type(self).__name__)
        self._forget_others(model, guide)
        if self.state.value_ndims is None:
            self._guess_max_plate_nesting(model, guide, args, kwargs)
            self._pair = Pair(model, guide)

    def _forget_others(self, model: Callable, guide: Callable) -> None:
        """Forget what belonged to another model or guide."""
        if self._pair is not None and not self._pair.has(model, guide):
            self.state = self._new_state()
            self.max_plate_nesting = self._given_nesting
            if not self._pair.has_guide(guide):
                self._forget_guide()
            self._pair = None

    def _forget_guide(self) -> None:
        """Drop what was trained beside another guide."""

    def _guess_max_plate_nesting(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        found = first_run(model, guide, args, kwargs, self.max_plate_nesting)
        self.state.value_ndims = {n: s["value"].dim() for n, s in found.guide_sites.items()}
        self.state.discrete = found.discrete
        for name, site in found.guide_sites.items():
            self._check_trainable(name, site)
        if math.isinf(self.max_plate_nesting):
            self.max_plate_nesting = found.plate_nesting + (self.num_particles > 1)

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        """Refuse a site of a new guide that cannot be trained, and note an implicit one."""
