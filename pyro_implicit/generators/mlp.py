# SPDX-License-Identifier: Apache-2.0
"""The plain fully connected generator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .activations import ACTIVATIONS
from .base import Generator, check_positive

__all__ = ["MLP"]


class MLP(Generator):
    """
    A fully connected network; a context is concatenated to the noise.

    **Example:**

    >>> generator = MLP(noise_dim=3, output_dim=5)
    >>> value, jacobian = generator.value_and_jacobian(torch.randn(8, 3))
    >>> value.shape, jacobian.shape
    (torch.Size([8, 5]), torch.Size([8, 5, 3]))

    :param int noise_dim: Size of the noise vector.
    :param int output_dim: Size of the value.
    :param hidden: Widths of the hidden layers; ``()`` for an affine map.
    :param str activation: "tanh", "elu", "relu" or "silu".
    :param int context_dim: Size of the context vector; 0 for none.
    :param float output_scale: Factor on the last layer's initial weights, whose bias starts at
        zero: a small value makes a network that starts near zero.
    :raises ValueError: If a size is not positive or the activation is unknown.
    """

    def __init__(
        self,
        noise_dim: int,
        output_dim: int,
        hidden: Sequence[int] = (64, 64),
        activation: str = "elu",
        context_dim: int = 0,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__(noise_dim, output_dim, context_dim)
        for width in hidden:
            check_positive(hidden=width)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"Unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}."
            )
        self.activation = activation
        sizes = [noise_dim + context_dim, *hidden, output_dim]
        layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        with torch.no_grad():
            self.layers[-1].weight.mul_(output_scale)
            self.layers[-1].bias.zero_()

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """
        :param ~torch.Tensor noise: Noise of shape ``(*batch, noise_dim)``.
        :param ~torch.Tensor context: Context of shape ``(*batch, context_dim)``, or None.
        :returns: Values of shape ``(*batch, output_dim)``.
        :raises ValueError: If the noise or the context has the wrong size.
        """
        activation = ACTIVATIONS[self.activation].function
        first, *rest = self.layers
        x = first(self._join(noise, context))
        for layer in rest:
            x = layer(activation(x))
        return x

    def value_and_jacobian(
        self, noise: Tensor, context: Tensor | None = None, num_outputs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        The value and its exact derivative with respect to the noise, by carrying the derivative
        of every layer along with its value.

        :param ~torch.Tensor noise: Noise of shape ``(*batch, noise_dim)``.
        :param ~torch.Tensor context: Context of shape ``(*batch, context_dim)``, or None.
        :param int num_outputs: If given, only the first so many outputs are computed.
        :returns: Values of shape ``(*batch, output_dim)`` and Jacobians of shape
            ``(*batch, output_dim, noise_dim)``.
        :raises ValueError: If the noise or the context has the wrong size.
        """
        activation = ACTIVATIONS[self.activation]
        affine: list[tuple[Tensor, Tensor]] = [(layer.weight, layer.bias) for layer in self.layers]
        affine[-1] = (affine[-1][0][:num_outputs], affine[-1][1][:num_outputs])
        weight, bias = affine[0]
        x = linear(self._join(noise, context), weight, bias)
        # The derivative is carried transposed: a layer then acts on it as on noise_dim further
        # inputs, one large matrix product in place of many small ones.
        tangent = weight[:, : self.noise_dim].mT
        for weight, bias in affine[1:]:
            value = activation.function(x)
            slope = activation.derivative(x, value).unsqueeze(-2)
            tangent = (tangent * slope) @ weight.mT
            x = linear(value, weight, bias)
        return x, tangent.expand(x.shape[:-1] + tangent.shape[-2:]).mT
