# SPDX-License-Identifier: Apache-2.0
"""The registry of models: a decorator adds a model, :func:`load` finds it by name.

There are three collections: the zoo, the large models of :mod:`benchmarks.large`, and the classic
BUGS examples of :mod:`benchmarks.classics`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyro
import torch
from pyro.infer.autoguide import init_to_feasible, init_to_median
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor

__all__ = [
    "COLLECTIONS",
    "Split",
    "ZooModel",
    "add",
    "floats",
    "integers",
    "load",
    "names",
    "split_of",
]

COLLECTIONS = {
    "zoo": (
        "regression",
        "hierarchical",
        "shrinkage",
        "gaussian_processes",
        "time_series",
        "dynamics",
        "mixtures",
        "latent_variables",
        "missing",
        "networks",
    ),
    "large": ("regression", "groups", "series", "fields"),
    "classics": ("hierarchical", "regression"),
}
# Medians of vague gamma priors underflow.
STARTS = {"classics": init_to_feasible}

Draws = dict[str, Tensor]
_MODELS: dict[str, ZooModel] = {}


class Split(Protocol):
    """The models for the development of ``fit``, and those that are only scored."""

    LOOK: tuple[str, ...]
    SCORE: tuple[str, ...]


@dataclass(frozen=True)
class ZooModel:
    """A model of a collection.

    ``model`` is a function, or the class of a module; ``data`` makes its arguments; ``invariant``
    maps draws by site to matrices, for models whose latents have symmetries (labels, rotations).
    Without it, draws are compared in unconstrained space.
    """

    name: str
    collection: str
    kind: str
    source: Callable[..., Any]
    data: Callable[[], tuple]
    invariant: Callable[..., Draws] | None = None
    max_plate_nesting: int | None = None

    @property
    def references(self) -> Path:
        """The folder of the collection's references."""
        return Path(__file__).parents[1] / self.collection / "references"

    @property
    def half(self) -> str:
        """The model's part of the split, ``"look"`` or ``"score"``."""
        return "look" if self.name in split_of(self.collection).LOOK else "score"

    def model(self) -> Callable[..., Any]:
        """Return the model that a user passes to ``fit``; a module is created anew."""
        return self.source() if inspect.isclass(self.source) else self.source

    def potential(self, args: tuple) -> tuple[Callable[[Draws], Tensor], Draws, dict[str, Any]]:
        """Return Pyro's potential energy of the unconstrained latents with discrete latents
        marginalised, an example of these latents, and the transforms to unconstrained space.
        It serves to check references and to unconstrain draws."""
        with pyro.validation_enabled(False):  # distant points may be impossible
            start, potential, transforms, _ = initialize_model(
                self.model(),
                args,
                max_plate_nesting=self.max_plate_nesting,
                init_strategy=STARTS.get(self.collection, init_to_median),
            )
        return potential, start, transforms

    def unconstrain(self, draws: Draws, args: tuple) -> Tensor:
        """Convert draws by site to ``(num_draws, dim)``."""
        _, start, transforms = self.potential(args)
        parts = []
        for name, value in start.items():
            draw = transforms[name](draws[name]) if name in transforms else draws[name]
            parts.append(draw.reshape(len(draw), value.numel()))
        return torch.cat(parts, -1)

    def features(self, draws: Draws, args: tuple) -> tuple[Tensor, list[int]]:
        """Return the compared features, ``(num_draws, num_features)``, and columns by part.

        :param draws: by site, ``(num_draws, *site_shape)``.
        """
        if self.invariant is None:
            _, start, _ = self.potential(args)
            return self.unconstrain(draws, args), [value.numel() for value in start.values()]
        parts = [part.reshape(len(part), -1) for part in self.invariant(draws, *args).values()]
        return torch.cat(parts, -1), [part.shape[1] for part in parts]


def add(
    data: Callable[[], tuple],
    invariant: Callable[..., Draws] | None = None,
    name: str | None = None,
    max_plate_nesting: int | None = None,
) -> Callable[[Any], Any]:
    """Add a function or a module's class to the collection of its package.

    :param data: makes the arguments, in the default dtype.
    :param invariant: function of ``(draws, *args)`` that returns the compared features.
    :param name: default: that of the function.
    :param max_plate_nesting: for models with discrete latents.
    """

    def register(source: Any) -> Any:
        key = name or source.__name__
        collection, kind = source.__module__.split(".")[-2:]
        assert key not in _MODELS, key
        _MODELS[key] = ZooModel(key, collection, kind, source, data, invariant, max_plate_nesting)
        return source

    return register


def _read_all() -> None:
    for collection, files in COLLECTIONS.items():
        for file in files:
            importlib.import_module(f"benchmarks.{collection}.{file}")


def names(collection: str = "zoo") -> list[str]:
    """Names of all models of a collection, file by file."""
    _read_all()
    return [name for name, model in _MODELS.items() if model.collection == collection]


def split_of(collection: str) -> Split:
    """Return the collection's module ``split``, with the names of both halves."""
    return cast(Split, importlib.import_module(f"benchmarks.{collection}.split"))


def load(name: str) -> ZooModel:
    """Return one model.

    :raises KeyError: for a name of no model.
    """
    _read_all()
    return _MODELS[name]


def floats(*arrays: Any) -> tuple[Tensor, ...]:
    """Convert arrays to tensors of the default dtype."""
    return tuple(torch.as_tensor(np.asarray(a), dtype=torch.get_default_dtype()) for a in arrays)


def integers(array: Any) -> Tensor:
    """Convert an array of indices to a tensor."""
    return torch.as_tensor(np.asarray(array), dtype=torch.long)
