# SPDX-License-Identifier: Apache-2.0
"""Fully connected generators: plain, gated (the default), and with noise at a hidden layer."""

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
    joined,
)
from pyro_implicit.ops.policy import CONTEXT_FACTOR, MAX_LOG_GATE, NEAR_ZERO
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive

__all__ = ["MLP", "GatedMLP", "MLPLinearisation", "NoisyEncoder", "TwinMLP"]


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
        pairs = itertools.pairwise(sizes)
        self.layers = cast(Sequence[nn.Linear], nn.ModuleList(nn.Linear(*pair) for pair in pairs))
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
        refuse_counts(context_dim=context_dim)
        if not hidden:
            raise ValueError("hidden is empty. Cure: the width of the layer that gets the noise")
        check_layers(hidden, activation)
        refuse_nonpositive(noise_scale=noise_scale)
        super().__init__(hidden[0], output_dim, context_dim)
        self.activation = activation
        self.context_layer = nn.Linear(context_dim, hidden[0])
        self.log_noise_scale = nn.Parameter(torch.full((hidden[0],), math.log(noise_scale)))
        pairs = itertools.pairwise([*hidden, output_dim])
        self.layers = cast(Sequence[nn.Linear], nn.ModuleList(nn.Linear(*pair) for pair in pairs))
        nn.init.zeros_(self.layers[-1].bias)

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        return _EncoderLinearisation(self, noise, context)


class _EncoderLinearisation(Linearisation):
    def __init__(self, encoder: NoisyEncoder, noise: Tensor, context: Tensor | None) -> None:
        encoder._check_inputs(noise, context)
        assert context is not None
        activation = ACTIVATIONS[encoder.activation]
        self._derivative = activation.derivative
        second, *self._rest = encoder.layers
        hidden = activation.function(encoder.context_layer(_unexpanded(context)))
        # Scaling the weights, not the noise: the many rows of noise then need no gradient.
        self._noise_weight = second.weight * encoder.log_noise_scale.exp()
        x = linear(noise, self._noise_weight) + linear(hidden, second.weight, second.bias)
        batch = torch.broadcast_shapes(noise.shape[:-1], context.shape[:-1])
        x = x.expand(batch + (-1,))
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


class GatedMLP(Generator):
    r"""An affine map of the noise with a multiplicative gate and an additive correction,

    .. math:: g(z, c) = (A z + b + C c) \odot \exp(s(z, c)) + t(z, c),

    with two small networks s and t that are near zero initially. The gate represents scales that
    vary along the posterior, as in a funnel, which an additive network cannot. The soft bound
    :math:`|s| < 3` keeps draws within twenty times the affine map.

    The generator is initially an affine map of unit spread: under standard normal noise every
    coordinate of A z has unit variance, and A is the identity if the sizes are equal. C is small.

    **Example:**

    >>> generator = GatedMLP(noise_dim=4, output_dim=4)
    >>> generator(torch.randn(8, 4)).shape
    torch.Size([8, 4])

    :param noise_dim: size of the noise vector.
    :param output_dim: size of the value.
    :param hidden: widths of the hidden layers of each of the two networks.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param context_dim: size of the context vector; 0 for none.
    :raises ValueError: if a size is not positive or the activation is unknown.
    """

    def __init__(
        self,
        noise_dim: int,
        output_dim: int,
        hidden: Sequence[int] = (64, 64),
        activation: str = "silu",
        context_dim: int = 0,
    ) -> None:
        super().__init__(noise_dim, output_dim, context_dim)
        self.affine = nn.Linear(noise_dim, output_dim)
        self.context_linear = (
            nn.Linear(context_dim, output_dim, bias=False) if context_dim else None
        )
        self.networks = TwinMLP(noise_dim, output_dim, hidden, activation, context_dim, NEAR_ZERO)
        with torch.no_grad():
            if noise_dim == output_dim:
                nn.init.eye_(self.affine.weight)
            else:
                nn.init.orthogonal_(self.affine.weight)
                self.affine.weight.div_(self.affine.weight.norm(dim=-1, keepdim=True))
            self.affine.bias.zero_()
            if self.context_linear is not None:
                self.context_linear.weight.mul_(CONTEXT_FACTOR)

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        return _GatedLinearisation(self, noise, context)


class _GatedLinearisation(Linearisation):
    def __init__(self, generator: GatedMLP, noise: Tensor, context: Tensor | None) -> None:
        generator._check_inputs(noise, context)
        self._affine = generator.affine
        self._networks = TwinLinearisation(generator.networks, noise, context)
        log_gate, shift = self._networks.value
        self._bend = (log_gate / MAX_LOG_GATE).tanh()
        self._gate = (MAX_LOG_GATE * self._bend).exp()
        self._base = generator.affine(noise)
        if generator.context_linear is not None:
            self._base = self._base + generator.context_linear(context)
        self.value = torch.addcmul(shift, self._base, self._gate)

    def jacobian(self) -> Tensor:
        # Transposed, because that is how the networks' Jacobians lie in memory.
        log_gate, shift = self._networks.jacobian().mT
        base = torch.addcmul(self._base, self._base * self._bend, self._bend, value=-1)
        inner = torch.addcmul(self._affine.weight.mT, base.unsqueeze(-2), log_gate)
        return torch.addcmul(shift, self._gate.unsqueeze(-2), inner).mT


class TwinMLP(nn.Module):
    """Two :class:`MLP` of one shape in batched products, in half the time.

    **Example:**

    >>> TwinMLP(3, 5, (64, 64), "elu", 0, 1.0).linearise(torch.randn(8, 3), None).value.shape
    torch.Size([2, 8, 5])

    All parameters are those of :class:`MLP`.
    """

    def __init__(
        self,
        noise_dim: int,
        output_dim: int,
        hidden: Sequence[int],
        activation: str,
        context_dim: int,
        output_scale: float,
    ) -> None:
        super().__init__()
        sizes = (noise_dim, output_dim, hidden, activation, context_dim, output_scale)
        twins = [MLP(*sizes) for _ in range(2)]
        self.noise_dim, self.activation = noise_dim, activation
        self.num_layers = len(hidden) + 1
        for index, (one, other) in enumerate(zip(*(twin.layers for twin in twins), strict=True)):
            weight = torch.stack([one.weight.detach(), other.weight.detach()])
            bias = torch.stack([one.bias.detach(), other.bias.detach()])
            self.register_parameter(f"weight_{index}", nn.Parameter(weight))
            self.register_parameter(f"bias_{index}", nn.Parameter(bias))

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> TwinLinearisation:
        return TwinLinearisation(self, noise, context)

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return weights ``(2, rows, columns)`` and biases ``(2, rows)`` of all layers."""
        layers = []
        for i in range(self.num_layers):
            layers.append((getattr(self, f"weight_{i}"), getattr(self, f"bias_{i}")))
        return layers


class TwinLinearisation(Linearisation):
    """The pass of a :class:`TwinMLP`; all tensors have a first dimension of size 2."""

    def __init__(self, networks: TwinMLP, noise: Tensor, context: Tensor | None) -> None:
        activation = ACTIVATIONS[networks.activation]
        self._noise_dim, self._derivative = networks.noise_dim, activation.derivative
        self._layers = networks.layers()
        inputs = noise if context is None else joined(noise, context)
        self._batch = inputs.shape[:-1]
        x = inputs.reshape(1, math.prod(self._batch), -1).expand(2, -1, -1)
        self._hidden: list[tuple[Tensor, Tensor]] = []
        *hidden, (weight, bias) = self._layers
        for hidden_weight, hidden_bias in hidden:
            argument = torch.baddbmm(hidden_bias.unsqueeze(1), x, hidden_weight.mT)
            x = activation.function(argument)
            self._hidden.append((argument, x))
        x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        self.value = x.reshape((2, *self._batch, -1))

    def jacobian(self) -> Tensor:
        """:returns: ``(2, *batch, m, d)``."""
        # Transposed, a layer acts on it as on d further inputs: one large matrix product.
        tangent = self._layers[0][0][..., : self._noise_dim].mT.unsqueeze(1)
        for (argument, value), (weight, _) in zip(self._hidden, self._layers[1:], strict=True):
            tangent = tangent * self._derivative(argument, value).unsqueeze(-2)
            tangent = (tangent.flatten(1, 2) @ weight.mT).unflatten(1, tangent.shape[1:3])
        tangent = tangent.expand(2, math.prod(self._batch), -1, -1)
        return tangent.reshape((2, *self._batch, *tangent.shape[-2:])).mT
