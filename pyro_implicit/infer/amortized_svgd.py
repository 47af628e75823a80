# SPDX-License-Identifier: Apache-2.0
"""Stein variational gradient descent that trains a generator instead of particles."""

from __future__ import annotations

from typing import Any

from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    check_same_distribution,
    moments_log_q,
    particles_first,
    particles_inside,
    second_batch,
    send_gradient,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.ops.kernels import (
    RadialKernel,
    kernel_and_slopes,
    particle_bandwidth,
    repulsion,
)
from pyro_implicit.runtime.messages import refuse_unknown

__all__ = ["AmortizedSVGD_ELBO"]


class AmortizedSVGD_ELBO(ImplicitELBO):
    r"""Implicit guides trained by the velocities of Stein variational gradient descent.

    The model sees one batch of draws :math:`\theta'`, and each draw :math:`\theta_i` of a
    second batch moves along the velocity of SVGD,

    .. math::
        v(\theta_i) = \frac1K \sum_j \left[ \nabla \log p(x, \theta'_j)\, k(\theta'_j, \theta_i)
        + \nabla_{\theta'_j} k(\theta'_j, \theta_i) \right],

    with the kernel between the site's values as the guide draws them and the bandwidth
    :func:`~pyro_implicit.ops.particle_bandwidth`. Each element of a plate has its own kernel. With
    a single batch, as in ref. 2, the sums are biased: few particles lose half the variance. Stein's
    identity needs densities that vanish at the edge of the support: for constrained latent
    variables use :class:`~pyro_implicit.AutoImplicit`, whose values are unconstrained.

    **The loss is optimistic.** The velocities give no density, so the value uses the entropy of the
    Gaussian with the moments of the draws, which exceeds the entropy of every other q with these
    moments. Do not compare models by it.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> elbo = AmortizedSVGD_ELBO(10)
    >>> svi = SVI(model, AutoImplicit(model), pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step, at least 2.
    :param kernel: ``"rbf"`` or ``"imq"``.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for a context or scale
        that depends on other latent variables, so that each particle has its own distribution.

    **References:**

    1. Liu and Wang (2016), *Stein Variational Gradient Descent*.
    2. Feng, Wang and Liu (2017), *Learning to Draw Samples with Amortized Stein Variational
       Gradient Descent*.
    """

    site_types = (Implicit, SemiImplicit)
    least_particles = 2

    def __init__(
        self, num_particles: int = 10, kernel: RadialKernel = "rbf", **kwargs: Any
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_unknown("kernel", kernel, "rbf", "imq")
        self.kernel: RadialKernel = kernel

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site whose particles differ in distribution."""
        check_same_distribution(site, type(self).__name__, "AmortizedKSD_ELBO")

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draws of the model's batch; their gradient goes to the second batch."""
        draw = second_batch(site).draw
        shape = site.batch_shape + (-1,)
        source, target = (
            particles_inside(points.detach().reshape(shape)) for points in (site.draw, draw)
        )
        bandwidth = particle_bandwidth(target)  # so that the sums over the first are unbiased
        gram, slopes = kernel_and_slopes(source, target, bandwidth, self.kernel)
        repelled = particles_first(repulsion(slopes, source, target)) / self.num_particles
        path = (repelled * draw.reshape(repelled.shape)).sum(-1)
        self.state.step["repulsion", site.name] = path

        def share(gradient: Tensor) -> Tensor:
            mean = gram.mT @ particles_inside(gradient.reshape(shape)) / self.num_particles
            return particles_first(mean).reshape(gradient.shape)

        return send_gradient(site.draw, draw, share)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the Gaussian's log q, and the kernel's repulsion at the second batch."""
        log_q = moments_log_q(site)
        path = self.state.step.get(("repulsion", site.name))
        if path is None:
            return ScoreParts(log_q, 0, log_q)
        # The path is at the draw itself, so the transforms' log-determinant must not count.
        return ScoreParts(log_q, 0, site.log_abs_det - path)
