# SPDX-License-Identifier: Apache-2.0
"""Generative particle variational inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.transforms import AffineTransform, LowerCholeskyAffine
from torch import Tensor, nn

from pyro_implicit.distributions import Draw, Implicit
from pyro_implicit.generators import Generator
from pyro_implicit.infer.engine.folds import note_orientation
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    check_same_distribution,
    check_square,
    exact_density,
    particles_first,
    particles_inside,
    path_term,
    second_batch,
    send_gradient,
    site_linearisation,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.ops import jacobian_products
from pyro_implicit.ops.kernels import (
    RadialKernel,
    kernel_and_slopes,
    particle_bandwidth,
    repulsion,
)
from pyro_implicit.runtime.messages import refuse_unknown

__all__ = ["GPVI_ELBO", "GPVIHelper", "helper_loss"]


#: Their log-determinant is no function of the value.
AFFINE = (AffineTransform, LowerCholeskyAffine)


class GPVIHelper(nn.Module):
    r"""A network that learns :math:`J_f^{-\top} \nabla k` from noise and kernel gradients.

    One layer for each input, then three for both, with ReLU after all but the last.

    **Example:**

    >>> GPVIHelper(2, 5)(torch.zeros(7, 2), torch.zeros(7, 5)).shape
    torch.Size([7, 5])

    :param core_dim: size of its noise input.
    :param value_dim: size of the gradients and of the output.
    :param width: width of the hidden layers.

    **References:**

    1. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, appendix B.1.
    """

    def __init__(self, core_dim: int, value_dim: int, width: int = 256) -> None:
        super().__init__()
        self.of_noise = nn.Linear(core_dim, width)
        self.of_gradients = nn.Linear(value_dim, width)
        self.of_both = nn.Sequential(
            nn.Linear(2 * width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, value_dim),
        )

    def forward(self, core: Tensor, gradients: Tensor) -> Tensor:
        """Estimate the functional gradient at a value from its core noise and the gradients there.

        :param core: ``(*batch, core_dim)``.
        :param gradients: ``(*batch, value_dim)``.
        :returns: ``(*batch, value_dim)``.
        """
        features = torch.cat([self.of_noise(core), self.of_gradients(gradients)], -1)
        return self.of_both(features.relu())


def helper_loss(
    network: nn.Module,
    generate: Callable[[Tensor], Tensor],
    noise: Tensor,
    gradients: Tensor,
    core_dim: int,
) -> Tensor:
    r"""Return the mean loss of the helper network, :math:`\|J_f^\top h - \nabla k\|^2` (eq 11).

    :param generate: f, from ``(*batch, m)`` to ``(*batch, m)``, each row on its own.
    :param noise: ``(*batch, m)``.
    :param gradients: :math:`\nabla k`, ``(*batch, m)``.
    :param core_dim: number of noise coordinates that the network sees.
    :returns: a scalar, differentiable in the network's parameters.
    """
    predicted = network(noise[..., :core_dim], gradients)
    _, transposed_times = jacobian_products(generate, noise)
    return (transposed_times(predicted) - gradients).square().sum(-1).mean()


class GPVI_ELBO(NetworkELBO):
    r"""ELBO of injective implicit guides by kernel gradients in the space of functions (GPVI).

    The model sees one batch of draws of the guide :math:`\theta = f(z)`, with noise z'. Gradient
    descent moves each draw :math:`f(z_i)` of a second batch along :math:`-v(z_i)`,

    .. math::
        v(z_i) = \frac1K \sum_j \left[ -\nabla_\theta \log p(x, f(z'_j))\, k(z'_j, z_i)
        - J_f(z'_j)^{-\top} \nabla_{z'} k(z'_j, z_i) \right],

    where v is the gradient of the KL divergence in the space of functions of the kernel k. The
    kernel compares noise; its bandwidth is :func:`~pyro_implicit.ops.particle_bandwidth`. Each
    element of a plate has its own kernel.

    The reported loss is the exact ELBO, because such a guide has an exact density. Nothing keeps
    the generator from folding its noise, though; a :class:`~pyro_implicit.infer.FoldWarning` says
    so. This method serves for comparison: :class:`InjectiveELBO` trains the same guides with exact
    gradients, at the same cost, and without a kernel, which resolves little in many dimensions.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit, ResidualGenerator
    >>> def model():
    ...     pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = AutoImplicit(model, lambda size: ResidualGenerator(size, core_dim=2))
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), GPVI_ELBO(10))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of each batch, at least 2.
    :param jacobian: ``"exact"``: the sums with :math:`J_f^{-\top}` in closed form, for
        :class:`~pyro_implicit.ResidualGenerator` by one k x k solve for each particle, else by one
        dense inverse. ``"helper"``: by a network, as in the paper, with K x K x m numbers in
        memory.
    :param kernel: ``"rbf"`` or ``"imq"``.
    :param helper: a function ``(core_dim, value_dim) -> module`` that makes the helper network of a
        site, called ``h(core, gradients)`` with the noise that enters the network of the generator
        (all of it, if there is no ``core_dim``) and the kernel's gradients; by default
        :class:`~pyro_implicit.infer.gpvi.GPVIHelper`. It takes one step in each
        training step.
    :param helper_optim: arguments of its :class:`torch.optim.Adam`.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for the sites that
        :class:`InjectiveELBO` refuses, for a context that depends on other latent variables (then
        each particle has its own distribution), and for any context with ``"helper"``.

    **References:**

    1. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, eqs 5, 11 and appendix B. Its equations have :math:`J_f^{-1}`; its
       proof has the transpose.
    """

    site_types = (Implicit,)
    least_particles = 2

    def __init__(
        self,
        num_particles: int = 10,
        jacobian: Literal["exact", "helper"] = "exact",
        kernel: RadialKernel = "rbf",
        helper: Callable[[int, int], nn.Module] = GPVIHelper,
        helper_optim: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, {"lr": 1e-4} | (helper_optim or {}), **kwargs)
        refuse_unknown("jacobian", jacobian, "exact", "helper")
        refuse_unknown("kernel", kernel, "rbf", "imq")
        self.jacobian = jacobian
        self.kernel: RadialKernel = kernel
        self._make_helper = helper

    def draw(self, q: Implicit) -> Draw:
        """Draw with the generator's derivative."""
        return q.draw(linearise=True)

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draws of the model's batch; their gradient goes to the second batch."""
        second = second_batch(site)
        source, target = particles_inside(site.noise), particles_inside(second.noise)
        bandwidth = particle_bandwidth(target)  # so that the sums over the first are unbiased
        kernel = kernel_and_slopes(source, target, bandwidth, self.kernel)
        batches = self.state.step["batches", site.name] = _Batches(site, second, *kernel)
        return send_gradient(site.draw, second.draw, batches.share)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q, exact, and the kernel's entropy gradient at the second batch."""
        batches = self.state.step.get(("batches", site.name))
        if batches is None:
            log_q = exact_density(site)[0]
            return ScoreParts(log_q, 0, log_q)
        second = batches.second
        repelled, log_q, signs = self._repulsion(site, batches)
        note_orientation(self, site.name, signs)
        repelled = repelled.reshape(second.value.shape)
        score = -second.gradient_at_draw(repelled) / self.num_particles
        # A change of variables after the generator belongs to the target.
        if not all(isinstance(transform, AFFINE) for transform in site.transforms):
            score = score + batches.share(site.score_at_draw(torch.zeros_like(site.value)))
        return ScoreParts(log_q, 0, path_term(site, score, second.draw))

    @torch.no_grad()
    def _repulsion(self, site: ImplicitSite, batches: _Batches) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over the model's batch, ``(num_particles, *plates, m)``; its density."""
        source, target = particles_inside(site.noise), particles_inside(batches.second.noise)
        if self.jacobian == "helper":
            repelled = self._learned_repulsion(site, batches, source, target)
            return repelled, *exact_density(site)
        # The sums and the density share one Jacobian.
        inverse = site_linearisation(site).inverse_transposed()
        signs, log_det = inverse.slogdet()
        log_q = site.distribution.noise_distribution.log_prob(site.noise) + log_det
        inverse = inverse._replace(rows=inverse.rows.movedim(0, -3))
        repelled = particles_first(repulsion(batches.slopes, source, target, inverse))
        return repelled, log_q, signs

    @torch.enable_grad()
    def _learned_repulsion(
        self, site: ImplicitSite, batches: _Batches, source: Tensor, target: Tensor
    ) -> Tensor:
        differences = source.unsqueeze(-2) - target.unsqueeze(-3)
        gradients = -batches.slopes.unsqueeze(-1) * differences  # (*plates, j, i, m)
        noise = source.unsqueeze(-2).expand_as(gradients)
        value_dim = noise.shape[-1]
        generator = site.distribution.generator
        core_dim = generator.core_dim if isinstance(generator, Generator) else value_dim
        network = self.site_network(
            site.name, lambda: self._make_helper(core_dim, value_dim), like=noise
        )
        generate = lambda z: site.distribution.generate(z).reshape(z.shape)  # noqa: E731
        loss = helper_loss(network, generate, noise, gradients, core_dim)
        self.descend(site.name, network, loss)
        with torch.no_grad():
            return particles_first(network(noise[..., :core_dim], gradients).sum(-3))

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site without an exact density, or whose particles differ in distribution."""
        check_square(site, type(self).__name__)
        check_same_distribution(site, type(self).__name__, "InjectiveELBO")
        if self.jacobian == "helper" and site.distribution.context is not None:
            raise ValueError(
                f"site '{site.name}' has a context, which the helper network does not see. "
                'Cure: jacobian="exact"'
            )


class _Batches(NamedTuple):
    """The model's batch of a site, ``first``, a second batch, and the kernel between them."""

    first: ImplicitSite
    second: ImplicitSite
    gram: Tensor
    slopes: Tensor

    def share(self, gradient: Tensor) -> Tensor:
        """Give the gradients at the first batch to the second, at the generator's values."""
        first, second = self.first, self.second
        with torch.enable_grad():
            value = first.value.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(first.push(value), value, gradient)
        gradient = particles_inside(gradient.reshape(first.noise.shape))
        shared = particles_first(self.gram.mT @ gradient) / len(first.noise)
        return second.gradient_at_draw(shared.reshape(second.value.shape))
