# SPDX-License-Identifier: Apache-2.0
"""Injective residual generators, with an exact density by a small determinant."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyro_implicit.generators.base import Generator, Linearisation
from pyro_implicit.generators.mlp import MLP
from pyro_implicit.ops.kernels import InverseTransposed
from pyro_implicit.ops.policy import NEAR_ZERO
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["GatedResidualGenerator", "ResidualGenerator"]


class ResidualGenerator(Generator):
    r"""Scaled noise plus a network of its first k coordinates,

    .. math:: f(z) = g(z_{1:k}) + \lambda \odot z,

    with a learnable positive scale :math:`\lambda` for every coordinate. The Jacobian is block
    triangular,

    .. math:: J_f = \begin{pmatrix} G_1 + \Lambda_1 & 0 \\ G_2 & \Lambda_2 \end{pmatrix},

    where :math:`G_1` is the top k x k block of the derivative of g and :math:`G_2` its other rows.
    The determinant costs that of a k x k matrix at any output size.

    With bounded activations ("tanh"), f is injective if its determinant is 0 nowhere (Hadamard's
    theorem: f(z) grows without limit with z), and always if, for every z, the symmetric part of
    :math:`G_1 + \Lambda_1` is positive definite. Nothing enforces these conditions; they hold
    initially, because g is near zero. Then :math:`\log q(f(z)) = \log N(z; 0, I) - \log |\det
    J_f(z)|` is the exact density. In training, :class:`~pyro_implicit.InjectiveELBO` turns around
    draws whose determinant has another sign than the others, and the ELBOs that need the density
    warn of them.

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
        output_scale: float = NEAR_ZERO,
    ) -> None:
        super().__init__(output_dim, output_dim, context_dim)
        refuse_counts(core_dim=core_dim)
        if core_dim > output_dim:
            raise ValueError(
                f"core_dim is {core_dim} but output_dim only {output_dim}, and the core is a "
                "part of the noise. Cure: core_dim <= output_dim"
            )
        self._core_dim = core_dim
        self.network = MLP(core_dim, output_dim, hidden, activation, context_dim, output_scale)
        self.log_scale = nn.Parameter(torch.zeros(output_dim))

    @property
    def core_dim(self) -> int:
        return self._core_dim

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
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
        k = self._core_dim
        return self._network.jacobian(num_outputs=k) + self._scale[:k].diag()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        sign, log_det = torch.linalg.slogdet(self._core())
        return sign, log_det + self._log_scale[self._core_dim :].sum()

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
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

        where :math:`G_2 = W_2 B` with the weights W of the last layer of g and the Jacobian B of
        its h inputs: the first k rows act on vectors compressed to k + h numbers.
        """
        k, scale, weight = self._core_dim, self._scale.detach(), self._last.weight.detach()
        core = torch.linalg.inv(self._core()).mT
        rows = torch.cat([core, -core @ self._network.feature_tangent()], -1)

        def compress(vectors: Tensor) -> Tensor:
            lower = vectors[..., k:] / scale[k:]
            return torch.cat([vectors[..., :k], lower @ weight[k:]], -1)

        return InverseTransposed(rows, 1 / scale[k:], compress)


class GatedResidualGenerator(Generator):
    r"""A :class:`ResidualGenerator` for funnels: its first k coordinates also scale the others.

    With the core :math:`u = z_{1:k}` and the rest :math:`w = z_{k+1:m}` of the noise,

    .. math:: f(z) = \big(g_1(u) + \lambda_1 \odot u, \;
        g_2(u) + \lambda_2 \odot e^{s(u)} \odot w\big),

    with two networks g and s, each an :class:`MLP` plus a linear map, and learnable positive scales
    :math:`\lambda`. Given the core, the rest is Gaussian and independent, with any location and
    scale; the linear maps extend both into the tails. In hierarchical models the core should be the
    parents, such as location and scale of a group. An autoguide's latent vector begins with them,
    as the model samples parents first.

    The Jacobian is block triangular,

    .. math:: \log |\det J_f(z)| = \log |\det (G_1 + \Lambda_1)|
        + \sum_{i > k} (\log \lambda_i + s_i(u)),

    with the k x k derivative :math:`G_1` of :math:`g_1`. f is injective if the symmetric part of
    :math:`G_1 + \Lambda_1` is positive definite for every u. Nothing enforces this condition; it
    holds initially, because g is near zero.

    **Example:**

    >>> generator = GatedResidualGenerator(output_dim=50, core_dim=5)
    >>> generator.linearise(torch.randn(8, 50)).log_abs_det().shape
    torch.Size([8])

    :param output_dim: size of the value and of the noise.
    :param core_dim: number k of noise coordinates that enter the networks.
    :param hidden: widths of the hidden layers of each of the two networks.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param context_dim: size of the context vector, which enters g and s; 0 for none.
    :param output_scale: factor on the initial weights of the last layers of g and s.
    :raises ValueError: if a size is not positive, ``core_dim`` is not below ``output_dim`` or the
        activation is unknown.

    **References:**

    1. Ratzlaff, Bai, Li and Xu (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, section 3.2 (the residual form).
    2. Dinh, Sohl-Dickstein and Bengio (2017), *Density Estimation Using Real NVP*, section 3.2 (the
       gate: an affine coupling).
    """

    injective = True

    def __init__(
        self,
        output_dim: int,
        core_dim: int,
        hidden: Sequence[int] = (64, 64),
        activation: str = "silu",
        context_dim: int = 0,
        output_scale: float = NEAR_ZERO,
    ) -> None:
        super().__init__(output_dim, output_dim, context_dim)
        refuse_counts(core_dim=core_dim)
        if core_dim >= output_dim:
            raise ValueError(
                f"core_dim is {core_dim} but output_dim only {output_dim}, so there is nothing to "
                "scale. Cure: core_dim < output_dim, or ResidualGenerator"
            )
        # Private: the public core_dim counts the noise that the Jacobian depends on, here all.
        self._core_dim = core_dim
        rest = output_dim - core_dim
        self.network = MLP(core_dim, output_dim, hidden, activation, context_dim, output_scale)
        self.gate = MLP(core_dim, rest, hidden, activation, context_dim, output_scale)
        self.linear = nn.Linear(core_dim, output_dim, bias=False)
        self.gate_linear = nn.Linear(core_dim, rest, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.gate_linear.weight)
        self.log_scale = nn.Parameter(torch.zeros(output_dim))

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        return _GatedResidualLinearisation(self, noise, context)


class _GatedResidualLinearisation(Linearisation):
    def __init__(
        self, generator: GatedResidualGenerator, noise: Tensor, context: Tensor | None
    ) -> None:
        generator._check_inputs(noise, context)
        self._generator, self._noise = generator, noise
        k = generator._core_dim
        core = noise[..., :k]
        self._network = generator.network.linearise(core, context)
        self._gate = generator.gate.linearise(core, context)
        self._log_gate = self._gate.value + generator.gate_linear(core)
        self._scale = (generator.log_scale + nn.functional.pad(self._log_gate, (k, 0))).exp()
        self.value = self._network.value + generator.linear(core) + self._scale * noise

    def jacobian(self) -> Tensor:
        k = self._generator._core_dim
        slope = nn.functional.pad(self._core_slope(), (0, self._noise.shape[-1] - k))
        return slope + self._scale.diag_embed()

    def _core_slope(self) -> Tensor:
        k = self._generator._core_dim
        slope = self._network.jacobian() + self._generator.linear.weight
        gate_slope = self._gate.jacobian() + self._generator.gate_linear.weight
        # The gate changes the rows of the rest only.
        scaled = (self._scale * self._noise)[..., k:, None]
        return slope + nn.functional.pad(scaled * gate_slope, (0, 0, k, 0))

    def _core(self) -> Tensor:
        k = self._generator._core_dim
        slope = self._network.jacobian(num_outputs=k) + self._generator.linear.weight[:k]
        return slope + self._generator.log_scale[:k].exp().diag()

    def slogdet(self) -> tuple[Tensor, Tensor]:
        sign, log_det = torch.linalg.slogdet(self._core())
        log_scale = self._generator.log_scale[self._generator._core_dim :]
        return sign, log_det + (log_scale + self._log_gate).sum(-1)

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        k = self._generator._core_dim
        lower = vector[..., k:] / self._scale[..., k:]
        pulled = (self._core_slope()[..., k:, :].mT @ lower.unsqueeze(-1)).squeeze(-1)
        upper = torch.linalg.solve(self._core().mT, vector[..., :k] - pulled)
        return torch.cat([upper, lower], -1)
