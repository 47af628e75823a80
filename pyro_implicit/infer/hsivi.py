# SPDX-License-Identifier: Apache-2.0
"""Hierarchical semi-implicit variational inference by score matching (HSIVI, SIVI-SM)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions.transforms import AffineTransform, LowerCholeskyAffine
from torch import Tensor, nn

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.amortized_ksd import default_critic
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_standard_normal,
)
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.infer.ksivi import ScoreMatchingELBO
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["HSIVI_ELBO", "LayeredGenerator"]


class LayeredGenerator(nn.Module):
    r"""A chain of generators with Gaussian noise between them, for :class:`HSIVI_ELBO`.

    With T layers, :math:`\theta_{T-1} = g_{T-1}(z) + s_{T-1} \odot \eta_{T-1}` and
    :math:`\theta_t = g_t(\theta_{t+1}) + s_t \odot \eta_t`; the value is
    :math:`g_0(\theta_1)`, around which the guide has its own noise. The noise of the generator is
    :math:`(z, \eta_{T-1}, \dots, \eta_1)`.

    **Example:**

    >>> from pyro_implicit.generators import MLP
    >>> generator = LayeredGenerator([MLP(3, 2), MLP(2, 2), MLP(2, 2)])
    >>> generator.noise_dim, generator(torch.randn(5, 7)).shape
    (7, torch.Size([5, 2]))

    :param layers: generators, each with ``noise_dim`` and ``output_dim``; all but the first turn
        values into values.
    :param noise_scale: the initial s of all layers but the last; learnable.
    :raises ValueError: if the sizes of the layers do not fit.
    """

    def __init__(self, layers: Sequence[Any], noise_scale: float = 0.5) -> None:
        super().__init__()
        size = layers[-1].output_dim
        pairs = itertools.pairwise(layers)
        if any((a.output_dim, b.noise_dim) != (size, size) for a, b in pairs):
            raise ValueError(f"all layers but the first must turn {size} numbers into {size}")
        self.layers = nn.ModuleList(layers)
        scales = torch.full((len(layers) - 1, size), noise_scale)
        self.log_scales = nn.Parameter(scales.log())
        self.noise_dim = layers[0].noise_dim + (len(layers) - 1) * size
        self.output_dim = size

    def forward(self, noise: Tensor) -> Tensor:
        """Return the last layer's location."""
        return self.run(noise)[0][-1]

    def run(self, noise: Tensor, detach: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return the locations of all layers, and the values between them.

        :param noise: ``(*batch, noise_dim)``.
        :param detach: whether each layer gets no gradient through the next ones.
        """
        first, count = self.layers[0].noise_dim, len(self.layers) - 1
        value, *etas = noise.split([first] + [self.output_dim] * count, -1)
        locations, values = [], []
        for layer, network in enumerate(self.layers):
            locations.append(network(value))
            if layer < count:
                value = locations[-1] + self.log_scales[layer].exp() * etas[layer]
                values.append(value)
                value = value.detach() if detach else value
        return locations, values


class HSIVI_ELBO(ScoreMatchingELBO, NetworkELBO):  # type: ignore[misc]  # as NetworkELBO
    r"""Semi-implicit guides of one or more layers, trained by matching scores (HSIVI, SIVI-SM).

    Each layer minimises the Fisher divergence between its distribution and an auxiliary target
    :math:`p_t`,

    .. math::
        \min_{q_t} \max_f\, E\left[ 2 f(\theta_t)^\top \left( \nabla \log p_t(\theta_t)
        - \nabla \log q(\theta_t \mid \theta_{t+1}) \right) - \|f(\theta_t)\|^2 \right],
        \qquad p_t \propto p^{\beta_t} N(0, I)^{1 - \beta_t},

    with :math:`\beta_t` from 1 / T at the first layer to 1 at the last; this schedule and base are
    choices of this library. The critic is
    :math:`f = \nabla \log p_t - h`, where a network h regresses the conditional scores; its
    optimum is the score of :math:`q_t`. The targets interpolate in the units of the generator,
    before the frame of an autoguide. A guide whose generator is a :class:`LayeredGenerator` has T
    layers; any other generator is one layer (SIVI-SM). The particles are divided among the layers,
    and no gradient passes from one layer to another.

    A step needs second derivatives of the model. The Fisher divergence does not see the weights of
    separated modes: raise ``inverse_temperature`` as for :class:`KSIVI_ELBO`. The objective falls
    with the square of h's error, so that a guide that learns faster than h moves to where h is
    wrong, without end: give the guide a learning rate that is not above that of ``critic_optim``.

    The value is the surrogate bound of :class:`SIVI_ELBO`. With several layers, it holds without
    gradients only (``SVI.evaluate_loss``): in a training step the model, and its parameters, see
    draws of all layers.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import MLP, AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    >>> generator = LayeredGenerator([MLP(2, 2), MLP(2, 2)])
    >>> guide = AutoSemiImplicit(model, generator, noise_scale="learn")
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), HSIVI_ELBO(16))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step, at least one for each layer.
    :param critic: a function ``(value_dim, context_dim) -> module`` that makes h, called as that of
        :class:`AmortizedKSD_ELBO`. With several layers, the context ends with the layer's index,
        one-hot.
    :param critic_steps: steps of its optimiser per step of the guide, on the same draws.
    :param critic_optim: arguments of its :class:`torch.optim.Adam`; the default rate is 0.003.
    :param num_mixing: fresh noises of the reported value.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, with several layers for too
        few particles, noise that is not standard normal, or a change of variables that is not
        affine.

    **References:**

    1. Yu et al. (2023), *Hierarchical Semi-Implicit Variational Inference with Application to
       Diffusion Model Acceleration*.
    2. Yu and Zhang (2023), *Semi-Implicit Variational Inference via Score Matching*.
    """

    site_types = (SemiImplicit,)

    def __init__(
        self,
        num_particles: int = 64,
        critic: Callable[[int, int], nn.Module] | None = None,
        critic_steps: int = 1,
        critic_optim: dict[str, Any] | None = None,
        num_mixing: int = 50,
        **kwargs: Any,
    ) -> None:
        optim = {"lr": 3e-3} | (critic_optim or {})
        NetworkELBO.__init__(self, num_particles, optim, **kwargs)
        refuse_counts(critic_steps=critic_steps, num_mixing=num_mixing)
        self.num_mixing = num_mixing
        self.critic_steps = critic_steps
        self._make_critic = critic or default_critic

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse several layers where their targets or their particles are unknown."""
        generator: Any = site.distribution.generator
        if not isinstance(generator, LayeredGenerator):
            return
        check_standard_normal(site, "HSIVI")
        if self.num_particles < len(generator.layers):
            raise ValueError(
                f"site '{site.name}' has {len(generator.layers)} layers, but HSIVI_ELBO has "
                f"{self.num_particles} particles. Cure: num_particles of at least one per layer"
            )
        if not all(isinstance(t, AffineTransform | LowerCholeskyAffine) for t in site.transforms):
            raise ValueError(
                f"HSIVI trains layers before affine maps only, but site '{site.name}' has the "
                "transforms "
                f"{[type(t).__name__ for t in site.transforms]}. Cure: AutoSemiImplicit, whose "
                "values are unconstrained"
            )

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return draws of all layers in place of the last layer's."""
        generator: Any = site.distribution.generator
        if not isinstance(generator, LayeredGenerator):
            return None
        locations, values = generator.run(site.noise, detach=True)
        scale = site.distribution.scale.expand(site.value.shape)
        eta = (site.value - generator(site.noise)).detach() / scale.detach()
        layers = [*values, locations[-1] + scale * eta]
        errors = [value - location for value, location in zip(values, locations, strict=False)]
        conditionals = [
            error.detach() / s.detach().exp() / s.exp()
            for error, s in zip(errors, generator.log_scales, strict=True)
        ]
        conditionals.append(eta / scale)
        chosen = self._layers(site, len(layers))
        value = (chosen * torch.stack(layers, -1)).sum(-1)
        conditional = (chosen * torch.stack(conditionals, -1)).sum(-1)
        self.state.step["layers", site.name] = value, conditional
        return site.push(value)

    def matched(self, site: ImplicitSite, flat: FlatSite) -> tuple[Tensor, Tensor]:
        """Return the values of the layers that the model sees, with their conditional scores."""
        known = self.state.step.get(("layers", site.name))
        return super().matched(site, flat) if known is None else known

    def divergence(
        self, site: ImplicitSite, points: Tensor, scores: Tensor, conditional: Tensor
    ) -> Tensor:
        """Train h, and return the shares of the Fisher divergence."""
        context = site.distribution.context
        inputs = [] if context is None else [context.detach()]
        generator = site.distribution.generator
        if isinstance(generator, LayeredGenerator):
            count = len(generator.layers)
            chosen = self._layers(site, count)
            beta = (chosen * torch.arange(1, count + 1).to(points) / count).sum(-1)
            scores = beta * scores - (1 - beta) * points
            layer = chosen.expand(points.shape[:-1] + (1, count)).squeeze(-2)
            inputs.append(layer)
        extra = [torch.cat(inputs, -1)] if inputs else []
        sizes = points.shape[-1], extra[0].shape[-1] if extra else 0
        network = self.site_network(site.name, lambda: self._make_critic(*sizes), points)
        start, target = points.detach(), conditional.detach()
        for _ in range(self.critic_steps):
            loss = (network(start, *extra) + target).square().sum(-1).mean()
            self.descend(site.name, network, loss)
        critic = scores - network(points, *extra)
        difference = scores + conditional
        return (2 * critic * difference - critic.square()).sum(-1) / self.num_particles

    def _layers(self, site: ImplicitSite, count: int) -> Tensor:
        index = torch.arange(self.num_particles, device=site.value.device) % count
        # A single particle has no dimension of its own.
        shape = (-1,) + (1,) * (site.value.dim() - 1) if self.num_particles > 1 else (1,)
        return torch.nn.functional.one_hot(index, count).to(site.value).reshape(*shape, count)
