# SPDX-License-Identifier: Apache-2.0
"""The log-likelihood of each observation, at draws of the latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.engine import compute_log_prob
from pyro_implicit.density.target import Target

__all__ = ["is_counted", "pointwise_log_likelihood", "unmasked_elements"]

AT_ONCE = 250


def is_counted(site: dict[str, Any]) -> Tensor:
    """Tell which observations of a site count: those that no mask leaves out.

    A score per row is divided by their number. A mask is that of ``poutine.mask``, of a
    distribution's ``mask`` or of ``obs_mask``. An event counts if any of its elements does.

    **Example:**

    >>> import pyro.distributions as dist
    >>> fn = dist.Normal(torch.zeros(3), 1.0).mask(torch.tensor([True, False, True]))
    >>> is_counted({"fn": fn, "mask": None})
    tensor([ True, False,  True])

    :param site: of a trace.
    :returns: of the distribution's batch shape.
    """
    found, rank = unmasked_elements(site), len(site["fn"].batch_shape)
    return found.flatten(rank).any(-1) if found.dim() > rank else found


def unmasked_elements(site: dict[str, Any]) -> Tensor:
    """The same for each element of events that ``to_event`` made.

    :param site: of a trace.
    :returns: of the batch shape of the distribution inside of ``to_event``.
    """
    fn = site["fn"]
    masks = [(site["mask"], len(fn.batch_shape))]
    while isinstance(fn, (torch.distributions.Independent, MaskedDistribution)):
        if isinstance(fn, MaskedDistribution):
            masks.append((fn._mask, len(fn.batch_shape)))
        fn = fn.base_dist
    device = next((mask.device for mask, _ in masks if isinstance(mask, Tensor)), None)
    found = torch.ones(fn.batch_shape, dtype=torch.bool, device=device)
    for mask, rank in masks:
        if mask is not None:
            mask = torch.as_tensor(mask, device=device).bool()
            found = found & mask.reshape(mask.shape + (1,) * (found.dim() - rank))
    return found


@torch.no_grad()
def pointwise_log_likelihood(
    density: Target, draws: Mapping[str, Tensor], sites: Sequence[str]
) -> dict[str, Tensor]:
    """The terms of observed sites in the log-density, scaled and masked as they are there.

    A masked observation has the term 0, which :func:`is_counted` tells from others.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> density = Target(model, torch.tensor([0.0, 1.0]))
    >>> pointwise_log_likelihood(density, {"x": torch.zeros(3)}, ["y"])["y"][0]
    tensor([-0.9189, -1.4189])

    :param density: of a model with all its data.
    :param draws: constrained values by site, ``(num_draws, *site_shape)``.
    :param sites: the observed sites that are asked for.
    :returns: by site, ``(num_draws, *batch_shape)``: an event is one observation.
    :raises ValueError: for sites that depend on discrete latents, which are summed out.
    """
    lost = [name for name in sites if name not in density.trace_at(density.init_loc)]
    if lost:
        raise ValueError(
            f"the log-likelihood of single observations of site '{lost[0]}' is not known, because "
            "it depends on discrete latents, which are summed out together with it. Cure: a "
            "distribution that sums them by itself, such as MixtureSameFamily, or leave out "
            "log_likelihood"
        )

    def read(trace: Trace) -> dict[str, Tensor]:
        compute_log_prob(trace)
        return {name: trace.nodes[name]["log_prob"] for name in sites}

    number = len(next(iter(draws.values())))
    parts = []
    for start in range(0, number, AT_ONCE):
        some = {name: value[start : start + AT_ONCE] for name, value in draws.items()}
        parts.append(density.read_at(some, read))
    return {name: torch.cat([part[name] for part in parts]) for name in sites}
