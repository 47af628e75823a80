# SPDX-License-Identifier: Apache-2.0
"""The network that GPVI's authors put in the place of an inverse Jacobian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pyro_implicit.ops import jacobian_products

__all__ = ["GPVIHelper", "helper_loss"]


class GPVIHelper(nn.Module):
    r"""A network of noise and kernel gradients that learns :math:`J_f^{-\top} \nabla k`.

    One layer for each input, then three for both, all with ReLU but the last.

    **Example:**

    >>> GPVIHelper(2, 5)(torch.zeros(7, 2), torch.zeros(7, 5)).shape
    torch.Size([7, 5])

    :param core_dim: size of the noise that it sees.
    :param value_dim: size of the gradients and of the output.
    :param width: of the hidden layers.

    **References:**

    1. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, appendix B.1.
    """

    def __init__(self, core_dim: int, value_dim: int, width: int = 256) -> None:
        super().__init__()
        self.of_noise = nn.Linear(core_dim, width)
        self.of_gradients = nn.Linear(value_dim, width)
        self.of_both = nn.Sequential(
            nn.Linear(2 * width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, value_dim),
        )

    def forward(self, core: Tensor, gradients: Tensor) -> Tensor:
        """Estimate the functional gradient at a value from its core noise and the gradients there.

        :param core: ``(*batch, core_dim)``.
        :param gradients: ``(*batch, value_dim)``.
        :returns: ``(*batch, value_dim)``.
        """
        features = torch.cat([self.of_noise(core), self.of_gradients(gradients)], -1)
        return self.of_both(features.relu())


def helper_loss(
    network: nn.Module,
    generate: Callable[[Tensor], Tensor],
    noise: Tensor,
    gradients: Tensor,
    core_dim: int,
) -> Tensor:
    r"""The loss of the helper network, :math:`\|J_f^\top h - \nabla k\|^2` (eq 11), its mean.

    :param generate: f, from ``(*batch, m)`` to ``(*batch, m)``, each row on its own.
    :param noise: ``(*batch, m)``.
    :param gradients: :math:`\nabla k`, ``(*batch, m)``.
    :param core_dim: number of noise coordinates that the network sees.
    :returns: a scalar, differentiable in the network's parameters.
    """
    predicted = network(noise[..., :core_dim], gradients)
    _, transposed_times = jacobian_products(generate, noise)
    return (transposed_times(predicted) - gradients).square().sum(-1).mean()
