# SPDX-License-Identifier: Apache-2.0
"""A model with its data, run at given values of its latents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.discrete import DiscreteSum
from pyro_implicit.density.site_loop import loop_where_needed
from pyro_implicit.density.validation import leave_out_masked, without_validation
from pyro_implicit.runtime.sites import is_flat

__all__ = [
    "Model",
    "SubsampledError",
    "UnfitModelError",
    "compute_log_prob",
    "refuse_subsampling",
    "varying_site",
]

Values = dict[str, Tensor]


class SubsampledError(ValueError):
    """All data are wanted, and the model or the guide subsamples them."""


class UnfitModelError(ValueError):
    """A model has no log-density of fixed latents; no values of these are to blame."""


class Model:
    """A Pyro model with its data, to be run at given values of its latents.

    :param model: the Pyro model.
    :param args: its arguments, as ``kwargs``.
    :param latents: sites whose values will be given, and subsampled indices that are fixed.
    :param discrete: the latents that are summed out.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        latents: Trace,
        discrete: DiscreteSum | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.replayed = latents
        self.discrete = discrete
        self.last_site: str | None = None
        """The last that a run came to, or ``_RETURN`` if it came to its end."""

    def on(self, args: tuple, names: Iterable[str]) -> Model:
        """The same model with other arguments, which draws its subsampled indices anew.

        :param names: of the latents.
        """
        latents = Trace()
        for name in names:
            latents.add_node(name, **self.replayed.nodes[name])
        return Model(self.model, args, self.kwargs, latents, self.discrete)

    def run(self, values: Values) -> Trace:
        """The trace of one run, without log-probabilities but of a sum over discrete latents."""
        for name, value in values.items():
            self.replayed.nodes[name]["value"] = value
        model = self.model if self.discrete is None else self.discrete.enumerate(self.model)
        tracer = poutine.trace(poutine.replay(model, trace=self.replayed))
        try:
            trace = tracer.get_trace(*self.args, **self.kwargs)
        finally:
            self.last_site = next(reversed(tracer.trace.nodes), None)
        leave_out_masked(trace)
        if not is_validation_enabled():
            for site in trace.nodes.values():
                if site["type"] == "sample":
                    site["fn"] = without_validation(site["fn"])
            loop_where_needed(trace)
        return trace if self.discrete is None else self.discrete.collapse(trace)

    def share_minibatch(self, trace: Trace) -> None:
        """Make all later runs use the subsampled indices of ``trace``."""
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and site_is_subsample(site) and name not in self.replayed:
                self.replayed.add_node(name, **{**site, "is_observed": False})


def compute_log_prob(trace: Trace) -> None:
    """As ``trace.compute_log_prob()``, flat priors in their latents' dtype and on their device."""
    trace.compute_log_prob()
    for site in trace.nodes.values():
        if site["type"] == "sample" and is_flat(site["fn"]):  # of which the zeros are the CPU's
            for key in ("log_prob", "unscaled_log_prob", "log_prob_sum"):
                site[key] = site[key].to(site["value"])


def varying_site(name: str) -> UnfitModelError:
    """The error for a site that only some runs of a model come to."""
    return UnfitModelError(
        f"site '{name}' is in some runs of the model and not in others, so that these have no "
        "log-density of the same latents. Cure: sample it always, and use torch.where or a mask "
        "where it has no effect"
    )


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
