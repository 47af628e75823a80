# SPDX-License-Identifier: Apache-2.0
"""The default generator: an affine map of the noise, gated and shifted by small networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .base import Generator
from .linearisation import Linearisation
from .twin import TwinMLP

__all__ = ["GatedMLP"]


class GatedMLP(Generator):
    r"""An affine map of the noise with a multiplicative gate and an additive correction,

    .. math:: g(z, c) = (A z + b + C c) \odot \exp(s(z, c)) + t(z, c),

    where s and t are two small networks that start near zero, computed together. The gate lets one
    network carry a scale that changes along the posterior, such as that of a funnel, which an
    additive network cannot.

    It starts as an affine map with unit spread: under standard normal noise every coordinate of
    A z has unit variance, and A is the identity where the sizes allow. C starts small.

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
        self.networks = TwinMLP(noise_dim, output_dim, hidden, activation, context_dim, 0.01)
        with torch.no_grad():
            if noise_dim == output_dim:
                nn.init.eye_(self.affine.weight)
            else:
                nn.init.orthogonal_(self.affine.weight)
                self.affine.weight.div_(self.affine.weight.norm(dim=-1, keepdim=True))
            self.affine.bias.zero_()
            if self.context_linear is not None:
                self.context_linear.weight.mul_(0.1)

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        self._check_inputs(noise, context)
        log_scale, shift = self.networks(noise, context)
        return torch.addcmul(shift, self._base(noise, context), log_scale.exp())

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative by the chain rule.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        return _GatedLinearisation(self, noise, context)

    def _base(self, noise: Tensor, context: Tensor | None) -> Tensor:
        base = self.affine(noise)
        return base if self.context_linear is None else base + self.context_linear(context)


class _GatedLinearisation(Linearisation):
    def __init__(self, generator: GatedMLP, noise: Tensor, context: Tensor | None) -> None:
        generator._check_inputs(noise, context)
        self._affine = generator.affine
        self._networks = generator.networks.linearise(noise, context)
        log_scale, shift = self._networks.value
        self._gate, self._base = log_scale.exp(), generator._base(noise, context)
        self.value = torch.addcmul(shift, self._base, self._gate)

    def jacobian(self) -> Tensor:
        # Transposed, because that is how the networks' Jacobians lie in memory.
        log_scale, shift = self._networks.jacobian().mT
        inner = torch.addcmul(self._affine.weight.mT, self._base.unsqueeze(-2), log_scale)
        return torch.addcmul(shift, self._gate.unsqueeze(-2), inner).mT
