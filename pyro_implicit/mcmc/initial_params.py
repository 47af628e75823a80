# SPDX-License-Identifier: Apache-2.0
"""Starting points for NUTS from a fitted guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.guides.posterior_draws import draw, refuse_swapped, trace_guide

__all__ = ["warm_start"]


@torch.no_grad()
def warm_start(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    num_chains: int,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """One independent draw of the guide for each chain, for ``MCMC``.

    They are in the unconstrained space and the layout that ``MCMC(kernel, initial_params=...,
    num_chains=num_chains)`` expects. Chains then start where the guide puts the posterior, spread
    out as the guide is.

    Pyro wants a leading dimension for the chains only if there are several, so for one chain the
    values have the site's own unconstrained shape. Discrete sites are left out, as NUTS sums
    over them.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
    >>> warm_start(model, AutoNormal(model), 4)["scale"].shape
    torch.Size([4, 3])

    :param model: that NUTS runs; it tells the supports of the sites.
    :param guide: a fitted one.
    :param num_chains: as given to :class:`~pyro.infer.mcmc.api.MCMC`.
    :param args: of model and guide, as ``kwargs``.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: unconstrained values by site, ``(num_chains, *shape)`` for several chains and
        ``shape`` for one.
    :raises TypeError: for a guide in place of the model.
    :raises ValueError: if the guide lacks a latent site of the model, or a draw lies on the
        boundary of its support.
    """
    refuse_swapped("warm_start", model, guide)
    if num_chains < 1:
        raise ValueError(f"num_chains must be at least 1; got {num_chains}.")
    kwargs = {**kwargs, **(model_kwargs or {})}
    draws = draw(guide, num_chains, *args, **kwargs)
    initial_params = {}
    for name, support in _supports(model, guide, args, kwargs).items():
        if name not in draws:
            raise ValueError(
                f"the guide has no site {name!r}, which the model samples: NUTS needs a start "
                "for every latent. Add the site to the guide."
            )
        value = biject_to(support).inv(draws[name])
        if not value.isfinite().all():
            raise ValueError(
                f"site {name!r}: a draw of the guide lies on the boundary of its support, or is "
                "not finite. Draw again, or check that the fit converged."
            )
        initial_params[name] = value.clone() if num_chains > 1 else value[0].clone()
    return initial_params


def _supports(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The supports of the continuous latent sites."""
    # At a draw of the guide, as flat priors cannot be drawn from.
    replayed = poutine.replay(model, trace=trace_guide(guide, args, kwargs))
    with poutine.block():
        trace: Any = poutine.trace(replayed).get_trace(*args, **kwargs)
    return {
        name: site["fn"].support
        for name, site in trace.iter_stochastic_nodes()
        if not site_is_subsample(site) and not site["fn"].has_enumerate_support
    }
