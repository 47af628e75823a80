# SPDX-License-Identifier: Apache-2.0
"""The engine: any model, run for many values of its latents at once by ``torch.func.vmap``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "BatchedRuns",
    "Model",
    "SubsampledError",
    "VmapError",
    "compute_log_prob",
    "refuse_subsampling",
]

Values = dict[str, Tensor]
T = TypeVar("T")


class VmapError(RuntimeError):
    """A model cannot run inside ``torch.func.vmap``, or would be another model there."""


class SubsampledError(ValueError):
    """All data are wanted, and the model or the guide subsamples them."""


class Model:
    """A Pyro model with its data, to be run at given values of its latents.

    :param model: the Pyro model.
    :param args: its arguments, as ``kwargs``.
    :param latents: sites whose values will be given, and subsampled indices that are fixed.
    """

    def __init__(
        self, model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], latents: Trace
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.replayed = latents

    def run(self, values: Values) -> Trace:
        """The trace of one run, without log-probabilities."""
        for name, value in values.items():
            self.replayed.nodes[name]["value"] = value
        model = poutine.replay(self.model, trace=self.replayed)
        trace = poutine.trace(model).get_trace(*self.args, **self.kwargs)
        if not is_validation_enabled():
            for site in trace.nodes.values():
                if site["type"] == "sample":
                    site["fn"] = without_validation(site["fn"])
        return trace

    def share_minibatch(self, trace: Trace) -> None:
        """Make all later runs use the subsampled indices of ``trace``."""
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and site_is_subsample(site) and name not in self.replayed:
                self.replayed.add_node(name, **{**site, "is_observed": False})


class BatchedRuns:
    """Runs a model for many values of its latents, and remembers how it can be run.

    The first batch is compared with a plain run; a model that fails is run one value at a time from
    then on, with one warning that names the cause.

    :param owner: who runs it, for the warning.
    :param mode: ``"vmap"``, or ``False`` for one run after the other.
    """

    def __init__(self, owner: str, mode: Literal["vmap", False] = "vmap") -> None:
        self.owner = owner
        self.mode = mode
        self.checked = mode is False

    def map(self, model: Model, values: Values, read: Callable[[Trace], T]) -> T:
        """What is read in the trace of each run, stacked.

        :param values: by site, ``(num_runs, *site_shape)``.
        :param read: tensors in dicts, tuples or alone, from a trace without subsampling sites whose
            log-probabilities are not computed yet.
        :returns: the same, each tensor ``(num_runs, *shape)``.
        """
        if self.mode == "vmap" and not self.checked:
            self.checked = True
            try:
                return _vmap_compared(model, values, read)
            except VmapError as error:
                self.mode = False
                warnings.warn(
                    f"{self.owner} runs the model one particle at a time, because it cannot run "
                    f"inside torch.func.vmap ({error}). Cure: write the model without .item() and "
                    "without branches on latent values; an ELBO can also be told "
                    'vectorize_particles="plate" or False',
                    stacklevel=2,
                )
        return _vmap(model, values, read) if self.mode == "vmap" else _loop(model, values, read)


def _vmap(model: Model, values: Values, read: Callable[[Trace], T]) -> T:
    def read_one(values: Values) -> T:
        # The plain run made Pyro's checks; in here they would branch on batched values.
        with pyro.validation_enabled(False):
            return read(prune_subsample_sites(model.run(values)))

    return torch.func.vmap(read_one, randomness="same")(values)


def _vmap_compared(model: Model, values: Values, read: Callable[[Trace], T]) -> T:
    """As :func:`_vmap`, compared with a plain run of the first values.

    :raises VmapError: saying what vmap cannot do, or where the two disagree.
    """
    first = model.run({name: value[0] for name, value in values.items()})
    model.share_minibatch(first)
    first = prune_subsample_sites(first)
    for name, site in first.nodes.items():
        if site["type"] == "sample" and not site["is_observed"] and name not in model.replayed:
            raise VmapError(f"site '{name}' is a latent that is drawn anew in each run")
    expected = torch_item(first.log_prob_sum())

    def read_both(trace: Trace) -> tuple[T, Tensor]:
        return read(trace), torch.as_tensor(trace.log_prob_sum())

    try:
        result, total = _vmap(model, values, read_both)
    except Exception as error:  # vmap raises many kinds, one for each thing it cannot do
        first_line = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        raise VmapError(first_line) from error
    found = total[0].item()
    if math.isfinite(expected) and not math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-3):
        raise VmapError(
            f"its log-density is {found:.6g} there and {expected:.6g} outside; is it random "
            "beyond its latents (dropout)?"
        )
    return result


def _loop(model: Model, values: Values, read: Callable[[Trace], T]) -> T:
    results = []
    for index in range(len(next(iter(values.values())))):
        trace = model.run({name: value[index] for name, value in values.items()})
        model.share_minibatch(trace)
        results.append(read(prune_subsample_sites(trace)))
    return pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def compute_log_prob(trace: Trace) -> None:
    """As ``trace.compute_log_prob()``, flat priors in their latents' dtype and on their device."""
    trace.compute_log_prob()
    for site in trace.nodes.values():
        if site["type"] == "sample" and isinstance(
            site["fn"], dist.ImproperUniform
        ):  # its zeros are the CPU's, by default
            for key in ("log_prob", "unscaled_log_prob", "log_prob_sum"):
                site[key] = site[key].to(site["value"])


def refuse_subsampling(trace: Trace, what: str) -> None:
    """Check that a trace saw all data.

    :param what: wants them, for the message.
    :raises SubsampledError: naming plate, site and cure.
    """
    for name, site in trace.nodes.items():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size is not None and frame.full_size != frame.size:
                raise SubsampledError(
                    f"{what} wants all data, but plate '{frame.name}' of site '{name}' subsamples "
                    f"{frame.size} of {frame.full_size} elements. Cure: run the model without "
                    "subsample_size"
                )


def without_validation(
    fn: torch.distributions.Distribution,
) -> torch.distributions.Distribution:
    """A copy that checks nothing: distributions made while validation was on go on checking."""
    fn = copy.copy(fn)
    fn._validate_args = False
    for name, part in vars(fn).items():
        if isinstance(part, torch.distributions.Distribution):
            setattr(fn, name, without_validation(part))
    return fn
