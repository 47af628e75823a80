# SPDX-License-Identifier: Apache-2.0
"""What a step of an ELBO gives: a loss with gradients that are known already."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.compiled import rounding

__all__ = ["Evaluation"]


class Evaluation(NamedTuple):
    """A loss, constant, with the gradients of its surrogate for some tensors."""

    loss: Tensor
    targets: list[Tensor]
    gradients: list[Tensor]

    def backward(self) -> float:
        """Add the gradients to the targets' own; the loss as a number."""
        if self.targets:
            torch.autograd.backward(self.targets, self.gradients)
        return self.loss.item()

    def differentiable(self) -> Tensor:
        """The loss as a function of the targets."""
        return _Known.apply(self.loss, self.gradients, *self.targets)

    def differs_from(self, other: Evaluation) -> str | None:
        """In what it differs by more than rounding errors, in words.

        :param other: may have further targets, which were made in the step (noise, say).
        """
        tolerance = rounding(self.loss.dtype)
        loss, other_loss = self.loss.item(), other.loss.item()
        if not abs(loss - other_loss) <= tolerance * (1 + abs(other_loss)):
            return f"the loss is {loss:.6g} and {other_loss:.6g}"
        known = {id(t): g for t, g in zip(other.targets, other.gradients, strict=True)}
        if not known.keys() >= {id(target) for target in self.targets}:
            return "other parameters have a gradient"
        norm = torch.nn.utils.get_total_norm(other.gradients)
        for target, gradient in zip(self.targets, self.gradients, strict=True):
            expected = known[id(target)]
            scale = expected.norm() + 0.01 * norm
            if not (gradient - expected).norm() <= tolerance * scale:
                return f"a gradient of shape {tuple(gradient.shape)} differs"
        return None


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *targets: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *torch._foreach_mul(ctx.gradients, factor))
