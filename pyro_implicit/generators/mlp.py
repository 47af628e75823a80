# SPDX-License-Identifier: Apache-2.0
"""The plain fully connected generator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .activations import ACTIVATIONS
from .base import Generator, check_layers
from .linearisation import Linearisation

__all__ = ["MLP", "MLPLinearisation"]


class MLP(Generator):
    """A fully connected network; a context is concatenated to the noise.

    **Example:**

    >>> generator = MLP(noise_dim=3, output_dim=5)
    >>> draw = generator.linearise(torch.randn(8, 3))
    >>> draw.value.shape, draw.jacobian().shape
    (torch.Size([8, 5]), torch.Size([8, 5, 3]))

    :param noise_dim: size of the noise vector.
    :param output_dim: size of the value.
    :param hidden: widths of the hidden layers; ``()`` for an affine map.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param context_dim: size of the context vector; 0 for none.
    :param output_scale: factor on the last layer's initial weights, whose bias starts at
        zero: a small value makes a network that starts near zero.
    :raises ValueError: if a size is not positive or the activation is unknown.
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
        check_layers(hidden, activation)
        self.activation = activation
        sizes = [noise_dim + context_dim, *hidden, output_dim]
        layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        with torch.no_grad():
            self.layers[-1].weight.mul_(output_scale)
            self.layers[-1].bias.zero_()

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        activation = ACTIVATIONS[self.activation].function
        first, *rest = self.layers
        x = first(self._join(noise, context))
        for layer in rest:
            x = layer(activation(x))
        return x

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> MLPLinearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative, carried along layer by layer.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        return MLPLinearisation(self, noise, context)


class MLPLinearisation(Linearisation):
    """The pass of an :class:`MLP`.

    :ivar features: what enters the last layer, ``(*batch, width)``.
    """

    def __init__(self, network: MLP, noise: Tensor, context: Tensor | None) -> None:
        activation = ACTIVATIONS[network.activation]
        self._network, self._derivative = network, activation.derivative
        self._hidden: list[tuple[Tensor, Tensor]] = []
        x = network._join(noise, context)
        *hidden, last = network.layers
        for layer in hidden:
            argument = layer(x)
            x = activation.function(argument)
            self._hidden.append((argument, x))
        self.features = x
        self.value = last(x)

    def feature_tangent(self) -> Tensor:
        """The derivative of the features, transposed: ``(*batch, d, width)``."""
        noise_dim = self._network.noise_dim
        if not self._hidden:
            like = self.features
            return torch.eye(noise_dim, like.shape[-1], dtype=like.dtype, device=like.device)
        first, *rest = self._network.layers
        # Transposed, a layer acts on it as on d further inputs: one large matrix product in place
        # of many small ones.
        tangent = first.weight[:, :noise_dim].mT
        for index, (argument, value) in enumerate(self._hidden):
            if index > 0:
                tangent = tangent @ rest[index - 1].weight.mT
            tangent = tangent * self._derivative(argument, value).unsqueeze(-2)
        return tangent

    def jacobian(self, num_outputs: int | None = None) -> Tensor:
        """:returns: ``(*batch, m, d)``, or of the first ``num_outputs`` values alone."""
        weight = self._network.layers[-1].weight[:num_outputs]
        tangent = self.feature_tangent() @ weight.mT
        return tangent.expand(self.value.shape[:-1] + tangent.shape[-2:]).mT
