# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of any guide, in one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoCallable, AutoGuide
from pyro.poutine.util import site_is_subsample
from torch import Tensor

__all__ = ["draw"]


@torch.no_grad()
@poutine.block
def draw(
    guide: Callable[..., Any], num_samples: int, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """
    Draws from the posterior that a guide stands for, in constrained space.

    Pyro's autoguides and guides that offer ``sample_posterior`` are drawn from in one vectorised
    call, any other guide one draw at a time. Auxiliary sites of the guide
    (``infer={"is_auxiliary": True}``) and deterministic ones are left out.

    :param guide: A Pyro guide.
    :param num_samples: Number of draws.
    :param args: The arguments of the model and the guide; a guide that was called before and
        does not read them needs none.
    :param kwargs: Their keyword arguments.
    :returns: Draws ``(num_samples, *shape)`` of every latent site of this ``shape``; they carry
        no gradient.
    :raises ValueError: If the guide cannot run because its arguments are missing.

    **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model():
        ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
        >>> draw(AutoNormal(model), 100)["scale"].shape
        torch.Size([100, 3])
    """
    # Once in any case: an autoguide reads its model in the first call.
    trace: Any = _run(guide, args, kwargs)
    if hasattr(guide, "sample_posterior"):
        return guide.sample_posterior(num_samples, *args, **kwargs)
    # Predictive lines sites up with the deepest plate, (N, 1, 3) for a site of shape (3,) that
    # stands outside it; the guide's own trace knows the shapes.
    shapes = {
        name: site["value"].shape
        for name, site in trace.iter_stochastic_nodes()
        if not site["infer"].get("is_auxiliary") and not site_is_subsample(site)
    }
    predictive = Predictive(
        guide, num_samples=num_samples, return_sites=list(shapes), parallel=_broadcasts(guide)
    )
    samples = predictive(*args, **kwargs)
    return {
        name: samples[name].detach().reshape(num_samples, *shape).clone()
        for name, shape in shapes.items()
    }


def _run(guide: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> poutine.Trace:
    try:
        return poutine.trace(guide).get_trace(*args, **kwargs)
    except TypeError as error:
        if args or kwargs:
            raise
        raise ValueError(
            f"the guide {_name(guide)} could not run without arguments ({error}). Pass the "
            "arguments of the model as well, as in compare(guide, mcmc, x, y), or call an "
            "autoguide once before: guide(x, y)."
        ) from error


def _broadcasts(guide: Callable[..., Any]) -> bool:
    """Whether a guide can be run inside one more plate: Pyro's autoguides can, users' code
    inside them may not."""
    if not isinstance(guide, AutoGuide):
        return False
    return not any(isinstance(module, AutoCallable) for module in guide.modules())


def _name(guide: Callable[..., Any]) -> str:
    return getattr(guide, "__name__", type(guide).__name__)
