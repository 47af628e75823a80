# SPDX-License-Identifier: Apache-2.0
"""Implicit guides trained along a critic network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor, nn

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import MLP
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite, moments_log_q, send_gradients
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.ops.jacobian import forward_product
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["AmortizedKSD_ELBO", "default_critic"]


class AmortizedKSD_ELBO(NetworkELBO):
    r"""Implicit guides trained along a critic network (Fisher neural sampler, "amortised KSD").

    The critic h maximises what Stein's identity makes zero for draws of the posterior,

    .. math::
        E_q\left[ \nabla \log p(x, v)^\top h(v) + \nabla \cdot h(v) - \tfrac12 \|h(v)\|^2 \right],

    whose optimum is :math:`h = \nabla \log p - \nabla \log q`, and the generator moves its draws
    along h. Hutchinson's method estimates the divergence. The points v are the values of the
    generator, before the frame of an autoguide and other transforms, so that their scale is about
    1; :math:`p` is their density. The critic sees the context, if any.

    The ELBO owns the critics and their optimiser, which takes its steps in the backward pass of
    each training step, because the gradients of log p are known only then; see
    :class:`~pyro_implicit.infer.AVB_ELBO` for their parameters.

    **The loss is optimistic**, as that of :class:`AmortizedSVGD_ELBO`. Do not compare models by it.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> elbo = AmortizedKSD_ELBO(10)
    >>> svi = SVI(model, AutoImplicit(model), pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step.
    :param critic: a function ``(value_dim, context_dim) -> module`` that makes h, called
        ``h(values)`` or ``h(values, context)`` with values ``(*batch, value_dim)`` and returning
        their shape; by default an :class:`~pyro_implicit.MLP` of two hidden layers.
    :param critic_steps: steps of its optimiser per step of the guide, on the same draws.
    :param critic_optim: arguments of its :class:`torch.optim.Adam`.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for arguments out of range.

    **References:**

    1. Hu et al. (2018), *Stein Neural Sampler*, section 3.
    2. Grathwohl et al. (2020), *Learning the Stein Discrepancy for Training and Evaluating
       Energy-Based Models without Sampling*.
    """

    site_types = (Implicit, SemiImplicit)
    least_particles = 2

    def __init__(
        self,
        num_particles: int = 10,
        critic: Callable[[int, int], nn.Module] | None = None,
        critic_steps: int = 5,
        critic_optim: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, {"lr": 1e-3} | (critic_optim or {}), **kwargs)
        refuse_counts(critic_steps=critic_steps)
        self.critic_steps = critic_steps
        self._make_critic = critic or default_critic

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draws; the critic gives their gradients."""
        draw = site.draw
        network = self._network(site)
        weights = draw.new_zeros(site.batch_shape)
        sent, self.state.step["weights", site.name] = send_gradients(
            draw, weights, lambda *gradients: self._criticise(site, network, *gradients)
        )
        return sent

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the Gaussian's log q, and zeros whose gradient is the weight of the entropy."""
        log_q = moments_log_q(site)
        weights = self.state.step.get(("weights", site.name))
        if weights is None:
            return ScoreParts(log_q, 0, log_q)
        return ScoreParts(log_q, 0, weights + site.log_abs_det)

    def _criticise(
        self, site: ImplicitSite, network: nn.Module, gradient: Tensor, weight: Tensor
    ) -> Tensor:
        def times_weight(x: Tensor, factor: Tensor) -> Tensor:
            return x * factor.reshape(weight.shape + (1,) * (x.dim() - weight.dim()))

        heard = weight != 0  # a mask may remove the entropy
        factor = torch.where(heard, 1 / torch.where(heard, weight, 1.0), 0.0)
        score = -times_weight(gradient, factor) - site.score_at_draw(torch.zeros_like(site.value))
        with torch.enable_grad():
            value = site.value.detach().requires_grad_()
            (score,) = torch.autograd.grad(site.push(value), value, score)
        points = value.detach().reshape(site.noise.shape[:-1] + (-1,))
        score = score.reshape(points.shape)
        context = site.distribution.context
        inputs = () if context is None else (context.detach(),)
        critic = lambda values: network(values, *inputs)  # noqa: E731
        for _ in range(self.critic_steps):
            with torch.enable_grad():
                objective = times_weight(_stein_objective(critic, points, score), heard)
                self.descend(site.name, network, -objective.mean())
        change = critic(points).detach().reshape(site.value.shape)
        path = -times_weight(site.gradient_at_draw(change), weight)
        return path + times_weight(gradient, ~heard)

    def _network(self, site: ImplicitSite) -> nn.Module:
        q = site.distribution
        context_dim = 0 if q.context is None else q.context.shape[-1]
        make = lambda: self._make_critic(q.event_shape.numel(), context_dim)  # noqa: E731
        return self.site_network(site.name, make, like=site.value)


def _stein_objective(critic: Callable[[Tensor], Tensor], points: Tensor, score: Tensor) -> Tensor:
    """Return the integrand of the critic's objective, ``(*batch)`` for points ``(*batch, m)``."""
    probe = torch.randint_like(points, 2) * 2 - 1
    change, difference = forward_product(critic, points, probe)
    integrand = score * change + probe * difference - 0.5 * change.square()
    return integrand.sum(-1)


def default_critic(value_dim: int, context_dim: int) -> nn.Module:
    """Return a small network from values to values."""
    return MLP(value_dim, value_dim, hidden=(64, 64), context_dim=context_dim)
