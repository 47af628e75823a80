# SPDX-License-Identifier: Apache-2.0
"""What is inside of distributions that are made of others."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Delta, ImproperUniform, MaskedDistribution, Unit
from pyro.poutine.util import site_is_subsample

__all__ = ["innermost", "is_data", "is_flat", "without_event", "without_mask"]


def innermost(fn: Any) -> Any:
    """The distribution inside of ``to_event``, ``expand``, ``mask`` and transforms.

    **Example:**

    >>> import pyro.distributions as dist
    >>> type(innermost(dist.LogNormal(torch.zeros(3), 1.0).mask(False).to_event(1)))
    <class 'pyro.distributions.torch.Normal'>

    :param fn: of a site.
    """
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def without_event(fn: Any) -> Any:
    """A site's distribution without ``to_event``, but with all else that is around it.

    **Example:**

    >>> import pyro.distributions as dist
    >>> without_event(dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    LogNormal()

    :param fn: of a site.
    """
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def without_mask(fn: Any) -> Any:
    """A site's distribution without ``to_event`` and ``mask``, but with all else around it.

    **Example:**

    >>> import pyro.distributions as dist
    >>> without_mask(dist.LogNormal(torch.zeros(3), 1.0).mask(False).to_event(1))
    LogNormal()

    :param fn: of a site.
    """
    while isinstance(fn, (torch.distributions.Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


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


def is_flat(fn: Any) -> bool:
    """Whether a distribution is ``ImproperUniform``, also inside of others, which has no draws.

    **Example:**

    >>> import pyro.distributions as dist
    >>> is_flat(dist.ImproperUniform(dist.constraints.real, (3,), ()).to_event(1))
    True

    :param fn: of a site.
    """
    return isinstance(innermost(fn), ImproperUniform)
