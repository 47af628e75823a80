# SPDX-License-Identifier: Apache-2.0
"""The model at the particles of a guide, in the layout of ``Trace_ELBO``'s vectorised traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import DiscreteSum, Model, compute_log_prob, leave_out_masked
from pyro_implicit.infer.engine.sites import PARTICLE_PLATE

__all__ = ["Particles"]

LogProbs = tuple[dict[str, Tensor], dict[str, Tensor]]


class _LeftOut:
    """Particles of which the model's gradient is left out.

    Apart from :class:`Particles`, as a tensor's hook that knew these, which know the tensor, would
    keep both for ever wherever no gradient is taken.
    """

    def __init__(self) -> None:
        self.particles: Tensor | None = None
        """Which ones, ``(num_particles,)``, if any."""

    def of(self, value: Tensor) -> Tensor:
        """The value ``(num_particles, ...)``, whose gradient is 0 for them."""
        if value.requires_grad:
            value = value.view_as(value)
            value.register_hook(self._gradient)
        return value

    def _gradient(self, gradient: Tensor) -> Tensor:
        if self.particles is None:
            return gradient
        shape = self.particles.shape + (1,) * (gradient.dim() - 1)
        return gradient.masked_fill(self.particles.reshape(shape), 0.0)


class Particles(Model):
    """A model to be run at the draws of a guide, the leftmost dimension of which counts particles.

    All ways of running it give a trace in which each log-probability has the particles at dimension
    ``-max_plate_nesting``. All particles share the minibatch of the guide trace or of the first
    run.

    :param model: the Pyro model.
    :param guide_trace: a guide trace under the particle plate, if there are many particles.
    :param num_particles: their number.
    :param value_ndims: dimensions of each latent's value when drawn outside the particle plate.
    :param max_plate_nesting: plates of the model, the particle plate included.
    :param discrete: latents that are summed out.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide_trace: Trace,
        num_particles: int,
        value_ndims: dict[str, int],
        max_plate_nesting: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        discrete: DiscreteSum | None = None,
    ) -> None:
        super().__init__(model, args, kwargs, Trace(), discrete)
        self.guide_trace = guide_trace
        self.num_particles = num_particles
        self.max_plate_nesting = max_plate_nesting
        self.left_out = _LeftOut()
        self.latents: dict[str, Tensor] = {}
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample":
                continue
            self.replayed.add_node(name, **site)
            if not site_is_subsample(site):
                value = site["value"]
                if num_particles > 1:
                    value = self.left_out.of(_particles_first(site, value_ndims.get(name)))
                self.latents[name] = value

    def particle(self, index: int) -> dict[str, Tensor]:
        """The latent values of one particle."""
        if self.num_particles == 1:
            return dict(self.latents)
        return {name: value[index] for name, value in self.latents.items()}

    def run_plate(self, vectorize: Callable[[Callable], Callable]) -> Trace:
        """The model's trace for all particles, run once under Pyro's particle plate.

        :param vectorize: puts the model under that plate.
        """
        if self.discrete is not None and self.num_particles == 1:
            trace = self.run(self.latents)
        else:
            model = poutine.replay(vectorize(self.model), trace=self.guide_trace)
            trace = poutine.trace(model).get_trace(*self.args, **self.kwargs)
            leave_out_masked(trace)
        trace = prune_subsample_sites(trace)
        compute_log_prob(trace)
        return trace

    def run_all(self, runs: BatchedRuns) -> Trace:
        """The model's trace for all particles.

        :param runs: in this way.
        """
        traces: list[Trace] = []

        def read(trace: Trace) -> LogProbs:
            compute_log_prob(trace)
            traces.append(trace)
            return _log_probs(trace)

        return self._lay_out(runs.map(self, self.latents, read), traces[-1])

    def _lay_out(self, log_probs: LogProbs, trace: Trace) -> Trace:
        """A trace of all particles from everyone's log-probabilities and one particle's trace."""
        result = Trace()
        scaled, unscaled = ({n: self._pad(v) for n, v in part.items()} for part in log_probs)
        particle_frame = self._particle_frame()
        for name, site in trace.nodes.items():
            if site["type"] == "param":
                result.add_node(name, **site)
        for name, site in _sample_sites(trace):
            result.add_node(
                name,
                type="sample",
                name=name,
                fn=site["fn"],
                is_observed=site["is_observed"],
                cond_indep_stack=(*particle_frame, *site["cond_indep_stack"]),
                log_prob=scaled[name],
                log_prob_sum=scaled[name].sum(),
            )
            if name in unscaled:
                result.nodes[name]["unscaled_log_prob"] = unscaled[name]
        return result

    def _particle_frame(self) -> tuple[Any, ...]:
        """Pyro's record of the particle plate; none where the guide has no site."""
        for name in self.latents:
            for frame in self.guide_trace.nodes[name]["cond_indep_stack"]:
                if frame.name == PARTICLE_PLATE:
                    return (frame,)
        return ()

    def _pad(self, value: Tensor) -> Tensor:
        """Put the particles at dimension ``-max_plate_nesting``."""
        padding = (1,) * (self.max_plate_nesting - value.dim())
        return value.reshape(value.shape[:1] + padding + value.shape[1:])


def _particles_first(site: dict[str, Any], ndim: int | None) -> Tensor:
    """Drop the singletons between the particle dimension and the value's own dimensions."""
    value = site["value"]
    if ndim is None:  # a site that the first run did not meet
        depths = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
        depths = sorted(depths)[:-1]
        ndim = max(depths, default=0) + site["fn"].event_dim
    return value.reshape(value.shape[:1] + value.shape[value.dim() - ndim :])


def _log_probs(trace: Trace) -> LogProbs:
    """Log-probabilities of all sites, and of the latents without scale and mask."""
    sites = _sample_sites(trace)
    return (
        {name: torch.as_tensor(site["log_prob"]) for name, site in sites},
        {name: site["unscaled_log_prob"] for name, site in sites if not site["is_observed"]},
    )


def _sample_sites(trace: Trace) -> list[tuple[str, dict[str, Any]]]:
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]
