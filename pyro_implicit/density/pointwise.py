# SPDX-License-Identifier: Apache-2.0
"""The log-likelihood of each observation, at draws of the latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.engine import compute_log_prob
from pyro_implicit.density.target import Target

__all__ = ["pointwise_log_likelihood"]

AT_ONCE = 250


@torch.no_grad()
def pointwise_log_likelihood(
    density: Target, draws: Mapping[str, Tensor], sites: Sequence[str]
) -> dict[str, Tensor]:
    """The terms of observed sites in the log-density, scaled and masked as they are there.

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
