# SPDX-License-Identifier: Apache-2.0
"""An injective generator whose density is exact and cheap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyro_implicit.ops.functional_gradient import InverseTransposed

from .base import Generator, check_positive
from .linearisation import Linearisation
from .mlp import MLP

__all__ = ["ResidualGenerator"]


class ResidualGenerator(Generator):
    r"""Scaled noise plus a network of its first k coordinates,

    .. math:: f(z) = g(z_{1:k}) + \lambda \odot z,

    with a learnable positive scale :math:`\lambda` for every coordinate. The Jacobian is block
    triangular,

    .. math:: J_f = \begin{pmatrix} G_1 + \Lambda_1 & 0 \\ G_2 & \Lambda_2 \end{pmatrix},

    where :math:`G_1` is the top k x k block of the derivative of g and :math:`G_2` the rest of it.
    So its determinant costs that of a k x k matrix, at any output size.

    f is injective if, for every z, the symmetric part of :math:`G_1 + \Lambda_1` is positive
    definite: the first k coordinates of f are then strictly monotone in the first k of z, and the
    rest follow. It suffices that the Lipschitz constant of the first k outputs of g lies below the
    smallest of their scales. Nothing enforces this; g starts near zero, where it holds.
    Then :math:`\log q(f(z)) = \log N(z; 0, I) - \log |\det J_f(z)|` is the exact density.

    **Example:**

    >>> generator = ResidualGenerator(output_dim=50, core_dim=5)
    >>> generator.linearise(torch.randn(8, 50)).log_abs_det().shape
    torch.Size([8])

    :param output_dim: size of the value and of the noise.
    :param core_dim: number k of noise coordinates that enter the network.
    :param hidden: widths of the hidden layers of g.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param context_dim: size of the context vector, which enters g; 0 for none.
    :param output_scale: factor on the initial weights of the last layer of g.
    :raises ValueError: if a size is not positive, ``core_dim`` exceeds ``output_dim`` or the
        activation is unknown.

    **References:**

    1. Ratzlaff, Bai, Li and Xu (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, section 3.2. https://arxiv.org/abs/2103.01291
    """

    injective = True

    def __init__(
        self,
        output_dim: int,
        core_dim: int,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        context_dim: int = 0,
        output_scale: float = 0.01,
    ) -> None:
        super().__init__(output_dim, output_dim, context_dim)
        check_positive(core_dim=core_dim)
        if core_dim > output_dim:
            raise ValueError(
                f"core_dim is {core_dim} but output_dim only {output_dim}; "
                "the core is a part of the noise, so choose core_dim <= output_dim."
            )
        self._core_dim = core_dim
        self.network = MLP(core_dim, output_dim, hidden, activation, context_dim, output_scale)
        self.log_scale = nn.Parameter(torch.zeros(output_dim))

    @property
    def core_dim(self) -> int:
        """Number k of noise coordinates that enter the network."""
        return self._core_dim

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        self._check_inputs(noise, context)
        return self.network(noise[..., : self.core_dim], context) + self.log_scale.exp() * noise

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative, its determinant and its inverse
            by the k x k block.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        return _ResidualLinearisation(self, noise, context)


class _ResidualLinearisation(Linearisation):
    def __init__(self, generator: ResidualGenerator, noise: Tensor, context: Tensor | None) -> None:
        generator._check_inputs(noise, context)
        self._core_dim, self._last = generator.core_dim, generator.network.layers[-1]
        self._network = generator.network.linearise(noise[..., : self._core_dim], context)
        self._log_scale, self._scale = generator.log_scale, generator.log_scale.exp()
        self.value = self._network.value + self._scale * noise

    def jacobian(self) -> Tensor:
        slope = self._network.jacobian()
        padding = (0, len(self._scale) - self._core_dim)
        return nn.functional.pad(slope, padding) + self._scale.diag()

    def _core(self) -> Tensor:
        """The k x k block, ``(*batch, k, k)``."""
        k = self._core_dim
        return self._network.jacobian(num_outputs=k) + self._scale[:k].diag()

    def log_abs_det(self) -> Tensor:
        log_det = torch.linalg.slogdet(self._core()).logabsdet
        return log_det + self._log_scale[self._core_dim :].sum()

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        r"""With :math:`v = (v_1, v_2)` it is :math:`y_2 = v_2 / \lambda_2`, :math:`y_1 =
        (G_1 + \Lambda_1)^{-\top} (v_1 - G_2^\top y_2)`."""
        k = self._core_dim
        upper, lower = vector[..., :k], vector[..., k:] / self._scale[k:]
        tangent = self._network.feature_tangent()
        pulled = (tangent @ (lower @ self._last.weight[k:]).unsqueeze(-1)).squeeze(-1)
        upper = torch.linalg.solve(self._core().mT, upper - pulled)
        return torch.cat([upper, lower], -1)

    @torch.no_grad()
    def inverse_transposed(self) -> InverseTransposed:
        r"""Without :math:`G_2`,

        .. math:: J_f^{-\top} = \begin{pmatrix} C^{-\top} & -C^{-\top} G_2^\top \Lambda_2^{-1} \\
            0 & \Lambda_2^{-1} \end{pmatrix}, \qquad C = G_1 + \Lambda_1,

        where :math:`G_2 = W_2 B` with the weights W of the last layer of g and the small Jacobian
        B of what enters it: the first k rows act on vectors compressed to k + h numbers for h
        inputs of the last layer.
        """
        k, scale, weight = self._core_dim, self._scale.detach(), self._last.weight.detach()
        core = torch.linalg.inv(self._core()).mT
        rows = torch.cat([core, -core @ self._network.feature_tangent()], -1)

        def compress(vectors: Tensor) -> Tensor:
            lower = vectors[..., k:] / scale[k:]
            return torch.cat([vectors[..., :k], lower @ weight[k:]], -1)

        return InverseTransposed(rows, 1 / scale[k:], compress)
