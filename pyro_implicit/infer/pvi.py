# SPDX-License-Identifier: Apache-2.0
"""Particle semi-implicit variational inference (PVI)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroParam
from pyro.optim import PyroOptim
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.distributions import Draw, Implicit, SemiImplicit
from pyro_implicit.guides import AutoSemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    check_generator,
    flatten_site,
    mixture_score,
    path_of_score,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive
from pyro_implicit.runtime.sites import unconstrained

__all__ = ["PVI"]


class PVI:
    r"""Semi-implicit guides whose mixing distribution consists of particles (PVI).

    The guide is a mixture of N Gaussians, whose locations a generator makes of particles,

    .. math::
        q(\theta) = \frac1N \sum_n N(\theta \mid g_\phi(z_n), \mathrm{diag}(s^2)),

    so that its density, and the loss, are exact. With the mixing distribution r, each step descends
    the free energy :math:`E_q[\log q - \log p] + \lambda\, KL(r \| N(0, I))` once: the particles
    follow the Wasserstein gradient,

    .. math::
        z_n \leftarrow z_n - h \left( \Psi\, \nabla_{z}
        E_\eta\left[ \log \frac{q}{p}(g(z) + s \odot \eta) \right]_{z = z_n} + \lambda z_n \right)
        + \sqrt{2 h \lambda}\, \xi_n,

    with q on the right side constant, and ``optim`` moves generator and scale along the gradient of
    the path. Both use the same draws: ``num_samples`` of each component. The preconditioner
    :math:`\Psi` divides by the root of a moving average of the squared gradients of all particles.

    A step costs ``num_particles * num_samples`` runs of the model and a mixture density of
    ``num_particles`` components at each draw. N components cover few of many dimensions: with a
    hundred latent variables the scale does most of the work, and the guide is close to a Gaussian.
    Particles do not move between separated modes.

    **Example:**

    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> method = PVI(model, pyro.optim.ClippedAdam({"lr": 1e-3}), num_particles=20)
    >>> isinstance(method.step(), float)
    True
    >>> method.guide.sample_posterior(5)["x"].shape
    torch.Size([5])

    :param model: a Pyro model with continuous latent variables.
    :param optim: moves generator and scale, and the parameters of the model if it has any.
    :param num_particles: N, at least 2.
    :param num_samples: draws of each component per step (the paper uses 250).
    :param particle_lr: h, the step size of the particles.
    :param regularization: :math:`\lambda`.
    :param precondition: whether the particles' gradients are preconditioned.
    :param noise_scale: the initial s, relative to the guide's frame.
    :param guide_options: arguments of :class:`~pyro_implicit.AutoSemiImplicit`: ``generator``,
        ``noise_dim``, ``frame`` and others.
    :param kwargs: keyword arguments of :class:`ImplicitELBO`: ``vectorize_particles``, ``compile``
        and others.
    :raises ValueError: for arguments out of range; at the first step, as
        :class:`~pyro_implicit.AutoSemiImplicit` and :class:`SIVI_ELBO`.

    ``guide`` is the guide, ``elbo`` its loss.

    **References:**

    1. Lim and Johansen (2024), *Particle Semi-Implicit Variational Inference*. In their code the
       particles move after the parameters, along fresh draws.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        optim: PyroOptim,
        num_particles: int = 100,
        num_samples: int = 1,
        particle_lr: float = 1e-2,
        regularization: float = 1e-8,
        precondition: bool = True,
        noise_scale: float = 1.0,
        guide_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_counts(2, num_particles=num_particles)
        refuse_counts(num_samples=num_samples)
        refuse_nonpositive(particle_lr=particle_lr)
        if regularization < 0:
            raise ValueError(f"regularization must not be negative, but got {regularization}")
        options = guide_options or {}
        self.model, self.optim = model, optim
        self.guide = _ParticleMixture(model, num_particles, noise_scale, options)
        self.elbo = _MixtureELBO(num_particles, num_samples, **kwargs)
        self.num_particles = num_particles
        self.particle_lr = particle_lr
        self.regularization = regularization
        self.precondition = precondition
        self._mean_square: Tensor | None = None

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Move particles and parameters once.

        :returns: an unbiased estimate of the negative ELBO.
        """
        with poutine.trace(param_only=True) as capture:
            loss = self.elbo.loss_and_grads(self.model, self.guide, *args, **kwargs)
        params = {unconstrained(site) for site in capture.trace.nodes.values()}
        particles = self.guide.particles
        if particles.grad is not None:  # a skipped step has none
            self._move(particles)
        self.optim(params - {particles})
        pyro.infer.util.zero_grads(params)
        return loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Return an unbiased estimate of the negative ELBO."""
        return self.elbo.loss(self.model, self.guide, *args, **kwargs)

    def get_state(self) -> dict[str, Any]:
        """Return all that the next step depends on, without parameters and random streams."""
        return {"mean_square": copy.deepcopy(self._mean_square), "elbo": self.elbo.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`get_state` returned; the next step goes on from there."""
        self._mean_square = copy.deepcopy(state["mean_square"])
        self.elbo.set_state(state["elbo"])

    @torch.no_grad()
    def _move(self, particles: Tensor) -> None:
        assert particles.grad is not None
        gradient = self.num_particles * particles.grad
        if self.precondition:
            square = gradient.square().mean(0)
            decay = ELBOS.particle_decay
            before = torch.zeros_like(square) if self._mean_square is None else self._mean_square
            self._mean_square = decay * before + (1 - decay) * square
            tiny = torch.finfo(square.dtype).tiny
            gradient = gradient * self._mean_square.clamp(min=tiny).rsqrt()
        drift = gradient + self.regularization * particles
        noise = (2 * self.particle_lr * self.regularization) ** 0.5 * torch.randn_like(particles)
        particles.add_(noise - self.particle_lr * drift)


class _Particles(TorchDistribution):
    """The uniform distribution on the rows of a matrix, differentiable in the matrix."""

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, particles: Tensor, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.particles = particles
        super().__init__(batch_shape, particles.shape[1:], validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> _Particles:
        return _Particles(self.particles, torch.Size(batch_shape))

    @property
    def mean(self) -> Tensor:
        return self.particles.mean(0).expand(self.batch_shape + self.event_shape)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        shape = torch.Size(sample_shape) + self.batch_shape
        return self.particles[
            torch.randint(len(self.particles), shape, device=self.particles.device)
        ]


class _ParticleMixture(AutoSemiImplicit):
    """A semi-implicit guide whose noise is a set of particles."""

    def __init__(
        self,
        model: Callable[..., Any],
        num_particles: int,
        noise_scale: float,
        options: dict[str, Any],
    ) -> None:
        super().__init__(model, **options, noise_scale=noise_scale)
        self.num_particles = num_particles
        self._start_scale = noise_scale

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        super()._make_parameters(*args, **kwargs)
        scale = torch.full_like(self.loc, self._start_scale)
        self.noise_scale = PyroParam(scale, constraints.positive)
        shape = self.num_particles, self.noise_dim
        self.particles = PyroParam(torch.randn_like(scale.new_empty(shape)))

    def get_base_dist(self) -> TorchDistribution:
        return _Particles(self.particles)


class _MixtureELBO(ImplicitELBO):
    """The ELBO of a mixture of particles, with equally many draws of each."""

    def __init__(self, num_particles: int, num_samples: int, **kwargs: Any) -> None:
        super().__init__(num_particles * num_samples, **kwargs)
        self.num_samples = num_samples
        # Of the object: messages name the classes that train a site, but not this one.
        self.site_types = (SemiImplicit,)  # type: ignore[misc]

    def draw(self, q: Implicit) -> Draw:
        particles: Tensor = q.noise_distribution.particles
        noise = particles.repeat(self.num_samples, 1).reshape(q.batch_shape + (-1,))
        value = q.generate(noise)
        return Draw(noise, value + q.scale * torch.randn_like(value), None)

    def check_site(self, site: ImplicitSite) -> None:
        check_generator(site)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        flat = flatten_site(site, self.num_particles)
        particles = site.distribution.noise_distribution.particles.detach()
        ones = (1,) * (flat.noise.dim() - 1)
        noise = particles.reshape(len(particles), *ones, -1)
        log_q, score = mixture_score(flat, [noise])
        return path_of_score(log_q, flat, score)
