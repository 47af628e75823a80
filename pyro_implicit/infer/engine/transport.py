# SPDX-License-Identifier: Apache-2.0
"""Values whose gradient goes elsewhere, for methods that share it between particles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_implicit.infer.engine.sites import ImplicitSite

__all__ = [
    "LaterWeights",
    "particles_first",
    "particles_inside",
    "path_term",
    "second_batch",
    "send_gradient",
    "send_gradients",
]


class LaterWeights:
    """Weights of the particles, known after the draws whose gradients they are for.

    It does not know these draws: their hooks know it, and would keep them for ever.

    **Example:**

    >>> import torch
    >>> later, draw = LaterWeights(), torch.zeros(2, 3, requires_grad=True)
    >>> sent = send_gradient(draw, draw, later.weigh)
    >>> later.weights = torch.tensor([1.0, 2.0])
    >>> sent.sum().backward()
    >>> draw.grad[:, 0]
    tensor([1., 2.])

    :ivar weights: ``(num_particles, *plates)``; None for gradients as they are.
    """

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def weigh(self, gradient: Tensor) -> Tensor:
        """A draw's gradient ``(num_particles, *plates, ...)``, weighted."""
        if self.weights is None:
            return gradient
        weights = self.weights.to(gradient)  # data may be of another dtype
        return gradient * weights.reshape(weights.shape + (1,) * (gradient.dim() - weights.dim()))


def send_gradient(value: Tensor, to: Tensor, through: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with the given value, whose gradient goes to another one.

    **Example:**

    >>> import torch
    >>> draw = torch.zeros(3, requires_grad=True)
    >>> send_gradient(torch.ones(3), draw, lambda gradient: 2 * gradient).sum().backward()
    >>> draw.grad
    tensor([2., 2., 2.])

    :param value: what the tensor shows.
    :param to: of the same shape, with gradient.
    :param through: turns the gradient at the value into that which ``to`` gets.
    """
    sent = value.detach() + (to - to.detach())
    sent.register_hook(lambda gradient: through(gradient.detach()))
    return sent


def send_gradients(
    draw: Tensor, other: Tensor, through: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Copies of two tensors, whose gradients go to the first together.

    :param draw: with gradient.
    :param other: any tensor.
    :param through: turns the gradients at both copies into that which ``draw`` gets.
    """
    return _Together.apply(draw, other, through)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draw: Tensor, other: Tensor, through: Callable) -> tuple[Tensor, Tensor]:
        ctx.through = through
        return draw.clone(), other.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.through(*gradients), None, None


def path_term(site: ImplicitSite, score: Tensor, draw: Tensor) -> Tensor:
    """A term whose gradient is that of log q along the path of the draw alone.

    :param score: of the site's density at ``site.draw``, of its shape.
    :param draw: ``site.draw``, or a copy whose gradient goes elsewhere.
    :returns: ``site.batch_shape``, for score parts of the distribution without its transforms.
    """
    path = score * draw
    # The log-determinant of the site's transforms is in the score at the draw already.
    return sum_rightmost(path, path.dim() - len(site.batch_shape)) + site.log_abs_det


def second_batch(site: ImplicitSite) -> tuple[ImplicitSite, Tensor]:
    """As many independent draws of a site, and their ``draw``."""
    noise, value, linearisation = site.distribution.draw()
    draw = site.push(value)
    second = replace(site, noise=noise, value=value, draw=draw, linearisation=linearisation)
    return second, draw


def particles_inside(points: Tensor) -> Tensor:
    """``(num_particles, *plates, m)`` as sets of points ``(*plates, num_particles, m)``."""
    return points.movedim(0, -2)


def particles_first(points: Tensor) -> Tensor:
    """``(*plates, num_particles, m)`` as ``(num_particles, *plates, m)``."""
    return points.movedim(-2, 0)
