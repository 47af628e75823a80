# SPDX-License-Identifier: Apache-2.0
"""Semi-implicit variational inference by kernelised path gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor, nn

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.aisivi import ReverseConditional, log_normal, with_context
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_same_distribution,
    check_standard_normal,
    flatten_site,
    mixture_log_q,
    particles_first,
    particles_inside,
    second_batch,
    send_gradient,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.ops.kernels import (
    RadialKernel,
    imq_kernel,
    particle_bandwidth,
    rbf_kernel,
)
from pyro_implicit.ops.policy import PRIOR_SHARE
from pyro_implicit.runtime.messages import refuse_counts, refuse_unknown

__all__ = ["KPG_ELBO"]


class KPG_ELBO(NetworkELBO):
    r"""Semi-implicit guides trained by kernelised path gradients (KPG, KPG-IS).

    Each draw :math:`\theta_i` moves against a kernel mean of differences of scores,

    .. math::
        \frac1K \sum_j k(\theta_i, \theta'_j) \left[ \nabla \log q(\theta'_j \mid z'_j)
        - \nabla \log p(x, \theta'_j) \right],

    where the model sees a second, independent batch :math:`\theta'`. Given :math:`\theta'`, the
    mean of the conditional score is the score of q. :class:`AmortizedSVGD_ELBO` has the same
    expectation; there Stein's identity replaces the conditional score, with more variance. The
    kernel compares the draws, with the bandwidth :func:`~pyro_implicit.ops.particle_bandwidth`,
    at which :math:`\sum_j k(\theta_i, \theta'_j)` is about 1. A draw whose sum is smaller has few
    neighbours, and would hardly move: the terms are divided by its sum, so that it moves with the
    nearest draws. (The paper does not divide; a few draws then drift away in many dimensions.)

    With ``num_samples``, importance sampling (KPG-IS) draws :math:`\theta'` near
    :math:`\theta_i`: noise comes from a learnt Gaussian or flow :math:`\tau(z \mid \theta_i)`, and
    a tenth of it from its own distribution p, so that no weight exceeds about 10. The terms get the
    weights :math:`p(z') / m(z')`, with the mixture m of both, and the expectation is the same. A
    step with ``num_particles`` runs of the model then moves ``num_particles / num_samples`` draws.
    With few moved draws the gradient is noisy: use a learning rate of at most 0.003.

    The kernel mean is a smoothed KL gradient: the bandwidth limits the shapes that it resolves, in
    many dimensions and for narrow conditionals first. With the default ``noise_scale`` of
    :class:`~pyro_implicit.AutoSemiImplicit`, 0.02, draws of a Gaussian posterior are too narrow
    (variances of .2 to .6), with 0.5 they are not. The value is the surrogate bound of
    :class:`SIVI_ELBO`; with ``num_samples``, model and its parameters see draws of
    :math:`\tau`, so that the value is exact for an exact :math:`\tau` only.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoSemiImplicit(model, noise_scale=0.5)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), KPG_ELBO(16, 4))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: runs of the model per step, at least 2.
    :param num_samples: 0 for none; otherwise the draws of :math:`\tau` for each moved draw, of
        which ``num_particles`` is a multiple.
    :param kernel: ``"rbf"`` or ``"imq"``.
    :param num_mixing: fresh noises of the reported value.
    :param proposal: makes :math:`\tau`, see :class:`AISIVI_ELBO`. The paper has a Gaussian, and
        learns the share of p.
    :param proposal_optim: arguments of its :class:`torch.optim.Adam`.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for a context or scale that
        depends on other latent variables, and with ``num_samples`` for noise that is not standard
        normal.

    **References:**

    1. Pielok, Bischl and Rügamer (2026), *Semi-Implicit Variational Inference via Kernelized Path
       Gradient Descent*.
    """

    site_types = (SemiImplicit,)
    least_particles = 2

    def __init__(
        self,
        num_particles: int = 64,
        num_samples: int = 0,
        kernel: RadialKernel = "rbf",
        num_mixing: int = 50,
        proposal: Callable[[int, int], nn.Module] = ReverseConditional,
        proposal_optim: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, {"lr": 1e-3} | (proposal_optim or {}), **kwargs)
        if num_samples < 0 or (num_samples and num_particles % num_samples):
            raise ValueError(
                f"num_samples must divide num_particles={num_particles}, but got {num_samples}"
            )
        refuse_unknown("kernel", kernel, "rbf", "imq")
        refuse_counts(num_mixing=num_mixing)
        self.num_samples = num_samples
        self.kernel: RadialKernel = kernel
        self.num_mixing = num_mixing
        self._make_proposal = proposal

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site whose particles differ in distribution, or unknown densities of noise."""
        check_same_distribution(site, type(self).__name__, "SIVI_ELBO")
        if self.num_samples:
            check_standard_normal(site, "KPG-IS")

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draws that the model sees; their gradient goes to the draws that move."""
        second = second_batch(site)
        draw = second.draw
        flat = flatten_site(site, self.num_particles)
        if self.num_samples:
            shown, score, weights = self._propose(site, flat, second)
        else:
            with torch.no_grad():
                error = flat.generate(flat.noise.unsqueeze(0))[0] - flat.value
            shown, score, weights = site.draw, error / flat.scale.square(), None
        score = replace(site, draw=shown).score_at_draw(score.reshape(site.value.shape))
        shape = site.batch_shape + (-1,)
        mean = self._kernel_mean(shown.reshape(shape), draw.reshape(shape), weights)
        path = (mean(score.reshape(shape)) * draw.reshape(shape)).sum(-1)
        self.state.step["kernel", site.name] = path
        return send_gradient(shown, draw, lambda one: mean(one.reshape(shape)).reshape(one.shape))

    @torch.no_grad()
    def _kernel_mean(
        self, shown: Tensor, draw: Tensor, weights: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Return the function that turns vectors at ``shown`` into their kernel mean at ``draw``.

        All have the shape ``(num_particles, *plates, m)``. With weights, ``(num_particles,
        *plates)``, a draw has only its own ``num_samples`` points, and draws without points get 0.
        """
        evaluate = rbf_kernel if self.kernel == "rbf" else imq_kernel
        points = particles_inside(draw)
        bandwidth = particle_bandwidth(points)
        if weights is None:
            gram = evaluate(points, particles_inside(shown), bandwidth)
            sums = gram.sum(-1, keepdim=True).clamp(torch.finfo(gram.dtype).tiny, 1.0)
            gram = gram / sums / self.num_particles
            return lambda vectors: particles_first(gram @ particles_inside(vectors))

        def own(points: Tensor) -> Tensor:
            """Move the points of a draw to the second-last dimension."""
            return points.unflatten(0, (self.num_samples, -1)).movedim(0, -2)

        num_moved = self.num_particles // self.num_samples
        gram = evaluate(draw[:num_moved].unsqueeze(-2), own(shown), bandwidth)
        gram = gram * own(weights.unsqueeze(-1)).mT

        def mean(vectors: Tensor) -> Tensor:
            moved = (gram @ own(vectors)).squeeze(-2)
            return torch.cat([moved, vectors.new_zeros(vectors[num_moved:].shape)])

        return mean

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q of the mixture, and the kernel mean of the conditional scores."""
        with torch.no_grad():
            flat = flatten_site(site, self.num_particles)
            log_q = mixture_log_q(site, flat, self.num_mixing)
        path = self.state.step.get(("kernel", site.name))
        # The path is at the draw itself, so the transforms' log-determinant must not count.
        return ScoreParts(log_q, 0, log_q if path is None else site.log_abs_det + path)

    def _propose(
        self, site: ImplicitSite, flat: FlatSite, second: ImplicitSite
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return draws of tau with their conditional scores, and their importance weights."""
        num_moved = self.num_particles // self.num_samples
        flat_second = flatten_site(second, self.num_particles)
        given = with_context(site, flat_second.value)[:num_moved]
        sizes = flat.noise.shape[-1], given.shape[-1]
        network: Any = self.site_network(site.name, lambda: self._make_proposal(*sizes), given)
        pairs = flat.noise.detach(), with_context(site, flat.value)
        self.descend(site.name, network, -network.log_prob(*pairs).mean())
        with torch.no_grad():
            noise, log_density = network.sample(self.num_samples, given)
            num_prior = max(1, round(PRIOR_SHARE * self.num_samples))
            noise[:num_prior].normal_()
            log_density[:num_prior] = network.log_prob(noise[:num_prior], given)
            share = log_density.new_tensor(num_prior / self.num_samples)
            log_ratio = (log_density - log_normal(noise)).flatten(0, 1)
            mixture = torch.logaddexp(share.log(), (1 - share).log() + log_ratio)
            eta = torch.randn_like(flat.value)
            value = flat.generate(noise.flatten(0, 1).unsqueeze(0))[0] + flat.scale * eta
            weights = (-mixture).exp()
            return site.push(value.reshape(site.value.shape)), -eta / flat.scale.detach(), weights
