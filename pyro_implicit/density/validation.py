# SPDX-License-Identifier: Apache-2.0
"""Distributions without torch's checks, but with what some of them leave to these."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    TransformedDistribution,
    biject_to,
    constraints,
)

__all__ = ["leave_out_masked", "restrict", "without_masked", "without_validation"]


def without_validation(fn: Distribution) -> Distribution:
    """A copy that checks nothing: distributions made while validation was on go on checking."""
    fn = copy.copy(fn)
    for name, part in vars(fn).items():
        if isinstance(part, Distribution):
            setattr(fn, name, without_validation(part))
    fn._validate_args = False  # last: Pyro's Independent hands it on to its base
    if isinstance(fn, TransformedDistribution):
        restrict(fn.base_dist)
    return fn


def restrict(base: Distribution) -> None:
    """Give a transformed distribution's base no density outside its support.

    Torch leaves that to validation, so that an ``Exponential`` moved by a latent would have the
    more density the further the data lie on its wrong side.

    **Example:**

    >>> import pyro.distributions as dist
    >>> base = dist.Exponential(1.0, validate_args=False)
    >>> restrict(base)
    >>> base.log_prob(torch.tensor([-1.0, 1.0]))
    tensor([-inf, -1.])
    """
    try:
        inner: Any = base.support
    except (AttributeError, NotImplementedError):
        return
    while hasattr(inner, "base_constraint"):
        inner = inner.base_constraint
    if not isinstance(inner, type(constraints.real)):
        kind: Any = type(base)
        base.__class__ = _restricted_class(kind)


@functools.cache
def _restricted_class(kind: Any) -> Any:
    if hasattr(kind, "_is_restricted"):
        return kind

    def log_prob(self: Any, value: Tensor) -> Tensor:
        inside = self.support.check(value)
        return torch.where(inside, kind.log_prob(self, value), -torch.inf)

    return type(kind.__name__, (kind,), {"log_prob": log_prob, "_is_restricted": True})


def without_masked(fn: Any, value: Tensor, mask: Any = None) -> Tensor:
    """An observation with possible values in place of those that are masked.

    These do not count, but where their density is not a number its gradient would not be either.

    **Example:**

    >>> import pyro.distributions as dist
    >>> fn = dist.LogNormal(torch.zeros(2), 1.0).mask(torch.tensor([True, False]))
    >>> without_masked(fn, torch.tensor([3.0, 0.0]))
    tensor([3., 1.])

    :param fn: a site's distribution.
    :param value: of the site.
    :param mask: of the site, by a handler.
    """
    if isinstance(fn, MaskedDistribution):
        value = without_masked(fn.base_dist, value, fn._mask)
    elif isinstance(fn, Independent):
        value = without_masked(fn.base_dist, value)
    if not (isinstance(mask, Tensor) and isinstance(value, Tensor) and value.is_floating_point()):
        return value
    try:
        transform = biject_to(fn.support)
        possible = transform(value.new_zeros(transform.inverse_shape(value.shape)))
    except NotImplementedError:  # of counts
        possible = torch.zeros_like(value)
    return torch.where(mask.reshape(mask.shape + (1,) * len(fn.event_shape)), value, possible)


def leave_out_masked(trace: Trace) -> None:
    """Make all observations of a trace :func:`without_masked`."""
    for site in trace.nodes.values():
        if site["type"] == "sample" and site["is_observed"]:
            site["value"] = without_masked(site["fn"], site["value"], site["mask"])
