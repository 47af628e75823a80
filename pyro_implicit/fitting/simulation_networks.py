# SPDX-License-Identifier: Apache-2.0
"""Networks that learn from pairs of latents and data: a conditional density, and a classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from pyro.nn import DenseNN
from torch import Tensor, nn

from pyro_implicit.fitting.policy import SimulatorPolicy
from pyro_implicit.fitting.simulator import Pairs
from pyro_implicit.mcmc.teaching import KeptBest, maximise
from pyro_implicit.ops import logistic_ratio_loss

__all__ = ["ConditionalDensity", "PairClassifier", "PairFrame", "train_network"]


class PairFrame(nn.Module):
    r"""Standardises pairs by medians and quartiles, which heavy tails do not move.

    Inputs of networks are compressed, too, by :math:`\operatorname{asinh}`, so that a far value is
    one feature among others. It loses nothing, because it is invertible.
    """

    latent_loc: Tensor
    latent_scale: Tensor
    data_loc: Tensor
    data_scale: Tensor

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        for name, part in zip(Pairs._fields, pairs, strict=True):
            ranks = [max(1, round(share * len(part))) for share in (0.25, 0.5, 0.75)]
            low, middle, high = (part.kthvalue(rank, 0).values for rank in ranks)
            # Those of a standard normal are 1.349 apart; those of mostly equal values may coincide.
            scale = torch.where(high > low, (high - low) / 1.349, part.std(0))
            self.register_buffer(f"{name}_loc", middle)
            self.register_buffer(f"{name}_scale", torch.where(scale > 0, scale, 1.0))

    def forward(self, latent: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        return (latent - self.latent_loc) / self.latent_scale, self.white_data(data)

    def white_data(self, data: Tensor) -> Tensor:
        return ((data - self.data_loc) / self.data_scale).asinh()


class ConditionalDensity(nn.Module):
    r"""Conditional density of latents given data, a product of mixtures of normals:

    .. math:: q(u | y) = \prod_i \sum_k w_k N(u_i | m_k, s_k^2),

    where weights, means and scales are functions of :math:`u_{<i}` and y by a network for each
    coordinate. It is the density of a triangular injective map from uniform noise, each coordinate
    by the inverse of its conditional distribution function.
    """

    def __init__(self, pairs: Pairs, policy: SimulatorPolicy) -> None:
        super().__init__()
        self.frame, number = PairFrame(pairs), policy.num_components
        dim, size = pairs.latent.shape[-1], pairs.data.shape[-1]
        widths = [policy.width] * policy.depth
        # Logits, means and log sds.
        networks = [DenseNN(size + i, widths, [number] * 3, nn.SiLU()) for i in range(dim)]
        zeros = torch.zeros(number)
        with torch.no_grad():
            for network in networks:
                network.layers[-1].bias.copy_(torch.cat([zeros, torch.randn(number), zeros]))
        self.networks = nn.ModuleList(networks)
        self.to(pairs.latent)

    def _parts(self, i: int, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Return logits, means and log sds of coordinate i, each ``(*batch, num_components)``."""
        return self.networks[i](torch.cat([y, x[..., :i].asinh()], -1))

    def log_prob(self, latent: Tensor, data: Tensor) -> Tensor:
        """Return log q at ``(*batch, d)`` and ``(*batch, m)``, up to a constant."""
        x, y = self.frame(latent, data)
        total = x.new_zeros(x.shape[:-1])
        for i in range(len(self.networks)):
            logits, mean, log_scale = self._parts(i, x, y)
            z = (x[..., i : i + 1] - mean) * (-log_scale).exp()
            parts = logits.log_softmax(-1) - 0.5 * (z.square() + math.log(2 * math.pi)) - log_scale
            total = total + parts.logsumexp(-1)
        return total

    def mean_log_prob(self, pairs: Pairs, rows: Tensor) -> Tensor:
        """Return the objective of the training, for some of the pairs."""
        return self.log_prob(pairs.latent[rows], pairs.data[rows]).mean()

    @torch.no_grad()
    def sample(self, data: Tensor) -> Tensor:
        """Draw one vector for each row of data, ``(n, m)``: ``(n, d)``."""
        y, dim = self.frame.white_data(data), len(self.frame.latent_loc)
        x = y.new_zeros(len(y), dim)
        for i in range(dim):
            logits, mean, log_scale = self._parts(i, x, y)
            chosen = torch.multinomial(logits.softmax(-1), 1)
            noise = torch.randn_like(y[:, :1])
            value = mean.gather(-1, chosen) + log_scale.gather(-1, chosen).exp() * noise
            x[:, i] = value.squeeze(-1)
        return self.frame.latent_loc + self.frame.latent_scale * x


class PairClassifier(nn.Module):
    """The log-ratio of the densities of true latents and of draws, given data."""

    def __init__(self, pairs: Pairs, policy: SimulatorPolicy) -> None:
        super().__init__()
        size = pairs.latent.shape[-1] + pairs.data.shape[-1]
        self.frame = PairFrame(pairs)
        self.network = DenseNN(size, [policy.classifier_width] * 2, [1], nn.SiLU())
        self.to(pairs.latent)

    def forward(self, latent: Tensor, data: Tensor) -> Tensor:
        x, y = self.frame(latent, data)
        return self.network(torch.cat([x.asinh(), y], -1)).squeeze(-1)

    def contrast(self, draws: Tensor, pairs: Pairs, rows: Tensor) -> Tensor:
        """Return minus the logistic loss between pairs and the same data with draws."""
        data = pairs.data[rows]
        true, drawn = (self(latent[rows], data) for latent in (pairs.latent, draws))
        return -logistic_ratio_loss(true, drawn)


def train_network(
    pairs: Pairs,
    network: nn.Module,
    objective: Callable[[Pairs, Tensor], Tensor],
    policy: SimulatorPolicy,
    seconds: float,
    name: str,
) -> float:
    """Maximise an objective on a random part of the pairs; return that of the held-out part."""
    order = torch.randperm(len(pairs.data), device=pairs.data.device)
    held, rows = order.tensor_split([round(len(order) / policy.training.held_out_part)])

    @torch.no_grad()
    def score() -> float:
        return objective(pairs, held).item()

    best = KeptBest(list(network.parameters()), score())
    with torch.enable_grad():
        maximise(
            lambda chosen: objective(pairs, rows[chosen]), len(rows), best, score,
            policy.num_steps, policy.lr, policy.batch_size, policy.training, name, seconds,
        )  # fmt: skip
    best.restore()
    return best.score
