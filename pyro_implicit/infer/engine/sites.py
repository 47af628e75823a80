# SPDX-License-Identifier: Apache-2.0
"""The implicit sites of a guide's run, as they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_implicit.distributions import Draw, Implicit, draw_through, find_implicit
from pyro_implicit.generators import Linearisation

__all__ = ["PARTICLE_PLATE", "DrawMessenger", "ImplicitSite"]

PARTICLE_PLATE = "num_particles_vectorized"  # Pyro's name


@dataclass(frozen=True)
class ImplicitSite:
    """All particles of one implicit sample site of the guide.

    ``distribution`` is the implicit distribution itself, of batch shape
    ``(num_particles, *plates)`` (without the first dimension for a single particle), ``noise``
    ``(*batch_shape, noise_dim)`` and ``value`` ``(*batch_shape, *event_shape)`` its draw, with the
    ``linearisation`` of the generator there, if the ELBO asked for it. ``transforms``, of
    log-determinant ``log_abs_det``, turn ``value`` into ``draw``, the value of the site, of
    ``batch_shape``, in ``plates`` of the given names. ``latents`` are the model's sites that it
    stands for.
    """

    name: str
    distribution: Implicit
    noise: Tensor
    value: Tensor
    draw: Tensor
    transforms: tuple[torch.distributions.Transform, ...] = ()
    log_abs_det: Tensor | float = 0.0
    linearisation: Linearisation | None = None
    batch_shape: torch.Size = torch.Size()
    plates: frozenset[str] = frozenset()
    latents: tuple[str, ...] = ()

    def push(self, value: Tensor) -> Tensor:
        """Turn further values of ``distribution`` into values of the site."""
        for transform in self.transforms:
            value = transform(value)
        return value

    def score_at_draw(self, score: Tensor) -> Tensor:
        r"""The score of the site's density at ``draw``, from that of ``distribution``.

        With :math:`x = T(v)` it is :math:`T'^{-\top} (\nabla_v \log q(v) - \nabla_v \log |T'|)`.

        :param score: :math:`\nabla_v \log q(v)` at ``value``, of its shape.
        :returns: of the shape of ``draw``, a constant.
        """
        score = score.detach()
        if not self.transforms:
            return score
        batch_ndim = len(self.batch_shape)
        with torch.enable_grad():
            draw = self.draw.detach().requires_grad_()
            value, log_q = draw, 0.0
            for transform in reversed(self.transforms):
                base = transform.inv(value)
                term = transform.log_abs_det_jacobian(base, value)
                log_q = log_q - sum_rightmost(term, term.dim() - batch_ndim)
                value = base
            linear = sum_rightmost(score * value, value.dim() - batch_ndim)
            return torch.autograd.grad((linear + log_q).sum(), draw)[0]

    def gradient_at_draw(self, gradient: Tensor) -> Tensor:
        r"""The gradient at ``draw`` that reaches ``value`` as the given one.

        With :math:`x = T(v)` it is :math:`T'^{-\top} g`.

        :param gradient: g, of the shape of ``value``.
        :returns: of the shape of ``draw``, a constant.
        """
        gradient = gradient.detach()
        if not self.transforms:
            return gradient
        with torch.enable_grad():
            draw = self.draw.detach().requires_grad_()
            value = draw
            for transform in reversed(self.transforms):
                value = transform.inv(value)
            return torch.autograd.grad(value, draw, gradient)[0]


class DrawMessenger(Messenger):
    """Draws all implicit sites of a guide, and lets the model see another value.

    :param draw: draws from an implicit distribution.
    :param transport: called with each site; its result, if any, takes the place of the draw for
        the rest of the guide and for the model.
    """

    def __init__(
        self,
        draw: Callable[[Implicit], Draw],
        transport: Callable[[ImplicitSite], Tensor | None],
    ) -> None:
        super().__init__()
        self.draw, self.transport = draw, transport
        self.sites: dict[str, ImplicitSite] = {}

    def _pyro_sample(self, msg: Any) -> None:
        # The outermost handler: plates have expanded the distribution already.
        if find_implicit(msg["fn"]) is None:
            return
        name = msg["name"]
        if msg["value"] is not None:
            raise ValueError(
                f"the value of implicit site '{name}' of the guide was given, so that nobody knows "
                "the noise behind it. Cure: let the guide draw it, without replaying or "
                "conditioning"
            )
        through = draw_through(msg["fn"], self.draw)
        site = ImplicitSite(
            name,
            through.distribution,
            through.draw.noise,
            through.draw.value,
            through.value,
            through.transforms,
            through.log_abs_det,
            through.draw.linearisation,
            msg["fn"].batch_shape,
            frozenset(frame.name for frame in msg["cond_indep_stack"]) - {PARTICLE_PLATE},
            tuple(msg["infer"].get("latents", (name,))),
        )
        self.sites[name] = site
        transported = self.transport(site)
        msg["value"] = through.value if transported is None else transported
        msg["done"] = True
