# SPDX-License-Identifier: Apache-2.0
"""A draft as a Pyro model, as a plain function of its latents, and as this function in Pyro."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from benchmarks.fuzz.grammar import Argument, Draft, Site

__all__ = ["Drawn", "Oracle", "Rewritten", "with_data"]

Values = dict[str, Tensor]
MOST = 1e5  # limit of drawn values: heavy tails and torch's derivatives exceed it


def summary(value: Tensor, event_dim: int) -> Tensor:
    """The single number of a value that its children use."""
    if event_dim == 2:
        return value[..., 1, 0]
    return value.sum(-1) if event_dim else value


class Drawn:
    """The Pyro model."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def __call__(self, data: Values) -> None:
        draft = self.draft
        params = {
            name: pyro.param(name, torch.tensor(value, dtype=draft.dtype))
            for name, value in draft.params.items()
        }
        plates = [
            pyro.plate(
                f"p{p}", size, dim=-1 - p, subsample=draft.subsample if p == 0 else None
            )
            for p, size in enumerate(draft.sizes)
        ]  # fmt: skip
        seen: Values = {}
        for site in draft.sites:
            with ExitStack() as stack:
                for p in reversed(site.plates):
                    stack.enter_context(plates[p])
                args = [
                    arg.value(self._part(arg.constant, site), seen, params) for arg in site.args
                ]
                is_double = draft.is_mixed and site.is_observed
                args = [arg.to(torch.float64 if is_double else draft.dtype) for arg in args]
                if site.family == "factor":
                    pyro.factor(site.name, -0.5 * args[0].square())
                    continue
                if site.family == "deterministic":
                    seen[site.name] = pyro.deterministic(site.name, args[0])
                    continue
                if site.scale is not None:
                    stack.enter_context(poutine.scale(scale=self._part(site.scale, site)))
                fn, mask = site.kind.make(*args), self._part(site.mask, site)
                if mask is not None and site.mask_how == "handler":
                    stack.enter_context(poutine.mask(mask=mask))
                elif mask is not None:
                    fn = fn.mask(mask)
                obs = data.get(site.name) if site.is_observed else None
                obs = None if obs is None else self._part(obs, site)
                value = pyro.sample(site.name, fn, obs=obs).to(draft.dtype)
                seen[site.name] = summary(value, len(site.kind.event))

    def _part(self, whole: Any, site: Site) -> Any:
        """Value of the subsampled rows."""
        rows = self.draft.subsample
        if not isinstance(whole, Tensor) or rows is None or 0 not in site.plates:
            return whole
        batch_dim = len(self.draft.shape(site.plates)) - 1
        return whole.index_select(batch_dim, rows)


def with_data(draft: Draft) -> Draft:
    """Draw data for a draft."""
    with torch.random.fork_rng(), poutine.block(), pyro.validation_enabled(False):
        torch.manual_seed(draft.seed)
        trace = poutine.trace(Drawn(replace(draft, subsample=None))).get_trace({})
    data = {s.name: trace.nodes[s.name]["value"].detach() for s in draft.sites if s.is_observed}
    data = {name: value.clamp(-MOST, MOST) for name, value in data.items()}
    return replace(draft, data=data)


class Oracle:
    """The log-density of a draft, element by element, without code of Pyro."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def joint(self, values: Values, params: dict[str, Any]) -> Tensor:
        """Log-density of constrained latents, in their shape in Pyro."""
        choices = [
            (site.name, index, range(2 if site.family == "Bernoulli" else 3))
            for site in self.draft.discrete
            for index in self._indices(site)
        ]
        totals = []
        for chosen in itertools.product(*(options for _, _, options in choices)):
            given = {
                (name, index): torch.tensor(float(choice), dtype=torch.float64)
                for (name, index, _), choice in zip(choices, chosen, strict=True)
            }
            totals.append(self._total(values, given, params))
        return torch.stack(totals).logsumexp(0)

    def unconstrained(self, latent: Tensor) -> Tensor:
        """Log-density of a vector, in the order of the sites, with the Jacobian."""
        values, total, start = {}, latent.new_zeros(()), 0
        for site in self.draft.latents:
            transform = biject_to(site.kind.support)
            batch = self.draft.shape(site.plates)
            shape = batch + tuple(transform.inverse_shape(torch.Size(site.kind.event)))
            size = torch.Size(shape).numel()
            part = latent[start : start + size].reshape(shape)
            values[site.name] = transform(part)
            total = total + transform.log_abs_det_jacobian(part, values[site.name]).sum()
            start += size
        return total + self.joint(values, self.draft.params)

    def _indices(self, site: Site) -> list[tuple[int, ...]]:
        """Indices of all elements of a site, one per dimension of its batch."""
        rows = self.draft.subsample
        sizes = self.draft.shape(site.plates)
        ranges = [range(size) for size in sizes]
        if rows is not None and 0 in site.plates:
            ranges[-1] = rows.tolist()
        return list(itertools.product(*ranges))

    def _total(self, values: Values, given: Any, params: dict[str, Any]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        whole = {**self.draft.data, **values}
        known: dict[tuple[str, tuple[int, ...]], Tensor] = dict(given)
        for site in self.draft.sites:
            for index in self._indices(site):
                args = [self._argument(arg, index, known, params) for arg in site.args]
                if site.family == "factor":
                    total = total - 0.5 * args[0].square()
                    continue
                if site.family == "deterministic":
                    known[site.name, index] = args[0]
                    continue
                value = given.get((site.name, index))
                if value is None:
                    value = whole[site.name][index].double()
                log_prob = site.kind.log_prob(value, *args)
                mask = site.mask[index] if isinstance(site.mask, Tensor) else site.mask
                if mask is not None and not mask:
                    log_prob = torch.zeros(())
                if site.scale is not None:
                    is_one = not isinstance(site.scale, Tensor)
                    log_prob = log_prob * (site.scale if is_one else site.scale[index])
                rows = self.draft.subsample
                if rows is not None and 0 in site.plates:
                    log_prob = log_prob * (self.draft.sizes[0] / len(rows))
                total = total + log_prob
                known[site.name, index] = summary(value, len(site.kind.event))
        return total

    def _argument(
        self, arg: Argument, index: tuple[int, ...], known: Any, params: dict[str, Any]
    ) -> Tensor:
        parents = {}
        for name in arg.names:
            site = next(s for s in self.draft.sites if s.name == name)
            depth = len(self.draft.shape(site.plates))
            own = index[len(index) - depth :] if depth else ()
            dims = [p in site.plates for p in reversed(range(depth))]
            place = tuple(i if inside else 0 for i, inside in zip(own, dims, strict=True))
            parents[name] = known[name, place]
        return arg.value(arg.constant[index], parents, params)


class Rewritten:
    """A model with the same latents and plates, whose density is the oracle's single number."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.oracle = draft, Oracle(draft)

    def __call__(self, data: Values) -> None:
        draft = self.draft
        params = {
            name: pyro.param(name, torch.tensor(value, dtype=draft.dtype))
            for name, value in draft.params.items()
        }
        plates = [pyro.plate(f"p{p}", size, dim=-1 - p) for p, size in enumerate(draft.sizes)]
        values = {}
        for site in draft.latents:
            with ExitStack() as stack:
                for p in reversed(site.plates):
                    stack.enter_context(plates[p])
                flat = dist.ImproperUniform(
                    site.kind.support, torch.Size(draft.shape(site.plates)), site.kind.event
                )
                values[site.name] = pyro.sample(site.name, flat).double()
        pyro.factor("everything", self.oracle.joint(values, params).to(draft.dtype))
