# SPDX-License-Identifier: Apache-2.0
"""The affine frame of an implicit guide, given or taken from a Gaussian autoguide."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoLaplaceApproximation, AutoNormal
from torch import Tensor

from pyro_implicit.runtime.printing import short_repr

__all__ = ["Frame", "gaussian_frame"]


class Frame(NamedTuple):
    r"""A Gaussian in whose units an implicit guide works, in unconstrained space.

    **Example:**

    >>> import pyro
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    >>> frame = Frame(torch.tensor([1900.0, 0.0]), scale=torch.tensor([30.0, 1e-3]))
    >>> guide = AutoImplicit(model, frame=frame)
    >>> guide.sample_posterior(5)["x"].shape
    torch.Size([5, 2])

    :param loc: location, ``(latent_dim,)``.
    :param scale: standard deviations, ``(latent_dim,)``, for a diagonal frame.
    :param scale_tril: lower triangular factor of the covariance, ``(latent_dim, latent_dim)``, for
        a full one. One of the two must be given.
    """

    loc: Tensor
    scale: Tensor | None = None
    scale_tril: Tensor | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def check(self, latent_dim: int) -> None:
        """Refuse a frame that does not fit a latent vector.

        :param latent_dim: size of the unconstrained latent vector.
        :raises ValueError: saying what is wrong, and the cure.
        """
        if tuple(self.loc.shape) != (latent_dim,):
            raise ValueError(
                f"the frame's loc has shape {tuple(self.loc.shape)}, but the model has "
                f"{latent_dim} unconstrained latents. Cure: a loc of shape ({latent_dim},)"
            )
        factor = self.scale_tril if self.scale is None else self.scale
        if factor is None or (self.scale is not None and self.scale_tril is not None):
            raise ValueError(
                "a frame wants either scale or scale_tril. Cure: Frame(loc, scale=sds) or "
                "Frame(loc, scale_tril=torch.linalg.cholesky(covariance))"
            )
        shape = (latent_dim, latent_dim) if self.scale is None else (latent_dim,)
        if tuple(factor.shape) != shape:
            raise ValueError(
                f"the frame's scale{'_tril' if self.scale is None else ''} has shape "
                f"{tuple(factor.shape)}, but {latent_dim} latents want {shape}"
            )
        full = factor if self.scale is None else factor.diag()
        if not torch.equal(full, full.tril()) or not (full.diagonal() > 0).all():
            raise ValueError(
                "the frame's scale must be positive, and its scale_tril lower triangular with a "
                "positive diagonal. Cure: torch.linalg.cholesky(covariance)"
            )
        if not (self.loc.isfinite().all() and factor.isfinite().all()):
            raise ValueError(
                "the frame is not finite. Cure: fit its guide again with a smaller learning rate, "
                'or frame="auto"'
            )


@torch.no_grad()
def gaussian_frame(guide: AutoGuide, sites: list[str], *args: Any, **kwargs: Any) -> Frame:
    """Location and scale, in unconstrained space, of a Gaussian autoguide.

    **Example:**

    >>> from pyro.infer.autoguide import AutoDiagonalNormal
    >>> def model():
    ...     import pyro
    ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    >>> gaussian_frame(AutoDiagonalNormal(model), ["x"]).scale
    tensor([0.1000, 0.1000, 0.1000])

    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal`` or ``AutoLaplaceApproximation`` of the same model, fitted
        or not.
    :param sites: the model's latent sites in their order.
    :param args: the model's arguments.
    :raises TypeError: for anything but a guide.
    :raises ValueError: if the guide is of another kind, covers other sites, or is a Laplace
        approximation where there is no mode.
    """
    if not isinstance(guide, AutoGuide):
        raise TypeError(
            'frame must be a Gaussian autoguide, a Frame, "auto", "mode" or None, but got '
            f"{guide!r}"
        )
    if guide.prototype_trace is None:
        with poutine.block():
            guide(*args, **kwargs)
    found = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes()]
    if found != sites:
        raise ValueError(
            f"the frame's guide covers the sites {found}, but the guide covers {sites}; build both "
            "of the same model"
        )
    if isinstance(guide, AutoNormal):
        parts = [guide._get_loc_and_scale(name) for name in sites]
        loc, scale = (
            torch.cat([part.reshape(-1) for part in side]) for side in zip(*parts, strict=True)
        )
        return Frame(loc.clone(), scale.clone(), None)
    if isinstance(guide, AutoLaplaceApproximation):
        guide = _laplace(guide, args, kwargs)
    posterior = None
    if isinstance(guide, AutoContinuous):
        posterior = guide.get_posterior(*args, **kwargs)
    if isinstance(posterior, (dist.MultivariateNormal, dist.LowRankMultivariateNormal)):
        return Frame(posterior.loc.clone(), None, posterior.scale_tril.clone())
    if isinstance(posterior, dist.Independent) and isinstance(posterior.base_dist, dist.Normal):
        return Frame(posterior.base_dist.loc.clone(), posterior.base_dist.scale.clone(), None)
    raise ValueError(
        f"frame must be a Gaussian autoguide (AutoNormal, AutoDiagonalNormal, "
        f"AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoLaplaceApproximation), but "
        f"got {type(guide).__name__}"
    )


def _laplace(guide: AutoLaplaceApproximation, args: tuple, kwargs: dict) -> AutoGuide:
    message = (
        "the Laplace approximation given as frame has no positive definite Hessian: fit it to a "
        "mode first, or use AutoMultivariateNormal where there is none (a funnel)"
    )
    try:
        with torch.enable_grad():
            gaussian = guide.laplace_approximation(*args, **kwargs)
    except torch.linalg.LinAlgError as error:
        raise ValueError(message) from error
    if not gaussian.scale_tril.isfinite().all():
        raise ValueError(message)
    return gaussian
