# SPDX-License-Identifier: Apache-2.0
"""An injective generator for funnels, whose density is exact and cheap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .base import Generator, check_positive
from .linearisation import Linearisation
from .mlp import MLP

__all__ = ["GatedResidualGenerator"]


class GatedResidualGenerator(Generator):
    r"""A :class:`ResidualGenerator` whose first k coordinates also scale the others. With the core
    :math:`u = z_{1:k}` and the rest :math:`w = z_{k+1:m}` of the noise,

    .. math:: f(z) = \big(g_1(u) + \lambda_1 \odot u, \;
        g_2(u) + \lambda_2 \odot e^{s(u)} \odot w\big),

    with two networks g and s, each an :class:`MLP` plus a linear map, and learnable positive scales
    :math:`\lambda`. Given the core, the rest is Gaussian and independent, with any location and any
    scale; the linear maps carry both on into the tails. So it follows the funnels of
    hierarchical models: there the core should be the parents, such as location and scale of a
    group, and an autoguide's latent vector begins with them, as the model samples parents first.

    The Jacobian is block triangular,

    .. math:: \log |\det J_f(z)| = \log |\det (G_1 + \Lambda_1)|
        + \sum_{i > k} (\log \lambda_i + s_i(u)),

    with the k x k derivative :math:`G_1` of :math:`g_1`. f is injective if the symmetric part of
    :math:`G_1 + \Lambda_1` is positive definite for every u. Nothing enforces this; g starts near
    zero, where it holds.

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
        output_scale: float = 0.01,
    ) -> None:
        super().__init__(output_dim, output_dim, context_dim)
        check_positive(core_dim=core_dim)
        if core_dim >= output_dim:
            raise ValueError(
                f"core_dim is {core_dim} but output_dim only {output_dim}, so there is nothing to "
                "scale; choose core_dim < output_dim, or ResidualGenerator."
            )
        # Not public: of a ResidualGenerator that is all the noise its Jacobian depends on.
        self._core_dim = core_dim
        rest = output_dim - core_dim
        self.network = MLP(core_dim, output_dim, hidden, activation, context_dim, output_scale)
        self.gate = MLP(core_dim, rest, hidden, activation, context_dim, output_scale)
        self.linear = nn.Linear(core_dim, output_dim, bias=False)
        self.gate_linear = nn.Linear(core_dim, rest, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.gate_linear.weight)
        self.log_scale = nn.Parameter(torch.zeros(output_dim))

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        return self.linearise(noise, context).value

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Values and their derivative in the noise, from one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value, and the exact derivative, its determinant and its inverse
            by the k x k block and the gate.
        :raises ValueError: if the noise or the context has the wrong size.
        """
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
        """The derivative in the core, but for the scales on the diagonal: ``(*batch, m, k)``."""
        k = self._generator._core_dim
        slope = self._network.jacobian() + self._generator.linear.weight
        gate_slope = self._gate.jacobian() + self._generator.gate_linear.weight
        # The gate adds to the rows of the rest alone.
        scaled = (self._scale * self._noise)[..., k:, None]
        return slope + nn.functional.pad(scaled * gate_slope, (0, 0, k, 0))

    def _core(self) -> Tensor:
        """The k x k block, ``(*batch, k, k)``."""
        k = self._generator._core_dim
        slope = self._network.jacobian(num_outputs=k) + self._generator.linear.weight[:k]
        return slope + self._generator.log_scale[:k].exp().diag()

    def log_abs_det(self) -> Tensor:
        log_det = torch.linalg.slogdet(self._core()).logabsdet
        log_scale = self._generator.log_scale[self._generator._core_dim :]
        return log_det + (log_scale + self._log_gate).sum(-1)

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        """By one k x k solve, as :class:`ResidualGenerator`'s."""
        k = self._generator._core_dim
        lower = vector[..., k:] / self._scale[..., k:]
        pulled = (self._core_slope()[..., k:, :].mT @ lower.unsqueeze(-1)).squeeze(-1)
        upper = torch.linalg.solve(self._core().mT, vector[..., :k] - pulled)
        return torch.cat([upper, lower], -1)
