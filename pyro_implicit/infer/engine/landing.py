# SPDX-License-Identifier: Apache-2.0
"""How much of "sticking the landing" pays, from how near a guide is to its landing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_implicit.infer.engine.state import CarriedMemory

__all__ = ["Landing", "Scores"]

DECAY = 0.95


@dataclass
class Landing(CarriedMemory):
    r"""The share c of the score function that an entropy's gradient leaves out.

    With the scores :math:`u = \nabla_\theta \log q` of the guide and :math:`s = \nabla_\theta \log
    p` of the model, the gradient at a draw is :math:`c\, u - s`: plain with c = 0, along the path
    alone with c = 1. As E[u] = 0, any c has the same expectation, if it does not know the draws.
    In the units of each coordinate's :math:`E[s^2]`, which are those of Adam, the variance is least
    for

    .. math:: c = \frac{\sum_i E[s_i u_i] / E[s_i^2]}{\sum_i E[u_i^2] / E[s_i^2]},

    which is 1 where q is the posterior and near 0 where it is much narrower. The expectations are
    moving averages over steps.

    ``both``, ``guide`` and ``model`` are those of :math:`s u`, :math:`u^2` and :math:`s^2`, by
    coordinate.
    """

    both: Tensor
    guide: Tensor
    model: Tensor

    @classmethod
    def start(cls, like: Tensor) -> Landing:
        """Of a guide that has not taken a step: c is 0.

        :param like: of a coordinate's dtype and device, and of the shape of one draw.
        """
        return cls(*(torch.zeros_like(like) for _ in range(3)))

    def share(self) -> Tensor:
        """c, between 0 and 1, without dimensions."""
        units = self.model.clamp(min=torch.finfo(self.model.dtype).tiny)
        known = (self.guide / units).sum()
        share = (self.both / units).sum() / known
        return torch.where(known.isfinite() & (known > 0), share.clamp(0, 1), 0.0)

    @torch.no_grad()
    def note(self, guide: Tensor, model: Tensor) -> None:
        """Take the scores of a step, ``(num_draws, *shape)`` each; 0 where they are no numbers."""
        finite = guide.isfinite() & model.isfinite()
        guide, model = torch.where(finite, guide, 0.0), torch.where(finite, model, 0.0)
        self.both = DECAY * self.both + (model * guide).mean(0)
        self.guide = DECAY * self.guide + guide.square().mean(0)
        self.model = DECAY * self.model + model.square().mean(0)


class Scores:
    """Those of a step's draws: the guide's first, then the model's.

    They do not know the draws, whose hooks know them and would keep them for ever.

    :param landing: takes them.
    :param num_particles: of which the step's loss is the mean.
    """

    def __init__(self, landing: Landing, num_particles: int) -> None:
        self._landing, self._num_particles = landing, num_particles
        #: Of the guide, ``(*batch, *shape)``; None until it is known.
        self.guide: Tensor | None = None

    def see(self, gradient: Tensor) -> Tensor:
        """The gradient of the loss at the draws that the model has; the same comes out."""
        if self.guide is not None:
            shape = (-1, *self._landing.guide.shape)
            model = -self._num_particles * gradient.to(self.guide)
            self._landing.note(self.guide.reshape(shape), model.reshape(shape))
        return gradient
