# SPDX-License-Identifier: Apache-2.0
"""Semi-implicit variational inference by importance sampling of the noise behind a draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor, nn

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.generators import MLP
from pyro_implicit.generators.base import bounded
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    check_generator,
    check_standard_normal,
    flatten_site,
    path_of_score,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.ops.log_space import log_mean_exp
from pyro_implicit.ops.semi_implicit import conditional_log_density
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["AISIVI_ELBO", "ReverseConditional", "log_normal", "with_context"]


class ReverseConditional(nn.Module):
    r"""A density :math:`\tau(z \mid \theta)` of noise given a value: a Gaussian, or a flow.

    Standard normal noise passes through affine couplings, each of which changes half of it, and
    through an affine map of all of it; networks compute shifts and scales from the value, the
    context, and the other half.

    **Example:**

    >>> network = ReverseConditional(2, 3)
    >>> noise, log_density = network.sample(5, torch.zeros(4, 3))
    >>> noise.shape, torch.allclose(network.log_prob(noise, torch.zeros(4, 3)), log_density)
    (torch.Size([5, 4, 2]), True)

    :param noise_dim: size of the noise.
    :param value_dim: size of the value, with its context.
    :param num_couplings: 0 for a Gaussian.
    :param hidden: widths of the hidden layers of each network.
    """

    masks: Tensor

    def __init__(
        self,
        noise_dim: int,
        value_dim: int,
        num_couplings: int = 4,
        hidden: tuple[int, ...] = (64, 64),
    ) -> None:
        super().__init__()
        masks = [torch.arange(noise_dim) % 2 == i % 2 for i in range(num_couplings)]
        masks.append(torch.zeros(noise_dim, dtype=torch.bool))
        self.register_buffer("masks", torch.stack(masks))  # of the noise that a layer keeps
        self.networks = nn.ModuleList(
            MLP(noise_dim + value_dim, 2 * noise_dim, hidden, output_scale=0.1) for _ in masks
        )

    def log_prob(self, noise: Tensor, value: Tensor) -> Tensor:
        """Return the log-density of noise ``(*any, *batch, d)`` given values ``(*batch, m)``."""
        total = noise.new_zeros(())
        for layer in reversed(range(len(self.networks))):
            shift, log_scale = self._affine(layer, noise, value)
            noise = (noise - shift) * (-log_scale).exp()
            total = total - log_scale.sum(-1)
        return total + log_normal(noise)

    def sample(self, num_samples: int, value: Tensor) -> tuple[Tensor, Tensor]:
        """Draw ``(num_samples, *batch, d)`` given values ``(*batch, m)``, with log-densities."""
        size = self.masks.shape[-1]
        shape = (num_samples, *value.shape[:-1], size)
        noise = torch.randn(shape, dtype=value.dtype, device=value.device)
        log_density = log_normal(noise)
        for layer in range(len(self.networks)):
            shift, log_scale = self._affine(layer, noise, value)
            noise = shift + noise * log_scale.exp()
            log_density = log_density - log_scale.sum(-1)
        return noise, log_density

    def _affine(self, layer: int, noise: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.masks[layer]
        value = value.expand(noise.shape[:-1] + value.shape[-1:])
        inputs = torch.cat([torch.where(kept, noise, 0.0), value], -1)
        shift, log_scale = self.networks[layer](inputs).chunk(2, -1)
        # Bounded scales keep the density finite far from the training draws.
        log_scale = bounded(log_scale, ELBOS.max_log_scale)
        return torch.where(kept, 0.0, shift), torch.where(kept, 0.0, log_scale)


class AISIVI_ELBO(NetworkELBO):
    r"""ELBO of semi-implicit guides by importance sampling of the noise behind a draw (AISIVI).

    As in :class:`UIVI_ELBO`, the score of a draw is the mean of its conditional scores over
    :math:`q(z \mid \theta)`, but the noise comes from a learnt density
    :math:`\tau(z \mid \theta)` in place of chains,

    .. math::
        \nabla_\theta \log q(\theta) \approx
        \sum_{s=0}^S \frac{w_s}{\sum_r w_r} \nabla_\theta \log q(\theta \mid z_s), \qquad
        w_s = \frac{q(\theta \mid z_s)\, p(z_s)}{\tau(z_s \mid \theta)},

    with the draw's own noise :math:`z_0`, and :math:`z_s \sim \tau`. As :math:`z_0` is an exact
    draw of :math:`q(z \mid \theta)`, this is a transition of iterated sampling importance
    resampling, which leaves :math:`q(z \mid \theta)` invariant: for given :math:`\theta` the mean
    is exact for every :math:`\tau`. (The paper leaves :math:`z_0` out. While :math:`\tau` is
    untrained, a draw's score is then its distance to unrelated centres, and drives draws apart.)

    The score multiplies the path of the draw, which depends on :math:`z_0`, too. Therefore the sum
    is over half of the noises, and a transition by the other half replaces :math:`z_0` before. If
    :math:`\tau` misses :math:`q(z \mid \theta)`, as for narrow conditionals in many dimensions,
    :math:`z_0` remains, and the gradient is that of the conditional's entropy: check
    ``effective_sizes``, from 1 to S + 1. The density :math:`\tau` minimises
    :math:`-E_q[\log \tau(z \mid \theta)]`, the forward KL divergence, on the draws of each step
    before the score is computed.

    The value is :math:`\log \frac{1}{S + 1} \sum_s w_s`, so that the loss bounds the negative ELBO
    from above. A step costs ``num_samples`` passes of the generator for each draw, and a step of
    the flow.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide, elbo = AutoSemiImplicit(model, noise_scale=0.3), AISIVI_ELBO(8)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    >>> isinstance(svi.step(), float)
    True
    >>> list(elbo.effective_sizes)
    ['_AutoSemiImplicit_latent']

    :param num_particles: draws of the guide per step.
    :param num_samples: S, draws of :math:`\tau` for each of them.
    :param proposal: a function ``(noise_dim, value_dim) -> module`` that makes :math:`\tau`, with
        the methods of :class:`~pyro_implicit.infer.ReverseConditional`, the default; the
        value includes the context, if any. ``functools.partial(ReverseConditional,
        num_couplings=0)`` is a Gaussian.
    :param proposal_steps: steps of its optimiser per step of the guide, each on fresh draws except
        the first.
    :param proposal_optim: arguments of its :class:`torch.optim.Adam`.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, as :class:`UIVI_ELBO`.

    **References:**

    1. Pielok, Bischl and Rügamer (2025), *Revisiting Unbiased Implicit Variational Inference*.
    2. Andrieu, Lee and Vihola (2018), *Uniform Ergodicity of the Iterated Conditional SMC and
       Geometric Ergodicity of Particle Gibbs Samplers* (the step).
    """

    site_types = (SemiImplicit,)

    def __init__(
        self,
        num_particles: int = 16,
        num_samples: int = 100,
        proposal: Callable[[int, int], nn.Module] = ReverseConditional,
        proposal_steps: int = 1,
        proposal_optim: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, {"lr": 1e-3} | (proposal_optim or {}), **kwargs)
        refuse_counts(num_samples=num_samples, proposal_steps=proposal_steps)
        self.num_samples = num_samples
        self.proposal_steps = proposal_steps
        self._make_proposal = proposal

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse noise that is not standard normal, and rows that depend on each other."""
        check_standard_normal(site, "AISIVI")
        check_generator(site)

    @property
    def effective_sizes(self) -> dict[str, float]:
        """By site, the mean effective sample size of the last step's importance weights."""
        return {name: float(size) for name, size in self.remembered("effective").items()}

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the weighted mixture as value, with the gradient of the path."""
        flat = flatten_site(site, self.num_particles)
        scale = flat.scale.detach()
        given = with_context(site, flat.value)
        sizes = flat.noise.shape[-1], given.shape[-1]
        network: Any = self.site_network(site.name, lambda: self._make_proposal(*sizes), given)
        if torch.is_grad_enabled():
            self._train(site, network, flat.noise.detach(), given)
        with torch.no_grad():
            noise, log_density = network.sample(self.num_samples, given)
            own = flat.noise.unsqueeze(0)
            noise = torch.cat([own, noise])
            log_density = torch.cat([network.log_prob(own, given), log_density])
            centers = flat.generate(noise)
            terms = conditional_log_density(flat.value, centers, scale)
            terms = terms + log_normal(noise) - log_density
            effective = 1 / terms.softmax(0).square().sum(0)
            self.state.memory["effective", site.name] = effective.mean()
            log_q = log_mean_exp(terms)
            weights = _second_transition(terms).softmax(0)
            score = (weights.unsqueeze(-1) * (centers - flat.value)).sum(0) / scale.square()
        return path_of_score(log_q, flat, score)

    def _train(self, site: ImplicitSite, network: Any, noise: Tensor, given: Tensor) -> None:
        for step in range(self.proposal_steps):
            if step:
                with torch.no_grad():
                    noise, value, _ = site.distribution.draw()
                    given = with_context(site, value.reshape(noise.shape[:-1] + (-1,)))
            self.descend(site.name, network, -network.log_prob(noise, given).mean())


def _second_transition(terms: Tensor) -> Tensor:
    """Take a transition to the first half of the noises; return the log weights of the next one.

    :param terms: log weights ``(1 + num_samples, *batch)``, that of the present state first.
    :returns: of the same shape, -inf for noises that take no part.
    """
    first = terms[: (len(terms) + 1) // 2]
    chosen = (first - torch.empty_like(first).exponential_().log()).argmax(0)  # Gumbel's maximum
    index = torch.arange(len(terms), device=terms.device).reshape(-1, *[1] * chosen.dim())
    return terms.masked_fill((index < len(first)) & (index != chosen), -math.inf)


def with_context(site: ImplicitSite, value: Tensor) -> Tensor:
    """Return flat values of a site with its context, constants."""
    context = site.distribution.context
    value = value.detach()
    if context is None:
        return value
    return torch.cat([value, context.detach().expand(value.shape[:-1] + (-1,))], -1)


def log_normal(noise: Tensor) -> Tensor:
    """Return the standard normal log-density of vectors."""
    return -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1)
