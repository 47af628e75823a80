# SPDX-License-Identifier: Apache-2.0
"""Adversarial variational Bayes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor, nn

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import MLP
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    differs_by_particle,
    site_draws,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.ops import Covariance, logistic_ratio_loss, standardize
from pyro_implicit.runtime.messages import refuse_counts, refuse_unknown

__all__ = ["AVB_ELBO"]

Discriminator = Callable[..., Tensor]


class AVB_ELBO(NetworkELBO):
    r"""ELBO of implicit guides by a density ratio that a discriminator learns (AVB).

    A network T learns to discriminate draws of each implicit site from draws of a contrast r, by
    the logistic loss. At its optimum it is their log-ratio,

    .. math::
        \log q(\theta) = \log r(\theta) + T(\theta),

    and the gradient of the entropy passes through :math:`\theta` only, not through T. With the
    adaptive contrast, the default, r is a Gaussian with the moments of the site's draws, and T sees
    standardised draws; with the prior contrast, r is the prior in unconstrained space. If the site
    has a context (an amortised guide), T is conditioned on it: ``T(values, context)``.

    The ELBO owns the discriminators, ``networks`` by site, and their optimiser, which takes its
    steps in every training step, before the gradient of the guide. ``ELBOModule.parameters()``,
    ``state_dict()`` and Pyro's parameter store have them after the first step.

    **Example:**

    >>> import pyro
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> svi = SVI(model, AutoImplicit(model), pyro.optim.ClippedAdam({"lr": 1e-3}), AVB_ELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step that the model sees.
    :param num_entropy_particles: minimum number of draws of each implicit site for the
        discriminator; see :class:`~pyro_implicit.infer.KIVI_ELBO`.
    :param discriminator: a function ``(value_dim, context_dim) -> module`` that makes T, called
        ``T(values)`` or ``T(values, context)`` with values ``(*batch, value_dim)`` and returning
        logits ``(*batch, 1)``; by default an :class:`~pyro_implicit.MLP` of two hidden layers.
    :param discriminator_steps: steps of its optimiser per step of the guide, each on fresh draws
        that differ from those of the model and those at which T is evaluated.
    :param discriminator_optim: arguments of its :class:`torch.optim.Adam`.
    :param contrast: ``"adaptive"`` or ``"prior"``.
    :param covariance: covariance of the adaptive contrast, ``"diagonal"`` or ``"full"``.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at a step, for a prior that cannot be the
        contrast.

    The value is only as good as the discriminator, which lags behind the guide, and separates any
    two sets of samples in many dimensions: expect it to fail on networks with thousands of weights.
    In a plate, only the context tells the discriminator which element a draw belongs to.

    **References:**

    1. Mescheder, Nowozin and Geiger (2017), *Adversarial Variational Bayes*.
    2. Huszár (2017), *Variational Inference using Implicit Distributions* (prior-contrastive).
    """

    site_types = (Implicit, SemiImplicit)

    def __init__(
        self,
        num_particles: int = 8,
        num_entropy_particles: int = 100,
        discriminator: Callable[[int, int], nn.Module] | None = None,
        discriminator_steps: int = 1,
        discriminator_optim: dict[str, Any] | None = None,
        contrast: Literal["adaptive", "prior"] = "adaptive",
        covariance: Covariance = "diagonal",
        **kwargs: Any,
    ) -> None:
        optim = {"lr": 1e-3, "betas": (0.5, 0.999)} | (discriminator_optim or {})
        super().__init__(num_particles, optim, **kwargs)
        refuse_counts(2, num_entropy_particles=num_entropy_particles)
        refuse_counts(discriminator_steps=discriminator_steps)
        refuse_unknown("contrast", contrast, "adaptive", "prior")
        refuse_unknown("covariance", covariance, "diagonal", "full")
        self.num_entropy_particles = num_entropy_particles
        self.discriminator_steps = discriminator_steps
        self.contrast = contrast
        self.needs_prior = contrast == "prior"
        self.covariance: Covariance = covariance
        self._make_discriminator = discriminator or _default_discriminator

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the mean of log q over all draws of the site, the same for each particle."""
        draws, log_scale = self._points(site, prior)
        network = self._discriminator(site, draws)
        if torch.is_grad_enabled():
            self._train(site, prior, network)
        weights = {name: weight.detach() for name, weight in network.named_parameters()}
        frozen = lambda *args: torch.func.functional_call(network, weights, args)  # noqa: E731
        log_ratio = self._logits(site, frozen, draws).mean(-1)
        if self.contrast == "prior":
            return prior.score_parts(log_ratio)
        log_normal = dist.Normal(0.0, 1.0).log_prob(draws).sum(-1).mean(-1) - log_scale
        log_q = (log_normal + log_ratio).expand(site.distribution.batch_shape)
        return ScoreParts(log_q, 0, log_q)

    def _points(
        self, site: ImplicitSite, prior: SitePrior, fresh: bool = False
    ) -> tuple[Tensor, Tensor | float]:
        """Return the discriminator's inputs, ``(*sets, n, m)``, and the log of their scaling."""
        sizes = self.num_particles, self.num_entropy_particles
        if self.contrast == "prior":
            return site_draws(site, *sizes, prior.unconstrain, fresh), 0.0
        return standardize(site_draws(site, *sizes, fresh=fresh), self.covariance)

    def _contrast(self, site: ImplicitSite, prior: SitePrior, draws: Tensor) -> Tensor:
        if self.contrast == "adaptive":
            return torch.randn_like(draws)
        prior_draws = prior.sample(draws.shape[-2])
        if prior.memory.on_others:
            raise ValueError(
                f"the prior of site '{site.name}' depends on latents of other sites, which the "
                'discriminator does not see. Cure: contrast="adaptive"'
            )
        return prior_draws

    def _logits(self, site: ImplicitSite, network: Discriminator, points: Tensor) -> Tensor:
        context = site.distribution.context
        if context is None:
            logits = network(points)
        else:
            if self.num_particles > 1 and not differs_by_particle(site.distribution):
                context = context[0]
            context = context.unsqueeze(-2).expand(points.shape[:-1] + (-1,))
            logits = network(points, context)
        return logits.squeeze(-1)

    def _discriminator(self, site: ImplicitSite, points: Tensor) -> nn.Module:
        context = site.distribution.context
        sizes = points.shape[-1], 0 if context is None else context.shape[-1]
        return self.site_network(site.name, lambda: self._make_discriminator(*sizes), points)

    def _train(self, site: ImplicitSite, prior: SitePrior, network: nn.Module) -> None:
        for _ in range(self.discriminator_steps):
            with torch.no_grad():
                points, _ = self._points(site, prior, fresh=True)
                contrast = self._contrast(site, prior, points)
            loss = logistic_ratio_loss(
                self._logits(site, network, points),
                self._logits(site, network, contrast),
            )
            self.descend(site.name, network, loss.sum())


def _default_discriminator(value_dim: int, context_dim: int) -> nn.Module:
    return MLP(value_dim, 1, hidden=(64, 64), context_dim=context_dim)
