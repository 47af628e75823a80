# SPDX-License-Identifier: Apache-2.0
"""What a step of training changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_implicit.infer.networks import NetworkELBO
from pyro_implicit.runtime.sites import Owned, announce, unconstrained

__all__ = ["are_all_of_guide", "trained_parameters"]


def trained_parameters(
    model: Callable[..., Any], guide: Callable[..., Any], loss: Trace_ELBO, args: Any, kwargs: Any
) -> dict[str, Tensor]:
    """All that one evaluation of the loss touches, by its name in Pyro's parameter store.

    The names of guide and loss are replaced: they may be others when training is resumed.

    :raises ValueError: if neither model nor guide has a parameter.
    """
    with poutine.trace(param_only=True) as capture:
        value = loss.differentiable_loss(model, guide, *args, **kwargs)
    if _names_of_others(value, dict(_params(capture.trace))):
        return trained_parameters(model, guide, loss, args, kwargs)
    parameters = [unconstrained(site) for _, site in _params(capture.trace)]
    if not parameters:
        raise ValueError(
            "neither model nor guide has a parameter to train. Cure: a guide with pyro.param or "
            "one of the autoguides"
        )
    # Backwards too: some ELBOs make the optimisers of their networks on that way.
    value.backward(inputs=parameters)
    owners = {
        getattr(guide, "_pyro_name", ""): "<guide>.",
        loss.store_name if isinstance(loss, NetworkELBO) else "": "<loss>.",
    }

    def own(name: str) -> str:
        for prefix, owner in owners.items():
            if prefix and name.startswith(f"{prefix}."):
                return owner + name.removeprefix(f"{prefix}.")
        return name

    return {own(name): unconstrained(site) for name, site in _params(capture.trace)}


def _names_of_others(value: Tensor, sites: dict[str, dict[str, Any]]) -> bool:
    """Replace in Pyro's store what has the name of a module's parameter, but is another's.

    Of two networks in one process the layers without priors have the same names.

    :param value: of the loss.
    :param sites: of parameters.
    :returns: whether there were any.
    """
    announced = {name: site["args"][-1] for name, site in sites.items()}
    others = {
        name: own
        for name, own in announced.items()
        if isinstance(own, nn.Parameter) and own is not unconstrained(sites[name])
    }
    if not others:
        return False
    stored = [unconstrained(sites[name]) for name in others]
    found = torch.autograd.grad(
        value, [*others.values(), *stored], allow_unused=True, retain_graph=True
    )
    used, unused = found[: len(others)], found[len(others) :]
    names = [
        name
        for name, one, other in zip(others, used, unused, strict=True)
        if one is not None and other is None
    ]
    for name in names:
        announce(name, Owned(others[name]))
    return bool(names)


def _params(trace: poutine.Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "param")


def are_all_of_guide(
    guide: Callable[..., Any], parameters: dict[str, Tensor], args: Any, kwargs: Any
) -> bool:
    """Whether all parameters are the guide's, and none the model's."""
    with poutine.block(), poutine.trace(param_only=True) as capture:
        guide(*args, **kwargs)
    own = {id(unconstrained(site)) for _, site in _params(capture.trace)}
    return all(id(parameter) in own for parameter in parameters.values())
