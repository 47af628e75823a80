# SPDX-License-Identifier: Apache-2.0
"""The implicit distribution inside ``to_event`` and transforms: find it, and draw through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_implicit.distributions.implicit import Draw, Implicit
from pyro_implicit.runtime.sites import innermost

__all__ = ["TransformedDraw", "draw_through", "find_implicit"]


class TransformedDraw(NamedTuple):
    """A draw of an implicit distribution, and what the transforms around it made of it.

    ``draw`` belongs to ``distribution``; ``transforms``, in their order, turn its value into
    ``value``, and ``log_abs_det`` is their log-determinant, of the whole distribution's batch shape
    (or 0).
    """

    distribution: Implicit
    draw: Draw
    value: Tensor
    log_abs_det: Tensor | float
    transforms: tuple[torch.distributions.Transform, ...]


def find_implicit(fn: torch.distributions.Distribution) -> Implicit | None:
    """The implicit distribution inside ``fn``, or ``None`` if ``fn`` has a density.

    **Example:**

    >>> import pyro.distributions as dist
    >>> find_implicit(dist.Normal(0.0, 1.0)) is None
    True

    :param fn: a distribution, possibly inside ``to_event``, transforms or a mask.
    """
    root = innermost(fn)
    return root if isinstance(root, Implicit) else None


def draw_through(
    fn: torch.distributions.Distribution, draw: Callable[[Implicit], Draw]
) -> TransformedDraw:
    """Draw from the implicit distribution at the root of ``fn``, and apply its transforms.

    **Example:**

    >>> import pyro.distributions as dist
    >>> from pyro_implicit import MLP
    >>> q = Implicit(MLP(noise_dim=4, output_dim=3), 4).expand([5])
    >>> positive = dist.TransformedDistribution(q, dist.transforms.ExpTransform())
    >>> found = draw_through(positive, Implicit.draw)
    >>> bool((found.value > 0).all()), found.log_abs_det.shape
    (True, torch.Size([5]))

    :param fn: an implicit distribution, possibly inside ``Independent`` (``to_event``) or
        ``TransformedDistribution``.
    :param draw: draws from that at the root, once, without a sample shape.
    :returns: the draw, and what the transforms made of it.
    :raises ValueError: if ``fn`` wraps the implicit distribution in another way
        (``MaskedDistribution``: use ``pyro.poutine.mask``).
    """
    batch_ndim = len(fn.batch_shape)
    transforms: list[torch.distributions.Transform] = []
    while not isinstance(fn, Implicit):
        if isinstance(fn, torch.distributions.TransformedDistribution):
            transforms = [*fn.transforms, *transforms]
        elif not isinstance(fn, torch.distributions.Independent):
            raise ValueError(
                f"cannot train an implicit distribution inside {type(fn).__name__}; wrap it only "
                "by to_event or TransformedDistribution (and mask by pyro.poutine.mask)"
            )
        fn = fn.base_dist
    drawn = draw(fn)
    value, log_abs_det = drawn.value, 0.0
    for transform in transforms:
        base, value = value, transform(value)
        term = transform.log_abs_det_jacobian(base, value)
        log_abs_det = log_abs_det + sum_rightmost(term, term.dim() - batch_ndim)
    return TransformedDraw(fn, drawn, value, log_abs_det, tuple(transforms))
