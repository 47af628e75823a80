# SPDX-License-Identifier: Apache-2.0
"""Coordinates of shares that sum to one, accurate for shares of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions.transforms import IndependentTransform, StickBreakingTransform
from torch.nn.functional import logsigmoid, pad

__all__ = ["StickBreaking", "with_small_shares"]


class StickBreaking(StickBreakingTransform):
    r"""The bijection of ``torch.distributions.biject_to(simplex)``, without its differences.

    .. math:: y_k = z_k \prod_{j < k} (1 - z_j), \qquad z_k = \sigma(x_k - \log(K - k)),

    for :math:`k < K` of K shares; the last share is the remainder. Coordinates are
    ``(*batch, K - 1)``, shares ``(*batch, K)``. Torch computes :math:`1 - z_j`, and the inverse by
    one minus a sum. In float32, the remainder is then at least about 1e-7, which cuts the tails of
    small shares off, such as those of a Dirichlet with concentrations below one. Here the remainder
    is a product of :math:`\sigma(-\cdot)`, and a sum of the later shares in the inverse. Torch's
    log-determinant is accurate for accurate shares.

    **Example:**

    >>> bijection = StickBreaking()
    >>> shares = bijection(torch.tensor([25.0, 0.0]))
    >>> [f"{share:.1e}" for share in shares.tolist()]
    ['1.0e+00', '1.4e-11', '1.4e-11']
    >>> bijection.inv(shares).round()
    tensor([25., 0.])
    """

    def _call(self, x: Tensor) -> Tensor:
        ratio = x - _offset(x)
        before = pad(logsigmoid(-ratio).cumsum(-1), [1, 0])  # what remains before each share
        shares = (pad(logsigmoid(ratio), [0, 1]) + before).exp()
        return shares.clamp(min=torch.finfo(x.dtype).tiny)

    def _inverse(self, y: Tensor) -> Tensor:
        y = y.clamp(min=torch.finfo(y.dtype).tiny)
        rest = y.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        ratio = y[..., :-1].log() - rest.log()
        return ratio + _offset(ratio)


def with_small_shares(transform: Any) -> Any:
    """Replace torch's bijection to the simplex by :class:`StickBreaking`."""
    if type(transform) is StickBreakingTransform:
        return StickBreaking()
    if isinstance(transform, IndependentTransform):
        base = with_small_shares(transform.base_transform)
        return IndependentTransform(base, transform.reinterpreted_batch_ndims)
    return transform


def _offset(x: Tensor) -> Tensor:
    """Return the logarithms of the numbers of later shares, which make x = 0 the even shares."""
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device).log()
