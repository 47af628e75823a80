# SPDX-License-Identifier: Apache-2.0
"""The default generator: an affine map with a gate and a shift by small networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyro_implicit.generators.base import ACTIVATIONS, Generator, Linearisation, joined
from pyro_implicit.generators.mlp import MLP
from pyro_implicit.ops.policy import CONTEXT_FACTOR, NEAR_ZERO

__all__ = ["GatedMLP", "TwinMLP"]


class GatedMLP(Generator):
    r"""An affine map of the noise with a multiplicative gate and an additive correction,

    .. math:: g(z, c) = (A z + b + C c) \odot \exp(s(z, c)) + t(z, c),

    with two small networks s and t that are near zero initially. The gate represents scales that
    vary along the posterior, as in a funnel, which an additive network cannot.

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

    def _base(self, noise: Tensor, context: Tensor | None) -> Tensor:
        base = self.affine(noise)
        return base if self.context_linear is None else base + self.context_linear(context)


class _GatedLinearisation(Linearisation):
    def __init__(self, generator: GatedMLP, noise: Tensor, context: Tensor | None) -> None:
        generator._check_inputs(noise, context)
        self._affine = generator.affine
        self._networks = TwinLinearisation(generator.networks, noise, context)
        log_scale, shift = self._networks.value
        self._gate, self._base = log_scale.exp(), generator._base(noise, context)
        self.value = torch.addcmul(shift, self._base, self._gate)

    def jacobian(self) -> Tensor:
        # Transposed, because that is how the networks' Jacobians lie in memory.
        log_scale, shift = self._networks.jacobian().mT
        inner = torch.addcmul(self._affine.weight.mT, self._base.unsqueeze(-2), log_scale)
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
