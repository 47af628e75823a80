# SPDX-License-Identifier: Apache-2.0
"""Variational inference by particles, without a guide: SVGD, GFSF and KSD in one interface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import RBFSteinKernel, svgd
from pyro.infer.autoguide import AutoContinuous, init_to_sample
from pyro.optim import PyroOptim
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.infer.engine.implicit_sites import PARTICLE_PLATE
from pyro_implicit.ops.score_estimators import kernel_stein_discrepancy, stein_score
from pyro_implicit.runtime.messages import refuse_nonpositive
from pyro_implicit.runtime.sites import FlatPriorStart, example_tensor, unconstrained

__all__ = ["GFSF", "KSD", "SVGD"]

PARTICLES = "svgd_particles"  # Pyro's name
Site = dict[str, Any]


class SVGD(svgd.SVGD):
    r"""Pyro's :class:`~pyro.infer.SVGD` for models of any number of latent sites.

    Pyro's ``SVGD`` concatenates the sites and splits that vector into particles, so that with
    several sites the kernel compares parts of different latent variables. Here a particle consists
    of all latent variables of one draw. Particles start at draws of the prior (uniformly between -2
    and 2 in unconstrained space for flat priors). The parameter store has them under one name: call
    ``pyro.clear_param_store()`` before another run.

    **Example:**

    >>> from pyro.infer import RBFSteinKernel
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> method = SVGD(model, RBFSteinKernel(), pyro.optim.Adam({"lr": 0.1}), 50, 0)
    >>> sorted(method.step())
    ['x']
    >>> method.get_named_particles()["x"].shape
    torch.Size([50])

    :param model: a model that broadcasts over one more plate to the left of its own, with
        continuous latent variables only.
    :param kernel: see :class:`pyro.infer.SVGD`, as ``mode``. In many dimensions the "multivariate"
        mode needs ``RBFSteinKernel(bandwidth_factor=dim)``; otherwise the particles do not repel
        each other and collapse.
    :param optim: moves the particles, and the parameters of the model if it has any.
    :param num_particles: at least 2.
    :param max_plate_nesting: the number of nested plates in the model.
    :raises ValueError: at a step, if the store has the particles of another run.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        kernel: svgd.SteinKernel,
        optim: PyroOptim,
        num_particles: int,
        max_plate_nesting: int,
        mode: str = "univariate",
    ) -> None:
        super().__init__(model, kernel, optim, num_particles, max_plate_nesting, mode)
        self.guide = _ParticleGuide(self.model, num_particles)

    def get_named_particles(self) -> dict[str, Tensor]:
        """Return the particles as draws of the posterior, for :func:`~pyro_implicit.compare`.

        :returns: ``(num_particles, *shape)`` for every latent site of this ``shape``, constrained
            and without gradient.
        :raises ValueError: before the first step.
        """
        if self.guide.prototype_trace is None:
            raise ValueError(f"{type(self).__name__} has no particles before its first step()")
        particles = pyro.param(PARTICLES).detach()
        return {
            site["name"]: _without_padding(site, biject_to(site["fn"].support)(value))
            for site, value in self.guide._unpack_latent(particles)
        }


class _ParticleFlow(SVGD):
    """A particle method that computes the particles' motion from the model's loss."""

    def __init__(
        self,
        model: Callable[..., Any],
        optim: PyroOptim,
        num_particles: int,
        max_plate_nesting: int,
    ) -> None:
        super().__init__(model, RBFSteinKernel(), optim, num_particles, max_plate_nesting)

    @abstractmethod
    def _particle_gradient(self, loss: Tensor, particles: Tensor) -> Tensor:
        """Return the gradient for the optimiser, ``(num_particles, latent_dim)``."""

    def step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Move the particles; return the mean squared gradient of each latent site."""
        with torch.enable_grad(), poutine.trace(param_only=True) as capture:
            loss = self.loss(self.model, self.guide, *args, **kwargs)
            params = {unconstrained(site) for site in capture.trace.nodes.values()}
            particles = pyro.param(PARTICLES).unconstrained()
            gradient = self._particle_gradient(loss, particles)
            if len(params) > 1:
                loss.backward(inputs=list(params - {particles}))
        particles.grad = gradient.reshape(particles.shape)
        squared_gradients = {
            site["name"]: value.mean().item()
            for site, value in self.guide._unpack_latent(particles.grad.square())
        }
        self.optim(params)
        pyro.infer.util.zero_grads(params)
        return squared_gradients


class GFSF(_ParticleFlow):
    r"""Particles that follow the gradient flow with smoothed test functions.

    Each particle moves along :math:`\nabla \log p(x) - \hat s(x)`, the steepest descent of
    KL(q || p). :func:`~pyro_implicit.ops.stein_score` estimates the score of their distribution q.

    **Example:**

    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> method = GFSF(model, pyro.optim.Adam({"lr": 0.1}), num_particles=50, max_plate_nesting=0)
    >>> sorted(method.step())
    ['x']

    :param model: see :class:`SVGD`, as ``optim``, ``num_particles`` and ``max_plate_nesting``.
    :param ridge: ridge of the estimator.
    :raises ValueError: for a ridge that is not positive.

    **References:**

    1. Liu et al. (2019), *Understanding and Accelerating Particle-Based Variational Inference*.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        optim: PyroOptim,
        num_particles: int,
        max_plate_nesting: int,
        ridge: float = 1e-3,
    ) -> None:
        refuse_nonpositive(ridge=ridge)
        super().__init__(model, optim, num_particles, max_plate_nesting)
        self.ridge = ridge

    def _particle_gradient(self, loss: Tensor, particles: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, particles, retain_graph=True)
        shape = (self.num_particles, -1)
        return gradient.reshape(shape) + stein_score(particles.reshape(shape), self.ridge)


class KSD(_ParticleFlow):
    r"""Particles that descend the kernel Stein discrepancy between them and the posterior.

    The gradient of :func:`~pyro_implicit.ops.kernel_stein_discrepancy` needs second derivatives of
    the model's log-density. The log-density enters it squared, so minibatches of data bias it. The
    Fisher neural sampler with its critic network, which some papers also call KSD, is
    :class:`AmortizedKSD_ELBO`.

    **Example:**

    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> method = KSD(model, pyro.optim.Adam({"lr": 0.1}), num_particles=50, max_plate_nesting=0)
    >>> sorted(method.step())
    ['x']

    :param model: see :class:`SVGD`, as ``optim``, ``num_particles`` and ``max_plate_nesting``.

    **References:**

    1. Korba et al. (2021), *Kernel Stein Discrepancy Descent*.
    """

    def _particle_gradient(self, loss: Tensor, particles: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, particles, create_graph=True)
        shape = (self.num_particles, -1)
        discrepancy = kernel_stein_discrepancy(particles.reshape(shape), -gradient.reshape(shape))
        (gradient,) = torch.autograd.grad(discrepancy, particles, retain_graph=True)
        return gradient.reshape(shape)


class _ParticleGuide(AutoContinuous):
    """A vector of all particles for a model under the particle plate."""

    def __init__(self, model: Callable[..., Any], num_particles: int) -> None:
        self._start = FlatPriorStart(init_to_sample, spread=2.0)
        super().__init__(model, init_loc_fn=self._start)
        self.num_particles = num_particles

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.Delta:
        particles = pyro.param(PARTICLES, self._init_loc)
        if particles.shape != (self.latent_dim,):
            raise ValueError(
                f"the parameter store has {particles.numel()} numbers under '{PARTICLES}', but "
                f"{self.num_particles} particles of this model have {self.latent_dim}. Cure: call "
                "pyro.clear_param_store() before another run"
            )
        return dist.Delta(particles, event_dim=1)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self._start.like = example_tensor(self.model, args, kwargs)
        super()._setup_prototype(*args, **kwargs)

    def _init_loc(self) -> Tensor:
        parts = []
        for _, site in self.prototype_trace.iter_stochastic_nodes():
            value = biject_to(site["fn"].support).inv(site["value"].detach())
            parts.append(value.reshape(self.num_particles, -1))
        return torch.cat(parts, -1).reshape(-1)

    def _unpack_latent(self, latent: Tensor) -> Iterator[tuple[Site, Tensor]]:
        latent = latent.reshape(self.num_particles, -1)
        shapes = self._unconstrained_shapes
        sizes = [shape.numel() // self.num_particles for shape in shapes.values()]
        for name, part in zip(shapes, latent.split(sizes, -1), strict=True):
            yield self.prototype_trace.nodes[name], part.reshape(shapes[name])


def _without_padding(site: Site, value: Tensor) -> Tensor:
    """Drop singletons between the particle dimension and the value's own dimensions."""
    frames = [f for f in site["cond_indep_stack"] if f.vectorized and f.name != PARTICLE_PLATE]
    ndim = max((-frame.dim for frame in frames), default=0) + site["fn"].event_dim
    while value.dim() > 1 + ndim and value.shape[1] == 1:
        value = value.squeeze(1)
    return value
