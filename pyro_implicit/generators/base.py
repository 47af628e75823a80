# SPDX-License-Identifier: Apache-2.0
"""What all generators of the library share: their sizes, and the check of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .linearisation import Differentiable, Linearisation

__all__ = ["Generator"]


class Generator(Differentiable, nn.Module):
    """A network that turns noise, and perhaps a context, into a value.

    Guides accept any :class:`torch.nn.Module` called as ``generator(noise, context)``; this base
    class stores the sizes and explains inputs of the wrong size. A subclass that knows its
    Jacobian overrides :meth:`linearise`, and one that is injective says so in ``injective``.

    **Example:**

    >>> class Scaled(Generator):
    ...     injective = True
    ...     def forward(self, noise, context=None):
    ...         return 2 * noise
    >>> Scaled(3, 3).linearise(torch.zeros(5, 3)).jacobian().shape
    torch.Size([5, 3, 3])

    :param noise_dim: size of the noise vector.
    :param output_dim: size of the value.
    :param context_dim: size of the context vector; 0 for none.
    :raises ValueError: if a size is not positive (a context of size 0 means no context).
    """

    def __init__(self, noise_dim: int, output_dim: int, context_dim: int = 0) -> None:
        super().__init__()
        check_positive(noise_dim=noise_dim, output_dim=output_dim)
        if context_dim < 0:
            raise ValueError(f"context_dim is {context_dim}; give a size, or 0 for no context.")
        self.noise_dim = noise_dim
        self.output_dim = output_dim
        self.context_dim = context_dim

    @property
    def core_dim(self) -> int:
        """Number of noise coordinates that the Jacobian depends on, from the first on."""
        return self.noise_dim

    if TYPE_CHECKING:
        __call__ = nn.Module.__call__

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative by forward mode.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        self._check_inputs(noise, context)
        return super().linearise(noise, context)

    def extra_repr(self) -> str:
        sizes = f"noise_dim={self.noise_dim}, output_dim={self.output_dim}"
        return sizes + (f", context_dim={self.context_dim}" if self.context_dim else "")

    def _check_inputs(self, noise: Tensor, context: Tensor | None) -> None:
        name = type(self).__name__
        if noise.dim() == 0 or noise.shape[-1] != self.noise_dim:
            raise ValueError(
                f"{name} expects noise of shape (*batch, {self.noise_dim}), "
                f"got {tuple(noise.shape)}; draw noise of the generator's noise_dim."
            )
        if self.context_dim == 0:
            if context is not None:
                raise ValueError(
                    f"{name} was built without a context but got one of shape "
                    f"{tuple(context.shape)}; build it with context_dim={context.shape[-1]}."
                )
        elif context is None:
            raise ValueError(
                f"{name} was built with context_dim={self.context_dim} but got no context; "
                "pass context=..., or build the generator with context_dim=0."
            )
        elif context.dim() == 0 or context.shape[-1] != self.context_dim:
            raise ValueError(
                f"{name} expects a context of shape (*batch, {self.context_dim}), "
                f"got {tuple(context.shape)}; build the generator with a context_dim that matches."
            )

    def _join(self, noise: Tensor, context: Tensor | None) -> Tensor:
        """Checks both inputs and joins them, their batch shapes broadcast, into one vector."""
        self._check_inputs(noise, context)
        if context is None:
            return noise
        batch = torch.broadcast_shapes(noise.shape[:-1], context.shape[:-1])
        return torch.cat([noise.expand(batch + (-1,)), context.expand(batch + (-1,))], dim=-1)


def check_positive(**sizes: int) -> None:
    """Raises :class:`ValueError` for the first of the named sizes that is below one."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be a positive integer.")


def check_layers(hidden: Sequence[int], activation: str) -> None:
    """Raises :class:`ValueError` for a width below one, and for an activation without a name."""
    for width in hidden:
        check_positive(hidden=width)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"Unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}."
        )
