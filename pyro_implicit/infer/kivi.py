# SPDX-License-Identifier: Apache-2.0
"""Kernel implicit variational inference."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    choose_covariance,
    explained_factor,
    site_draws,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.ops import (
    Covariance,
    Direction,
    Kernel,
    adaptive_log_density,
    imq_kernel,
    log_density_ratio,
    multiscale_rbf_kernel,
    rbf_kernel,
)
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive, refuse_unknown

__all__ = ["KIVI_ELBO"]

KERNELS: dict[str, Kernel] = {
    "imq": imq_kernel,
    "multiscale": multiscale_rbf_kernel,
    "rbf": rbf_kernel,
}


class KIVI_ELBO(ImplicitELBO):
    r"""ELBO of implicit guides by a density ratio in closed form (KIVI).

    Kernel regression on draws of each implicit site and of a contrast r gives their log-ratio,

    .. math::
        \log q(\theta) = \log r(\theta) + \log \frac{q(\theta)}{r(\theta)}.

    With the adaptive contrast, the default, r is a Gaussian with the moments of the site's draws.
    It does not involve the prior, which may be flat. With the prior contrast, r is the prior in
    unconstrained space, and the model's log-prior cancels. The guide needs no noise around its
    generator: :class:`~pyro_implicit.AutoImplicit` and :class:`~pyro_implicit.SemiImplicit` sites
    both work.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> svi = SVI(model, AutoImplicit(model), pyro.optim.ClippedAdam({"lr": 1e-3}), KIVI_ELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step that the model sees.
    :param num_entropy_particles: minimum number of draws of each implicit site for the ratio: the
        ``num_particles`` draws, and more draws of the site if these are fewer. A site whose context
        or scale depends on other latent variables gets that number for each particle. A generator
        must receive other latent variables through its context only.
    :param num_prior_particles: draws of the contrast, Gaussian or prior; by default as many as of
        the site.
    :param ridge: :math:`\lambda` of the regression.
    :param clip: lower limit of the estimated ratio; a draw below it contributes no gradient.
    :param kernel: ``"rbf"``, ``"imq"``, ``"multiscale"`` or a function like
        :func:`~pyro_implicit.ops.rbf_kernel`; its bandwidth is the median distance. For
        well-separated modes this is the distance between them, and only ``"multiscale"``
        (:func:`~pyro_implicit.ops.multiscale_rbf_kernel`) resolves the shape of each mode.
    :param contrast: ``"adaptive"`` or ``"prior"``. The prior contrast needs a prior that can be
        sampled, and fails for a posterior that is much narrower than the prior.
    :param direction: ``"forward"``: the ratio q/r is fitted; ``"reverse"``: r/q, as in the paper.
    :param covariance: covariance of the adaptive contrast: ``"full"``, which needs more entropy
        particles than dimensions; ``"diagonal"``, as in the paper, with which guides of strongly
        correlated latent variables collapse; ``"auto"``: full if there are twice as many entropy
        particles as dimensions and at least as many noise dimensions, else diagonal.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at a step, for a full covariance of too few
        draws, for draws on a hyperplane, or for the prior contrast of a prior that cannot be
        sampled.

    The value is not a certified bound. In many dimensions the kernel adds little to the contrast:
    raise ``num_entropy_particles`` to twice the dimension of a site, or split the latent variables
    into several sites (``AutoGuideList``).

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, section 3 and appendix D.
       There the moments of the adaptive contrast are constants. Here the gradient of the ratio
       flows through them too, because the KL divergence of q from a Gaussian with its moments does
       not depend on location and scale; this halves the noise of the gradient on Gaussians
       (``benchmarks/results/kivi_ratio_table.md``). The paper's settings are ``KIVI_ELBO(100,
       clip=1e-8, contrast="prior", direction="reverse")``, and for local latents ``KIVI_ELBO(1,
       clip=1e-8, direction="reverse", covariance="diagonal")``.
    """

    site_types = (Implicit, SemiImplicit)
    recommended_for = (Implicit,)

    def __init__(
        self,
        num_particles: int = 8,
        num_entropy_particles: int = 100,
        num_prior_particles: int | None = None,
        ridge: float = 1e-3,
        clip: float = 0.01,
        kernel: Literal["rbf", "imq", "multiscale"] | Kernel = "rbf",
        contrast: Literal["adaptive", "prior"] = "adaptive",
        direction: Direction = "forward",
        covariance: Literal["auto"] | Covariance = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_counts(2, num_entropy_particles=num_entropy_particles)
        refuse_counts(num_prior_particles=num_prior_particles)
        refuse_nonpositive(ridge=ridge, clip=clip)
        if not callable(kernel) and kernel not in KERNELS:
            raise ValueError(
                f"kernel must be one of {list(KERNELS)} or a function, but got {kernel!r}"
            )
        refuse_unknown("contrast", contrast, "adaptive", "prior")
        refuse_unknown("direction", direction, "forward", "reverse")
        refuse_unknown("covariance", covariance, "auto", "diagonal", "full")
        self.num_entropy_particles = num_entropy_particles
        self.num_prior_particles = num_prior_particles
        self.ridge = ridge
        self.clip = clip
        self.kernel: Kernel = kernel if callable(kernel) else KERNELS[kernel]
        self.contrast = contrast
        self.needs_prior = contrast == "prior"
        self.direction: Direction = direction
        self.covariance: Literal["auto"] | Covariance = covariance

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the mean of log q over all draws of the site, the same for each particle."""
        to_vectors = prior.unconstrain if self.contrast == "prior" else None
        draws = site_draws(site, self.num_particles, self.num_entropy_particles, to_vectors)
        with explained_factor(site, ", else a larger ridge"):
            if self.contrast == "prior":
                return self._prior_contrast(prior, draws)
            return self._adaptive_contrast(site, draws)

    def _prior_contrast(self, prior: SitePrior, draws: Tensor) -> ScoreParts:
        contrast = prior.sample(self.num_prior_particles or draws.shape[-2])
        sets = torch.broadcast_shapes(draws.shape[:-2], contrast.shape[:-2])
        log_ratio = log_density_ratio(
            draws.expand(sets + draws.shape[-2:]),
            contrast.expand(sets + contrast.shape[-2:]),
            self.direction,
            self.ridge,
            self.clip,
            self.kernel,
        )
        return prior.score_parts(log_ratio.mean(-1))

    def _adaptive_contrast(self, site: ImplicitSite, draws: Tensor) -> ScoreParts:
        num_draws, dim = draws.shape[-2:]
        covariance = choose_covariance(self.covariance, site, num_draws, dim)
        contrast_shape = draws.shape[:-2] + (self.num_prior_particles or num_draws, dim)
        contrast = torch.randn(contrast_shape, dtype=draws.dtype, device=draws.device)
        log_q = adaptive_log_density(
            draws,
            contrast,
            covariance,
            self.direction,
            self.ridge,
            self.clip,
            self.kernel,
        )
        log_q = log_q.mean(-1).expand(site.distribution.batch_shape)
        return ScoreParts(log_q, 0, log_q)
