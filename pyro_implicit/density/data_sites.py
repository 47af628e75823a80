# SPDX-License-Identifier: Apache-2.0
"""Which sites of a trace are data: Pyro marks others as observed too."""

from __future__ import annotations

from typing import Any

from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.poutine.util import site_is_subsample

__all__ = ["is_data"]


def is_data(site: dict[str, Any], factors: bool = True) -> bool:
    """Whether a site is observed, and not in name only: as what ``pyro.deterministic`` and
    reparameterised latents compute, and the indices of a subsampled plate.

    **Example:**

    >>> import pyro, torch
    >>> from pyro import poutine
    >>> def model():
    ...     twice = pyro.deterministic("twice", torch.tensor(2.0))
    ...     pyro.sample("y", pyro.distributions.Normal(twice, 1.0), obs=torch.tensor(0.0))
    >>> [name for name, site in poutine.trace(model).get_trace().nodes.items() if is_data(site)]
    ['y']

    :param site: of a trace, of any type.
    :param factors: whether ``pyro.factor`` counts, which is a term of the likelihood without values
        of its own.
    """
    if site["type"] != "sample" or not site["is_observed"] or site_is_subsample(site):
        return False
    return not _is_computed(site) and (factors or not isinstance(site["fn"], Unit))


def _is_computed(site: dict[str, Any]) -> bool:
    fn = site["fn"]
    # Reparameterisations leave no mark but this.
    is_masked = isinstance(fn, MaskedDistribution) and fn._mask is False
    return site["infer"].get("_deterministic", False) or (
        is_masked and isinstance(fn.base_dist, Delta)
    )
