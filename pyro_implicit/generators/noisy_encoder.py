# SPDX-License-Identifier: Apache-2.0
"""A generator for amortised guides: a network of the context with noise at its hidden layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .activations import ACTIVATIONS
from .base import Generator, check_layers, check_positive
from .linearisation import Linearisation

__all__ = ["NoisyEncoder"]


class NoisyEncoder(Generator):
    r"""A fully connected network of the context, such as an image x, whose first hidden layer is
    disturbed by Gaussian noise z of as many dimensions,

    .. math:: h = a(W_1 x + b_1) + s \odot z, \quad
        g(z, x) = W_3\, a(W_2 h + b_2) + b_3,

    with a learnable standard deviation s for every unit. The layers after it turn the noise into
    any distribution of the value given x.

    The noise meets nothing before the second layer, so the first one never sees more rows than
    there are contexts: :math:`W_2 h = W_2 a(W_1 x + b_1) + (W_2\, \mathrm{diag}(s)) z`, and of a
    context that was expanded over samples, as the guides' distributions do, the one row behind the
    expanded dimension is taken.

    With ``noise_scale=1`` and two hidden layers of ReLUs, a value starts with a standard deviation
    of about 0.2 given its context, at any width. For LIVI choose a smooth activation: it
    differentiates the Jacobian, and the jumps of a ReLU network's have no derivative (on digits,
    ``examples/vae.py``, ReLUs cost 4.5 nats per image).

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

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size, or there is none.
        """
        return self.linearise(noise, context).value

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative, carried back from the last layer.
        :raises ValueError: if the noise or the context has the wrong size.
        """
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
    """The context with one row where it has many copies of it in the same memory."""
    for dim, stride in enumerate(context.stride()[:-1]):
        if stride == 0:
            context = context.narrow(dim, 0, 1)
    return context
