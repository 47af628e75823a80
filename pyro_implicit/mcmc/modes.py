# SPDX-License-Identifier: Apache-2.0
"""Chains in separate modes: which is in which, and how many ought to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.guides import AutoMixture
from pyro_implicit.guides.exactness import why_inexact
from pyro_implicit.mcmc.guide_density import MixtureDensity, unconstrained_draws
from pyro_implicit.mcmc.policy import StoppingPolicy
from pyro_implicit.ops.importance_weights import bridge

__all__ = ["KEPT", "Modes"]

KEPT = (
    "Chains that start in separate modes stay there: each mode keeps the weight that the guide "
    "gave it."
)


class Modes:
    """The components of a mixture of exact density, as places where chains may be.

    :param target: the posterior.
    :param guide: the mixture, called once before.
    """

    def __init__(self, target: Target, guide: AutoMixture) -> None:
        self.target, self.guide = target, guide

    @staticmethod
    def of(target: Target, guide: Any) -> Modes | None:
        """Those of a guide, or None for any that is not a mixture of exact density."""
        if not isinstance(guide, AutoMixture) or len(guide.components) < 2:
            return None
        if any(why_inexact(part) for part in guide.components):
            return None
        return Modes(target, guide)

    @torch.no_grad()
    def log_joint(self, latent: Tensor) -> Tensor:
        """Of each component, its weight included, ``(n, num_components)``."""
        vectors = unconstrained_draws(self.guide, self.target.constrain(latent))
        density = MixtureDensity(self.guide, vectors)
        return density.log_joint(torch.arange(len(vectors), device=vectors.device))

    def label(self, latent: Tensor) -> Tensor:
        """The likeliest component of each latent ``(n, d)``, ``(n,)``."""
        return self.log_joint(latent).nan_to_num(nan=-torch.inf).argmax(-1)

    @torch.no_grad()
    def log_masses(self, latents: Tensor, label: Tensor, num_draws: int) -> Tensor:
        """The log of the posterior mass, not normalised, where each component is the likeliest.

        :param latents: refined ones, ``(num_chains, num_draws, d)``.
        :param label: of the chains, ``(num_chains,)``.
        :param num_draws: draws of each component, at most.
        :returns: ``(num_components,)``, -inf for those that no chain is in.
        """
        masses = []
        for index, part in enumerate(self.guide.components):
            own = latents[label == index].flatten(0, 1)
            if len(own) == 0:
                masses.append(latents.new_full((), -torch.inf))
                continue
            own = own[torch.linspace(0, len(own) - 1, min(len(own), num_draws)).long()]
            drawn = part.sample_posterior(num_draws)
            drawn = self.target.unconstrain({k: drawn[k] for k in self.target.shapes})
            ratios = []
            for points in (own, drawn):
                log_joint = self.log_joint(points)
                log_q = log_joint[:, index] - self.guide.log_weights.log_softmax(0)[index]
                elsewhere = log_joint.argmax(-1) != index
                log_ratio = self.target.log_prob(points) - log_q
                ratios.append(log_ratio.masked_fill(elsewhere | log_ratio.isnan(), -torch.inf))
            masses.append(bridge(ratios[0][ratios[0].isfinite()], ratios[1]))
        return torch.stack(masses)

    def chosen(self, latents: Tensor, policy: StoppingPolicy) -> tuple[Tensor | None, str]:
        """Which chains to keep, and how often, so that each mode has its due number of them.

        :param latents: refined ones, ``(num_chains, num_draws, d)``.
        :param policy: limits.
        :returns: the indices of chains, ``(num_chains,)``, None for all as they are; and in words
            what was done.
        """
        label = self.label(latents[:, 0])
        crossed = (label != self.label(latents[:, -1])).double().mean().item()
        counts = label.bincount(minlength=len(self.guide.components))
        if (counts > 0).sum() == 1:
            return None, "All chains are in one component of the mixture."
        if crossed > policy.max_crossed:
            return None, (
                f"{crossed:.0%} of the chains went over from one component of the mixture to "
                "another, so that they find the components' weights themselves, if slowly."
            )
        weights = self.log_masses(latents, label, policy.num_weighed).softmax(-1)
        due = _rounded(weights * len(latents))
        rows = torch.cat([_taken((label == k).nonzero().squeeze(-1), n) for k, n in enumerate(due)])
        shares = (", ".join(f"{x:.3f}" for x in part) for part in (counts / len(label), weights))
        return rows, (
            "The chains stay in their components of the mixture, whose weights are by their "
            "normalising constants (bridge sampling): shares of chains {}, put right to {}."
        ).format(*shares)


def _rounded(shares: Tensor) -> list[int]:
    """Integers of the same sum, none further than one from its share."""
    edges = shares.double().cumsum(0).round().long()
    return torch.diff(edges, prepend=edges.new_zeros(1)).tolist()


def _taken(rows: Tensor, number: int) -> Tensor:
    """So many of the rows, in random order, each about as often as the others."""
    rounds = -(-number // max(1, len(rows)))
    orders = [rows[torch.randperm(len(rows))] for _ in range(rounds)]
    return torch.cat([rows[:0], *orders])[:number]
