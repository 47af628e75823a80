# SPDX-License-Identifier: Apache-2.0
"""The factors by which a model scales its minibatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.minibatches import num_rows
from pyro_implicit.runtime.sites import QuietPriors, is_data, is_latent
from pyro_implicit.runtime.trees import leaves_of

__all__ = ["DataScales", "has_only_local_latents", "trace_once"]


class DataScales:
    """The factors by which a model scales its minibatches, one for each shape of them.

    Steps on minibatches have weights inverse to these factors. Otherwise, the rows of a smaller
    minibatch count more than others.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     with pyro.plate("rows", 100, subsample_size=len(y)):
    ...         pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)
    >>> scales = DataScales(model, (torch.zeros(20),), {})
    >>> scales.of((torch.zeros(10),)) / scales.first
    2.0

    :param model: a Pyro model.
    :param args: its positional arguments with the first minibatch; ``kwargs`` are its keyword
        arguments.
    :ivar first: the factor of the first minibatch.
    """

    def __init__(self, model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self._model, self._kwargs = model, kwargs
        self._known: dict[Any, float] = {}
        self._sizes: dict[Any, dict[str, int]] = {}  # of plates
        self._first: dict[str, float] = {}  # by site of the first minibatch
        self.first = 1.0
        self.first = self.of(args)

    def of(self, args: tuple) -> float:
        """Return the largest factor of data, or that of the first minibatch if none is known.

        :param args: positional arguments of the model.
        """
        key = _shapes(args)
        if key not in self._known:
            trace = trace_once(self._model, args, self._kwargs)
            nodes = {} if trace is None else trace.nodes
            factors = {name: _factor(site) for name, site in nodes.items() if is_data(site)}
            data = [site for site in nodes.values() if is_data(site)]
            frames = [frame for site in data for frame in site["cond_indep_stack"]]
            self._sizes[key] = {frame.name: frame.size for frame in frames}
            self._first = self._first or factors
            self._warn_of_unequal_rows(factors)
            self._known[key] = max(factors.values(), default=self.first)
        return self._known[key]

    def size_of(self, plate: str, args: tuple) -> int | None:
        """Return the size of a plate in a minibatch; None if it is unknown."""
        self.of(args)
        return self._sizes[_shapes(args)].get(plate)

    def _warn_of_unequal_rows(self, factors: dict[str, float]) -> None:
        """Warn if one weight of a step cannot make the rows of all plates count alike."""
        pairs = {name: (self._first.get(name, factor), factor) for name, factor in factors.items()}
        ratios = {name: new / old for name, (old, new) in pairs.items() if (old, new) != (1.0, 1.0)}
        ordered = sorted(ratios, key=ratios.__getitem__)
        if ordered and ratios[ordered[-1]] > (1 + 1e-3) * ratios[ordered[0]]:
            name, other = ordered[0], ordered[-1]
            warn_user(
                f"minibatches differ in size, and differently for the data '{name}' and '{other}': "
                "one weight for each step cannot make all rows count alike, so that the posterior "
                "is biased towards some rows. Cure: minibatches of one size (drop_last=True)"
            )


def _shapes(args: tuple) -> tuple:
    """Return the shapes of tensors and arrays, also in containers, and the values of numbers."""
    return tuple(_shape(leaf) for leaf in leaves_of(args))


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, (bool, int, float)):
        return leaf
    shape = getattr(leaf, "shape", None)
    return leaf.item() if shape == () else shape


def _factor(site: dict[str, Any]) -> float:
    """Return the factor of a site: that of its subsampled plates, as rows may have own scales."""
    plates = [one for one in site["cond_indep_stack"] if one.full_size not in (None, one.size)]
    if plates:
        return math.prod(one.full_size / one.size for one in plates)
    return torch.as_tensor(site["scale"], dtype=torch.float64).max().item()


def has_only_local_latents(
    model: Callable[..., Any], args: tuple, batch: tuple, kwargs: dict[str, Any]
) -> bool:
    """Return whether all latent variables of a model belong to the rows of its minibatch.

    They do if a minibatch with all rows repeated has twice as many of them.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model(x):
    ...     with pyro.plate("rows", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> has_only_local_latents(model, (), (torch.zeros(3),), {})
    True

    :param args: the first arguments of the model, which all minibatches share; ``kwargs`` are
        keyword arguments.
    :param batch: further arguments, one minibatch.
    """
    twice = tuple(
        torch.cat([part, part]) if isinstance(part, Tensor) and num_rows(part) else part
        for part in batch
    )
    sizes = []
    for rows in (batch, twice):
        trace = trace_once(model, (*args, *rows), kwargs)
        nodes = {} if trace is None else trace.nodes
        sizes.append({k: site["value"].numel() for k, site in nodes.items() if is_latent(site)})
    return bool(sizes[0]) and sizes[1] == {name: 2 * size for name, size in sizes[0].items()}


def trace_once(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Trace | None:
    """Return a trace of a model without side effects; None if the model fails at this draw.

    **Example:**

    >>> def model():
    ...     pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    >>> trace_once(model, (), {}).stochastic_nodes
    ['x']

    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    """
    with seeded(0), poutine.block(), QuietPriors(), pyro.validation_enabled(False), torch.no_grad():
        try:
            return poutine.trace(model).get_trace(*args, **kwargs)
        except IMPOSSIBLE:
            return None
