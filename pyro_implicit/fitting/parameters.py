# SPDX-License-Identifier: Apache-2.0
"""Parameters of the model (``pyro.param``), which are learnt once and then stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro import poutine
from torch import Tensor

from pyro_implicit.density.latent_density import LatentDensity

__all__ = ["describe", "model_parameters", "with_fixed_parameters"]


def model_parameters(density: LatentDensity) -> dict[str, Tensor]:
    """What a model learns beside its latents.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0))
    >>> list(model_parameters(LatentDensity(model)))
    ['loc']

    :param density: of the model.
    :returns: their values by name, as they change.
    """
    nodes = density.trace_at(density.init_loc).nodes.items()
    return {
        name: site["value"]
        for name, site in nodes
        if site["type"] == "param" and site["value"].requires_grad
    }


def with_fixed_parameters(model: Callable[..., Any]) -> Callable[..., Any]:
    """A model whose parameters no training sees."""
    return poutine.block(model, hide_types=["param"])


def describe(parameters: dict[str, Tensor]) -> str:
    """Numbers, or shapes of what is more than that; the first four."""
    parts = [
        f"{name} = {value.item():.4g}" if value.numel() == 1 else f"{name} {tuple(value.shape)}"
        for name, value in parameters.items()
    ]
    return ", ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
