# SPDX-License-Identifier: Apache-2.0
"""Distributions whose log-density vmap cannot compute: one run at a time, in its midst."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_implicit.density.in_each_run import in_each_run
from pyro_implicit.density.run_mode import RunMode, writes_to_unbatched
from pyro_implicit.ops.hidden_markov import log_forward

__all__ = ["loop_where_needed"]


def loop_where_needed(trace: Trace) -> None:
    """Inside ``vmap``, make each site of a trace able to compute its log-density.

    A distribution whose ``log_prob`` vmap refuses, for branches on values or for indices of dynamic
    length, is evaluated for one run after the other, while the rest of the model goes on in one go.

    :param trace: whose distributions give place to copies.
    """
    for site in trace.nodes.values():
        if site["type"] == "sample":
            fn = site["fn"] = copy.copy(site["fn"])
            # Of a copy, so that no distribution holds itself.
            fn.log_prob = functools.partial(_log_prob, copy.copy(fn))


def _log_prob(fn: Any, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(fn, dist.DiscreteHMM):
        return _of_hidden_markov(fn, *args, **kwargs)
    try:
        return type(fn).log_prob(fn, *args, **kwargs)
    except Exception as error:
        # For these the whole run has a cure.
        if writes_to_unbatched(error) or not RunMode.is_active():
            raise
        refusal = error.with_traceback(None)  # whose frames would keep the graph until gc runs
    whole = (fn, args, kwargs)
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _replace(whole, collect)

    def in_a_loop(num_runs: int | None, *all_runs: Tensor) -> Tensor:
        if num_runs is None:
            raise refusal
        results = []
        for of_run in zip(*all_runs, strict=True):
            one, one_args, one_kwargs = _replace(whole, _Next(of_run))
            results.append(type(fn).log_prob(one, *one_args, **one_kwargs))
        return torch.stack(results)

    return in_each_run(in_a_loop, *tensors)


def _of_hidden_markov(fn: dist.DiscreteHMM, value: Tensor) -> Tensor:
    """Pyro's own has a logarithm that vmap refuses."""
    each_state = value.unsqueeze(-1 - fn.observation_dist.event_dim)
    observed = fn.observation_dist.log_prob(each_state)
    return log_forward(fn.initial_logits, fn.transition_logits, observed)


class _Next:
    """Gives tensors one after the other."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = iter(tensors)

    def __call__(self, _: Tensor) -> Tensor:
        return next(self.tensors)


def _replace(part: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy with a function applied to all tensors in it, always in the same order."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_replace(item, function) for item in part)
    if isinstance(part, dict):
        return {key: _replace(item, function) for key, item in part.items()}
    if isinstance(part, (Distribution, Transform)):
        part = copy.copy(part)
        vars(part).update(_replace(dict(vars(part)), function))
    return part
