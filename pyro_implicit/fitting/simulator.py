# SPDX-License-Identifier: Apache-2.0
"""A model whose observed sites can only be drawn: its layout, and pairs of latents and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.density.bijections import with_small_shares
from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.diagnostics.calibration import simulation_trace
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.messages import refuse_string
from pyro_implicit.runtime.progress import watch
from pyro_implicit.runtime.sites import (
    constrained_parts,
    is_data,
    site_parts,
    survives,
    unmasked_elements,
)

__all__ = ["Pairs", "Simulator"]


class Pairs(NamedTuple):
    """Unconstrained latents ``(n, d)`` and finite data ``(n, m)``."""

    latent: Tensor
    data: Tensor


class Simulator:
    """A model whose observed sites are drawn.

    ``observed`` are the data ``(m,)`` with which it was called, ``columns`` their names.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        sites: Collection[str] | None,
    ) -> None:
        refuse_string(sites=sites)
        self.model, self.args, self.kwargs = model, args, kwargs
        trace = simulation_trace(model, args, kwargs)
        refuse_subsampling(trace, "a simulation")
        given = self.read_data(args, kwargs)
        self._refuse_weights(trace, given)
        self.shapes = {name: value.shape for name, value in given.items()}
        self.columns = [
            label for name, shape in self.shapes.items() for label in element_labels(name, shape)
        ]
        nodes = dict(trace.iter_stochastic_nodes())
        latents = [n for n, site in nodes.items() if n not in given and not site_is_subsample(site)]
        unknown = sorted(set(sites or ()) - set(latents))
        if unknown:
            raise ValueError(f"sites names '{unknown[0]}', but the model's latents are {latents}")
        self.sites = [name for name in latents if sites is None or name in sites]
        if not latents:
            raise ValueError("the model has no latent variable. Cure: pyro.sample with a prior")
        if not self.sites:
            raise ValueError(f"sites is empty. Cure: some of {latents}, or no sites=, for all")
        self.priors = {name: nodes[name]["fn"] for name in self.sites}
        self.supports, self.transforms, self.parts = {}, {}, {}
        for name in self.sites:
            support = self.priors[name].support
            if support.is_discrete:
                rest = [one for one in self.sites if one != name]
                raise ValueError(
                    f"latent '{name}' is discrete, and a simulator's posterior is known for "
                    f"continuous latents only. Cure: sites={rest}, which averages over '{name}'"
                )
            self.supports[name] = support
            self.transforms[name] = with_small_shares(biject_to(support))
            self.parts[name] = self.transforms[name].inv(nodes[name]["value"]).shape

    @property
    def layout(self) -> dict[str, dict[str, list[int]]]:
        """Names and shapes of the latents, unconstrained, and of the data."""
        parts = {"latents": self.parts, "data": self.shapes}
        return {k: {n: list(shape) for n, shape in one.items()} for k, one in parts.items()}

    def read_data(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the observed values of a call."""
        with torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
            trace = poutine.trace(self.model).get_trace(*args, **kwargs)
        found = {name: site["value"] for name, site in trace.nodes.items() if is_data(site)}
        if not found:
            raise ValueError(
                "the model observes nothing. Cure: call it with data, which reach it by obs= (of "
                "the right shape, if there are none yet)"
            )
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"the observation of site '{name}' is a {type(value).__name__}, not a tensor. "
                    f"Cure: torch.as_tensor({name})"
                )
            if not value.isfinite().all():
                raise ValueError(
                    f"the observed data of site '{name}' are not finite. Cure: leave them out, in "
                    "the model, too, or replace them by a value that the simulator makes as well"
                )
        return found

    def _refuse_weights(self, trace: Trace, names: Iterable[str]) -> None:
        """Refuse masks and scales of observed sites, which act on densities only."""
        for name in names:
            site = trace.nodes[name]
            is_masked = not unmasked_elements(site).all()
            if is_masked or not bool((torch.as_tensor(site["scale"]) == 1).all()):
                what = "masked" if is_masked else "scaled"
                raise ValueError(
                    f"site '{name}' is {what}, but no density of the data is used, so that all of "
                    "them would count in full. Cure: a model that simulates what was observed only"
                )

    def features(self, data: Mapping[str, Tensor]) -> Tensor:
        """Return data as one vector.

        :raises ValueError: for other shapes than those of the first call.
        """
        for name, shape in self.shapes.items():
            if data[name].shape != shape:
                raise ValueError(
                    f"site '{name}' has shape {tuple(data[name].shape)}, but in the first call "
                    f"{tuple(shape)}. Cure: data of one shape, for instance summary statistics, or "
                    "rows that are padded"
                )
        like = torch.get_default_dtype()
        return torch.cat([data[name].reshape(-1).to(like) for name in self.shapes])

    def draw(
        self, number: int, limit: TimeLimit, share: float, proposal: Tensor | None = None
    ) -> tuple[Pairs, int]:
        """Simulate pairs; return the finite ones, and the number of the others.

        The latents are draws of the prior, or rows of ``proposal``.
        """
        rows = None if proposal is None else proposal[torch.randperm(len(proposal))]
        latents: list[Tensor] = []
        features: list[Tensor] = []
        limit = TimeLimit(limit.left(share) if math.isfinite(limit.end) else None)
        with watch("simulate", number) as watched:
            while len(latents) < number and not (watched.stopped or limit.is_over()):
                given = {} if rows is None else self.split(rows[len(latents) % len(rows)])
                trace = simulation_trace(self.model, self.args, self.kwargs, given)
                latents.append(self._latent(trace))
                features.append(self.features({n: trace.nodes[n]["value"] for n in self.shapes}))
                watched.step()
        if not latents:
            raise ValueError("max_seconds is shorter than a simulation. Cure: a larger max_seconds")
        pairs = Pairs(torch.stack(latents), torch.stack(features))
        finite = pairs.data.isfinite().all(-1) & pairs.latent.isfinite().all(-1)
        return Pairs(*(part[finite] for part in pairs)), int((~finite).sum())

    def _latent(self, trace: Trace) -> Tensor:
        parts = []
        for name in self.sites:
            value = trace.nodes[name]["value"]
            if not survives(value, self.supports[name]):
                raise ValueError(
                    f"the support of latent '{name}' depends on other latents. Cure: a latent of "
                    "fixed support that the model scales, or sites= without it"
                )
            parts.append(self.transforms[name].inv(value).reshape(-1))
        return torch.cat(parts).to(torch.get_default_dtype())

    def check_priors(self) -> None:
        """Refuse latents whose prior depends on other latents."""
        others = simulation_trace(self.model, self.args, self.kwargs).nodes
        for name, prior in self.priors.items():
            value = prior.sample()
            if not torch.equal(prior.log_prob(value), others[name]["fn"].log_prob(value)):
                raise ValueError(
                    f"the prior of latent '{name}' depends on other latents, but rounds > 1 needs "
                    "independent priors. Cure: rounds=1, or a non-centred model "
                    "(pyro.infer.reparam.LocScaleReparam)"
                )

    def log_prior(self, latent: Tensor) -> Tensor:
        """Return the log-density at unconstrained latents ``(n, d)``."""
        total = latent.new_zeros(len(latent))
        for name, part in site_parts(latent, self.parts).items():
            transform = self.transforms[name]
            value = transform(part)
            volume = transform.log_abs_det_jacobian(part, value)
            for term in (self.priors[name].log_prob(value), volume):
                total = total + term.reshape(len(latent), -1).sum(-1)
        return total

    def split(self, latent: Tensor) -> dict[str, Tensor]:
        """Return constrained values by site of vectors ``(*batch, d)``."""
        return constrained_parts(latent, self.parts, self.transforms)
