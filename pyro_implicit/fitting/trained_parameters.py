# SPDX-License-Identifier: Apache-2.0
"""What a step of training changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_implicit.infer.engine.networks import NetworkELBO

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
    parameters = [site["value"].unconstrained() for _, site in _params(capture.trace)]
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

    return {own(name): site["value"].unconstrained() for name, site in _params(capture.trace)}


def _params(trace: poutine.Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "param")


def are_all_of_guide(
    guide: Callable[..., Any], parameters: dict[str, Tensor], args: Any, kwargs: Any
) -> bool:
    """Whether all parameters are the guide's, and none the model's."""
    with poutine.block(), poutine.trace(param_only=True) as capture:
        guide(*args, **kwargs)
    own = {id(site["value"].unconstrained()) for _, site in _params(capture.trace)}
    return all(id(parameter) in own for parameter in parameters.values())
