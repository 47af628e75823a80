# SPDX-License-Identifier: Apache-2.0
"""Names of the elements of sites, for messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributions import transforms

from pyro_implicit.density.target import Target

__all__ = ["coordinate_labels", "element_labels", "index_label"]


def coordinate_labels(target: Target) -> tuple[str, ...]:
    """Return the name of each coordinate of the unconstrained latent vector.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    ...     pyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    >>> coordinate_labels(Target(model))
    ('log `tau`', '`theta[0]`', '`theta[1]`')

    :param target: the posterior.
    """
    labels: list[str] = []
    for name, shape in target.shapes.items():
        prefix = "" if name in target.sampled else _prefix(target.transforms[name])
        labels += [f"{prefix}`{label}`" for label in element_labels(name, shape)]
    return tuple(labels)


def element_labels(name: str, shape: Iterable[int]) -> list[str]:
    """Return the names of all elements of a site, in order."""
    return [index_label(name, index) for index in itertools.product(*map(range, shape))]


def index_label(name: str, index: Iterable[int]) -> str:
    """Return the name of a site's element, as ``"theta[3]"``, or ``"tau"`` for a scalar."""
    inside = ", ".join(map(str, index))
    return f"{name}[{inside}]" if inside else name


def _prefix(transform: Any) -> str:
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    parts = transform.parts if isinstance(transform, transforms.ComposeTransform) else [transform]
    parts = [part for part in parts if not _is_identity(part)]
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], transforms.ExpTransform):
        return "log "
    if len(parts) == 1 and isinstance(parts[0], transforms.SigmoidTransform):
        return "logit "
    return "unconstrained "


def _is_identity(transform: Any) -> bool:
    if not isinstance(transform, transforms.AffineTransform):
        return False
    loc, scale = torch.as_tensor(transform.loc), torch.as_tensor(transform.scale)
    return bool((loc == 0).all() and (scale == 1).all())
