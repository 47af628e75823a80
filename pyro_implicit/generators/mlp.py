# SPDX-License-Identifier: Apache-2.0
"""Fully connected generators: plain, and with noise at a hidden layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pyro_implicit.generators.base import (
    ACTIVATIONS,
    Generator,
    Linearisation,
    check_layers,
    check_positive,
)

__all__ = ["MLP", "MLPLinearisation", "NoisyEncoder"]


class MLP(Generator):
    """A fully connected network of the noise and the context, concatenated.

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
    :param output_scale: factor on the last layer's initial weights, whose initial bias is zero: a
        small value makes a network that is near zero initially.
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

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> MLPLinearisation:
        return MLPLinearisation(self, noise, context)


class MLPLinearisation(Linearisation):
    """The pass of an :class:`MLP`; ``features`` are the last layer's inputs."""

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
        # Transposed, so that a layer acts on d further inputs by one large matrix product.
        tangent = first.weight[:, :noise_dim].mT
        for index, (argument, value) in enumerate(self._hidden):
            if index > 0:
                tangent = tangent @ rest[index - 1].weight.mT
            tangent = tangent * self._derivative(argument, value).unsqueeze(-2)
        return tangent

    def jacobian(self, num_outputs: int | None = None) -> Tensor:
        """:returns: ``(*batch, m, d)``, or only the first ``num_outputs`` rows."""
        weight = self._network.layers[-1].weight[:num_outputs]
        tangent = self.feature_tangent() @ weight.mT
        return tangent.expand(self.value.shape[:-1] + tangent.shape[-2:]).mT


class NoisyEncoder(Generator):
    r"""A network of the context x, such as an image, with noise z at the first hidden layer,

    .. math:: h = a(W_1 x + b_1) + s \odot z, \quad
        g(z, x) = W_3\, a(W_2 h + b_2) + b_3,

    for amortised guides. Every unit has a learnable standard deviation s.

    The first layer is evaluated once per context, not once per sample, because
    :math:`W_2 h = W_2 a(W_1 x + b_1) + (W_2\, \mathrm{diag}(s)) z`.

    With ``noise_scale=1`` and two hidden ReLU layers, the initial standard deviation of a value
    given its context is about 0.2 at any width. Choose a smooth activation for LIVI, which
    differentiates the Jacobian: ReLUs cost 4.5 nats per image in ``examples/vae.py``.

    **Example:**

    >>> encoder = NoisyEncoder(context_dim=64, output_dim=8, hidden=(100, 100))
    >>> images = torch.rand(16, 64)
    >>> noise = torch.randn(50, 16, encoder.noise_dim)
    >>> encoder(noise, images.expand(50, 16, 64)).shape
    torch.Size([50, 16, 8])

    :param context_dim: size of the context vector.
    :param output_dim: size of the value.
    :param hidden: widths of the hidden layers; the first one is the ``noise_dim``. With one alone
        the value is Gaussian given the context.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param noise_scale: initial standard deviation of the noise at every hidden unit.
    :raises ValueError: if a size or the noise scale is not positive, there is no hidden layer, or
        the activation is unknown.

    **References:**

    1. Shi, Sun and Zhu (2018), *Kernel Implicit Variational Inference*, section 6.3, figure 3a and
       appendix G.3. https://arxiv.org/abs/1705.10119
    """

    def __init__(
        self,
        context_dim: int,
        output_dim: int,
        hidden: Sequence[int] = (500, 500),
        activation: str = "relu",
        noise_scale: float = 1.0,
    ) -> None:
        check_positive(context_dim=context_dim)
        if not hidden:
            raise ValueError("hidden is empty; give the width of the layer that gets the noise.")
        check_layers(hidden, activation)
        if not noise_scale > 0:
            raise ValueError(f"noise_scale is {noise_scale}; it must be positive.")
        super().__init__(hidden[0], output_dim, context_dim)
        self.activation = activation
        self.context_layer = nn.Linear(context_dim, hidden[0])
        self.log_noise_scale = nn.Parameter(torch.full((hidden[0],), math.log(noise_scale)))
        layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in itertools.pairwise([*hidden, output_dim])
        )
        self.layers = cast(Sequence[nn.Linear], layers)
        with torch.no_grad():
            self.layers[-1].bias.zero_()

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        return _EncoderLinearisation(self, noise, context)

    def _second_layer(self, noise: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """The second layer before its activation, and the matrix by which the noise enters it."""
        self._check_inputs(noise, context)
        assert context is not None
        hidden = ACTIVATIONS[self.activation].function(self.context_layer(_unexpanded(context)))
        second = self.layers[0]
        # Scaling the weights, not the noise: the many rows of noise then need no gradient.
        noise_weight = second.weight * self.log_noise_scale.exp()
        x = linear(noise, noise_weight) + linear(hidden, second.weight, second.bias)
        batch = torch.broadcast_shapes(noise.shape[:-1], context.shape[:-1])
        return x.expand(batch + (-1,)), noise_weight


class _EncoderLinearisation(Linearisation):
    def __init__(self, encoder: NoisyEncoder, noise: Tensor, context: Tensor | None) -> None:
        activation = ACTIVATIONS[encoder.activation]
        self._derivative, self._rest = activation.derivative, list(encoder.layers)[1:]
        x, self._noise_weight = encoder._second_layer(noise, context)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        for layer in self._rest:
            value = activation.function(x)
            self._hidden.append((x, value))
            x = layer(value)
        self.value = x

    def jacobian(self) -> Tensor:
        # From the last layer back: an encoder has far fewer values than noise dimensions.
        weights = [self._noise_weight, *(layer.weight for layer in self._rest)]
        jacobian = weights.pop()
        for argument, value in reversed(self._hidden):
            jacobian = (jacobian * self._derivative(argument, value).unsqueeze(-2)) @ weights.pop()
        return jacobian.expand(self.value.shape[:-1] + jacobian.shape[-2:])


def _unexpanded(context: Tensor) -> Tensor:
    """Narrow expanded dimensions, which repeat one row in the same memory, to size one."""
    for dim, stride in enumerate(context.stride()[:-1]):
        if stride == 0:
            context = context.narrow(dim, 0, 1)
    return context
