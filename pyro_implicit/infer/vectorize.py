# SPDX-License-Identifier: Apache-2.0
"""Run any model once for all particles, by ``torch.func.vmap``, in Pyro's vectorised layout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.util import torch_item
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

__all__ = ["ParticleModel", "VmapError", "without_validation"]


class VmapError(RuntimeError):
    """A model cannot run inside ``torch.func.vmap``, or would be another model there."""


class ParticleModel:
    """A model replayed against a guide trace whose leftmost dimension counts the particles.

    Both ways of running it give a trace in the layout of ``Trace_ELBO``'s own vectorised traces:
    each log-probability has the particles at dimension ``-max_plate_nesting``. All particles share
    the minibatch of the guide trace or of ``first_trace``.

    :param model: the Pyro model.
    :param guide_trace: a guide trace under the particle plate, if there are many particles.
    :param num_particles: their number.
    :param value_ndims: dimensions of each latent's value when drawn outside the particle plate.
    :param max_plate_nesting: plates of the model, the particle plate included.
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
    ) -> None:
        self.model = model
        self.guide_trace = guide_trace
        self.num_particles = num_particles
        self.max_plate_nesting = max_plate_nesting
        self.args, self.kwargs = args, kwargs
        self.latents: dict[str, Tensor] = {}
        self.replayed = Trace()
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample":
                continue
            self.replayed.add_node(name, **site)
            if not site_is_subsample(site):
                value = site["value"]
                if num_particles > 1:
                    value = self._particles_first(site, value_ndims.get(name))
                self.latents[name] = value

    @staticmethod
    def _particles_first(site: dict[str, Any], ndim: int | None) -> Tensor:
        """Drop the singletons between the particle dimension and the value's own dimensions."""
        value = site["value"]
        if ndim is None:  # a site that the first run did not meet
            depths = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
            depths = sorted(depths)[:-1]
            ndim = max(depths, default=0) + site["fn"].event_dim
        return value.reshape(value.shape[:1] + value.shape[value.dim() - ndim :])

    def run_one(self, values: dict[str, Tensor]) -> Trace:
        """The model's trace, with log-probabilities, for one particle's latent values."""
        for name, value in values.items():
            self.replayed.nodes[name]["value"] = value
        model = poutine.replay(self.model, trace=self.replayed)
        return poutine.trace(model).get_trace(*self.args, **self.kwargs)

    def particle(self, index: int) -> dict[str, Tensor]:
        """The latent values of one particle."""
        if self.num_particles == 1:
            return dict(self.latents)
        return {name: value[index] for name, value in self.latents.items()}

    def share_minibatch(self, trace: Trace) -> None:
        """Make all later runs use the subsampled indices of ``trace``."""
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and site_is_subsample(site) and name not in self.replayed:
                self.replayed.add_node(name, **{**site, "is_observed": False})

    def run_plate(self, vectorize: Callable[[Callable], Callable]) -> Trace:
        """The model's trace for all particles, run once under Pyro's particle plate.

        :param vectorize: puts the model under that plate.
        """
        model = poutine.replay(vectorize(self.model), trace=self.guide_trace)
        trace = prune_subsample_sites(poutine.trace(model).get_trace(*self.args, **self.kwargs))
        trace.compute_log_prob()
        return trace

    def run_vmap(self) -> Trace:
        """The model's trace for all particles at once.

        :raises Exception: whatever ``torch.func.vmap`` raises for a model it cannot batch.
        """
        traces: list[Trace] = []

        def log_probs(values: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
            # check_model_guide_match and the like ran outside vmap; here any check would fail
            # because it branches on batched values.
            with pyro.validation_enabled(False):
                trace = prune_subsample_sites(self.run_one(values))
                for site in trace.nodes.values():
                    if site["type"] == "sample":
                        site["fn"] = without_validation(site["fn"])
                trace.compute_log_prob()
            traces.append(trace)
            return _log_probs(trace)

        log_prob = torch.func.vmap(log_probs, randomness="same")(self.latents)
        return self._lay_out(traces[0], log_prob)

    def run_vmap_checked(self) -> Trace:
        """As :meth:`run_vmap`, compared with a plain run of the first particle.

        :raises VmapError: saying what vmap cannot do, or where the two disagree.
        """
        first = self.run_one(self.particle(0))
        self.share_minibatch(first)
        expected = torch_item(prune_subsample_sites(first).log_prob_sum())
        try:
            trace = self.run_vmap()
        except Exception as error:  # vmap raises many kinds, one for each thing it cannot do
            first_line = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            raise VmapError(first_line) from error
        found = sum(site["log_prob"][0].sum().item() for _, site in _sample_sites(trace))
        agrees = math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-3)
        if math.isfinite(expected) and not agrees:
            raise VmapError(
                f"its log-density is {found:.6g} there and {expected:.6g} outside; is it random "
                "beyond its latents (dropout)?"
            )
        return trace

    def run_loop(self) -> Trace:
        """The model's trace, one particle after the other."""
        traces = []
        for index in range(self.num_particles):
            trace = self.run_one(self.particle(index))
            self.share_minibatch(trace)
            trace = prune_subsample_sites(trace)
            trace.compute_log_prob()
            traces.append(trace)
        parts = zip(*(_log_probs(trace) for trace in traces), strict=True)
        log_prob = tuple(
            {name: torch.stack([values[name] for values in part]) for name in part[0]}
            for part in parts
        )
        return self._lay_out(traces[0], log_prob)

    def _lay_out(self, trace: Trace, log_prob: tuple[dict[str, Tensor], ...]) -> Trace:
        """A trace of all particles from one particle's trace and everyone's log-probabilities."""
        result = Trace()
        scaled, unscaled = ({n: self._pad(v) for n, v in part.items()} for part in log_prob)
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
                cond_indep_stack=(particle_frame,) + site["cond_indep_stack"],
                log_prob=scaled[name],
                log_prob_sum=scaled[name].sum(),
            )
            if name in unscaled:
                result.nodes[name]["unscaled_log_prob"] = unscaled[name]
        return result

    def _particle_frame(self) -> Any:
        """Pyro's record of the particle plate."""
        frames = {
            frame
            for name in self.latents
            for frame in self.guide_trace.nodes[name]["cond_indep_stack"]
            if frame.dim == -self.max_plate_nesting
        }
        (particle_frame,) = frames
        return particle_frame

    def _pad(self, value: Tensor) -> Tensor:
        """Put the particles at dimension ``-max_plate_nesting``."""
        padding = (1,) * (self.max_plate_nesting - value.dim())
        return value.reshape(value.shape[:1] + padding + value.shape[1:])


def _log_probs(trace: Trace) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Log-probabilities of all sites, and of the latents without scale and mask."""
    sites = _sample_sites(trace)
    return (
        {name: site["log_prob"] for name, site in sites},
        {name: site["unscaled_log_prob"] for name, site in sites if not site["is_observed"]},
    )


def _sample_sites(trace: Trace) -> list[tuple[str, dict[str, Any]]]:
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]


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
