# SPDX-License-Identifier: Apache-2.0
"""Supports: of latents, that must not move, and of observations, that must hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Independent, biject_to, constraints

from pyro_implicit.density.batched_runs import IMPOSSIBLE
from pyro_implicit.density.engine import Model, varying_site
from pyro_implicit.density.validation import without_validation

__all__ = ["observation_outside", "refuse_moving_supports"]


def observation_outside(site: dict[str, Any]) -> str:
    """What is wrong with an observation that no values of the latents make possible.

    Nothing is, where the density is masked or the distribution has ``validate_args=False``.

    :param site: of a trace.
    :returns: in words, or nothing.
    """
    fn, value = site["fn"], site["value"]
    if not isinstance(value, Tensor):
        return ""
    part = fn
    while isinstance(part, (Independent, MaskedDistribution)) and part._validate_args:
        part = part.base_dist
    if not part._validate_args:
        return ""
    try:
        support = fn.support
        inside = support.check(value)
        if inside.all() or any(True for _ in _tensors(support)):
            return ""
        whole = without_validation(fn).log_prob(value, *site["args"])
    except Exception:  # a distribution without a support, or one that cannot check it
        return ""
    missing = value.isnan() if value.is_floating_point() else torch.zeros_like(value).bool()
    counted = scale_and_mask(whole, mask=site["mask"]) != 0
    rank = missing.dim() - inside.dim()
    missing = missing.flatten(-rank).any(-1) if rank > 0 else missing
    outside = ~inside & counted & ~missing
    number = int(outside.sum())
    return f"outside {support} in {number} of {outside.numel()} elements" if number else ""


def refuse_moving_supports(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], latents: Trace
) -> None:
    """Check that latents have the same support wherever the others and parameters are.

    The model is run once more if a support has tensors for bounds.

    :param latents: of a run of the model.
    :raises ValueError: naming site and cure; also for one that the other run does not have.
    """
    sites = latents.nodes
    start = {name: site["fn"] for name, site in sites.items() if _has_bounds(site["fn"])}
    if not start:
        return
    steps = torch.linspace(0.1, 0.2, len(sites)).tolist()
    values = {
        name: _beside(site, step) for (name, site), step in zip(sites.items(), steps, strict=True)
    }
    elsewhere = Model(model, args, kwargs, latents.copy())
    try:
        with poutine.block(), pyro.validation_enabled(False), torch.enable_grad():
            nodes = elsewhere.run(values).nodes
    except IMPOSSIBLE:
        return
    for name, fn in start.items():
        if name not in nodes:
            raise varying_site(name)
        other = nodes[name]["fn"]
        pairs = list(zip(_tensors(fn.support), _tensors(other.support), strict=True))
        cause = f"other latents ({fn.support} where they start, {other.support} near it)"
        if all(torch.equal(one, two) for one, two in pairs):
            if not any(bound.requires_grad for _, bound in pairs):
                continue
            cause = "parameters that are learnt"
        raise ValueError(
            f"the support of latent '{name}' changes with {cause}, but its unconstrained "
            "coordinate is that of one support: of the others the posterior would lose what lies "
            "outside. Cure: sample on a fixed support and move the value: of Uniform(0, a), "
            f"part = pyro.sample('{name}_part', dist.Uniform(0, 1)); "
            f"{name} = pyro.deterministic('{name}', a * part)"
        )


def _beside(site: dict[str, Any], step: float) -> Tensor:
    """Another value of a latent."""
    transform = biject_to(site["fn"].support)
    unconstrained = transform.inv(site["value"].detach())
    return transform(unconstrained + step)


def _has_bounds(fn: Any) -> bool:
    """Whether a distribution's support is made of tensors, which may change."""
    try:
        return any(True for _ in _tensors(fn.support))
    except (AttributeError, NotImplementedError):
        return False


def _tensors(support: Any) -> Iterator[Tensor]:
    """Its bounds."""
    for part in vars(support).values():
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, constraints.Constraint):
            yield from _tensors(part)
        elif isinstance(part, (list, tuple)):
            for item in part:
                if isinstance(item, constraints.Constraint):
                    yield from _tensors(item)
