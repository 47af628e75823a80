# SPDX-License-Identifier: Apache-2.0
"""The factors by which a model scales its minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.sites import is_data

__all__ = ["DataScales", "trace_once"]


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
        self.first = 1.0
        self.first = self.of(args)

    def of(self, args: tuple) -> float:
        """Return the largest factor of data, or that of the first minibatch if none is known.

        :param args: positional arguments of the model.
        """
        key = tuple(getattr(part, "shape", None) for part in args)
        if key not in self._known:
            trace = trace_once(self._model, args, self._kwargs)
            sites = [] if trace is None else [one for one in trace.nodes.values() if is_data(one)]
            largest = [torch.as_tensor(site["scale"]).max().item() for site in sites]
            self._known[key] = max(largest, default=self.first)
        return self._known[key]


def trace_once(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Trace | None:
    """Return a trace of a model without side effects; None if the model fails at this draw.

    **Example:**

    >>> def model():
    ...     pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    >>> trace_once(model, (), {}).stochastic_nodes
    ['x']

    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    """
    with seeded(0), poutine.block(), pyro.validation_enabled(False), torch.no_grad():
        try:
            return poutine.trace(model).get_trace(*args, **kwargs)
        except IMPOSSIBLE:
            return None
