# SPDX-License-Identifier: Apache-2.0
"""A check that flat and masked priors have data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.density.cost import nearby
from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.policy import MAX_DENSE_DIM, ROUNDING
from pyro_implicit.runtime.sites import Site, innermost, innermost_support, is_flat

__all__ = ["refuse_improper"]

_KINDS = {False: "flat priors", True: "a mask in place of a prior"}
_CURES = {
    False: "a proper prior; or leave these elements out, for instance the islands of a lattice",
    True: "mask the observations, but not the latents: then these elements have their prior",
}


class _Posterior(Protocol):
    """What the check needs of a :class:`~pyro_implicit.density.Target` with all data."""

    init_loc: Tensor
    latent_dim: int
    sites: dict[str, Site]
    masked: tuple[str, ...]

    @property
    def places(self) -> dict[str, Tensor]: ...

    def split(self, latent: Tensor) -> dict[str, Tensor]: ...

    def read(self, latent: Tensor, read: Callable[[Trace], Tensor]) -> Tensor: ...

    def log_prob(self, latent: Tensor) -> Tensor: ...

    def derivatives(self, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


def refuse_improper(target: _Posterior) -> None:
    """Check that each element of flat and masked priors, and each direction of a few of them,
    changes the density.

    :raises ValueError: naming the sites.
    """
    masked = target.masked
    flat = [name for name, site in target.sites.items() if is_flat(site["fn"]) or name in masked]
    if not flat:
        return
    if target.latent_dim <= MAX_DENSE_DIM:
        found = target.split(_endless(target, flat) != 0)
        names = ", ".join(f"'{name}'" for name in flat if found[name].any())
        if names:
            raise ValueError(
                f"the posterior is improper, as far as {target.init_loc.dtype} can tell: the "
                f"log-density does not fall along a direction of {names}, whose priors are flat "
                "or masked. Cure: proper priors; or fewer latents, for instance one intercept "
                "instead of two"
            )
    points = nearby(target.init_loc, 2).requires_grad_()
    try:
        with torch.enable_grad():
            density = target.read(points, total_log_prob)
            (score,) = torch.autograd.grad(density.sum(), points)
    except Exception:  # the model has no gradient there
        return
    unmoved = target.split((score == 0).all(0) & density.isfinite().all())
    for name in flat:
        support = innermost(target.sites[name]["fn"]).support
        number = int(unmoved[name].sum())
        if number and _is_unbounded(innermost_support(support)):
            raise ValueError(
                f"the posterior is improper: {number} of {unmoved[name].numel()} elements of "
                f"site '{name}' have {_KINDS[name in masked]}, and neither data nor other sites "
                f"depend on them. Cure: {_CURES[name in masked]}"
            )


def _endless(target: _Posterior, flat: list[str]) -> Tensor:
    """Return a direction of several elements of flat priors along which the density does not fall.

    It is that of the smallest curvature at ``init_loc``, in conditional standard deviations,
    followed until rounding would bend it; zeros, if the density falls.
    """
    at, index = target.init_loc, target.places
    columns, reach = torch.cat([index[name].flatten() for name in flat]), torch.zeros_like(at)
    resolution = torch.finfo(at.dtype).eps ** 0.5
    try:
        log_prob, _, hessian = target.derivatives(at.unsqueeze(0))
        block = -hessian[0][columns][:, columns]
        scale = block.diagonal().rsqrt()  # NaN if the density is not concave there
        vector = torch.linalg.eigh(scale.unsqueeze(-1) * block * scale).eigenvectors[:, 0]
        reach[columns] = scale * vector / resolution
        change = target.log_prob(torch.stack([at + reach, at - reach])) - log_prob
    except Exception:  # the model has no second derivative there
        return torch.zeros_like(at)
    reach[columns] *= vector.abs() > resolution
    is_endless = (change.abs() < ROUNDING.max_error).all() and reach.count_nonzero() > 1
    return reach if is_endless else torch.zeros_like(at)


def _is_unbounded(support: Any) -> bool:
    kinds = (type(constraints.real), type(constraints.positive), constraints.less_than)
    return isinstance(support, (*kinds, constraints.greater_than_eq))
