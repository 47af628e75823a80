# SPDX-License-Identifier: Apache-2.0
"""Where latents start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

__all__ = ["start_flat_priors"]


def start_flat_priors(init_loc_fn: Callable[[dict[str, Any]], Tensor]) -> Callable[..., Tensor]:
    """Let an initialisation of Pyro's, which draws from the prior, pass over flat priors.

    :param init_loc_fn: per-site initialisation.
    :returns: the same, but sites of ``ImproperUniform`` that it cannot start are 0 in
        unconstrained space.
    """

    def init(site: dict[str, Any]) -> Tensor:
        try:
            return init_loc_fn(site)
        except NotImplementedError:
            if not isinstance(site["fn"], dist.ImproperUniform):
                raise
            transform = biject_to(site["fn"].support)
            return transform(torch.zeros(transform.inverse_shape(site["fn"].shape())))

    return init
