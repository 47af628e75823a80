# SPDX-License-Identifier: Apache-2.0
"""What is inside of distributions that are made of others."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import MaskedDistribution

__all__ = ["innermost", "without_event", "without_mask"]


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
