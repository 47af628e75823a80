# SPDX-License-Identifier: Apache-2.0
"""Runs of a model with fixed sites, for many values of its latent variables at once or for one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pyro
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import Model, varying_site
from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.run_mode import RunMode
from pyro_implicit.runtime.sites import is_data, is_latent

__all__ = ["ModelRuns"]

T = TypeVar("T")
Values = dict[str, Tensor]


class ModelRuns:
    """Runs a model at values of its latent variables; refuses one whose sites change.

    :param model: the model with its data.
    :param start: values at which it is known to run.
    :param first: the trace of its first run.
    :param batched: runs it for many values at once, and remembers how.
    """

    def __init__(self, model: Model, start: Values, first: Trace, batched: BatchedRuns) -> None:
        self.model, self.batched = model, batched
        self._start = start
        # The observed sites; None once runs of a random model were found to have the same.
        self._observed: set[str] | None = _observed(first)

    def on(self, args: tuple, kwargs: dict[str, Any]) -> ModelRuns:
        """Return runs of the same model with other arguments."""
        return self._of(self.model.on(args, kwargs, self._start))

    def in_double(self) -> ModelRuns:
        """Return runs of the same model in double precision."""
        runs = self._of(self.model.in_double())
        runs.batched = copy.copy(self.batched)  # the conversion may fail
        return runs

    def refusing_random(self, owner: str) -> ModelRuns:
        """Return runs that refuse a model which is random beyond its latent variables.

        :param owner: whose runs they are, for messages.
        """
        runs = copy.copy(self)
        runs.batched = BatchedRuns(owner, refuses_random=True)
        return runs

    def _of(self, model: Model) -> ModelRuns:
        runs = copy.copy(self)
        runs.model = model
        return runs

    def map(self, values: Values, read: Callable[[Trace], T], otherwise: T | None = None) -> T:
        """Return what a function reads in the trace of each run; see :meth:`BatchedRuns.map`.

        :raises UnfitModelError: if a latent or observed site is in some runs only.
        """
        varies = False

        def checked(trace: Trace) -> T:
            nonlocal varies
            self.refuse_varying(trace)
            varies |= self._observed is not None and self._observed != _observed(trace)
            return read(trace)

        with poutine.block(), pyro.validation_enabled(False):
            found = self.batched.map(self.model, values, checked, otherwise)
        if varies and self.model.discrete is None:
            self._refuse_random_sites()
        return found

    def trace(self, values: Values) -> Trace:
        """Return the trace of one plain run."""
        with poutine.block(), pyro.validation_enabled(False):
            trace = self.model.run(values)
        self.model.share_minibatch(trace)
        return trace

    def inside(self, values: Values, read: Callable[[Trace], T]) -> T:
        """Return what a function reads in one run inside a transformation of ``torch.func``."""
        with poutine.block(), pyro.validation_enabled(False), RunMode():
            return read(prune_subsample_sites(self.model.run(values)))

    def refuse_varying(self, trace: Trace) -> None:
        """Check that a run has the latent variables of the first one."""
        found = {name for name, site in trace.nodes.items() if is_latent(site)}
        varying = found.difference(self._start)
        if self.model.discrete is None:
            varying |= self._start.keys() - found
        else:  # a sum may have replaced sites that depend on it
            varying -= self.model.discrete.names
        for name in sorted(varying):
            raise varying_site(name)

    def _refuse_random_sites(self) -> None:
        """Check that the observed sites depend on nothing but the latents."""
        first, *others = (_observed(self.trace(self._start)) for _ in range(RUNS.num_compared_runs))
        for other in others:
            for name in sorted(first ^ other):
                raise varying_site(name)
        self._observed = None


def _observed(trace: Trace) -> set[str]:
    return {name for name, site in trace.nodes.items() if is_data(site)}
