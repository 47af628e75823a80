# SPDX-License-Identifier: Apache-2.0
"""Posteriors with known draws, and a good guide of each.

The targets of ``benchmarks.targets`` (``target:``) are their own guides, because exact draws are
known and the densities of their models are normalised. For posteriordb and the zoo (``zoo:``) the
good guide is the result of ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from benchmarks.broken_guides.faults import Good
from benchmarks.posteriordb import verdicts
from benchmarks.posteriordb.verdicts import PREFIX, Case
from benchmarks.targets import gmm40_centers, make_target
from benchmarks.zoo import registry
from benchmarks.zoo.metrics import read_reference
from pyro_implicit.density.target import Target
from pyro_implicit.fitting import fit
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit

__all__ = ["good_one", "load", "modes_of"]

ZOO = "zoo:"
CENTERS = {"x_shape_gap": 5.0, "multimodal": 2.0}


def load(name: str, data_dir: Path | None) -> Case:
    """A posterior, by name."""
    if not name.startswith(ZOO):
        return verdicts.load(name, data_dir)
    zoo = registry.load(name.removeprefix(ZOO))
    args, reference = zoo.data(), read_reference(zoo.name)
    assert zoo.invariant is None and reference is not None, name
    assert len(reference.columns) == len(reference.mean), "some of its latents have no reference"

    def flatten(draws: dict[str, Tensor]) -> Tensor:
        return zoo.features(draws, args)[0][:, reference.columns]

    return Case(zoo.model(), args, flatten, reference.values)


def modes_of(name: str) -> Tensor | None:
    """Centres of separate modes, ``(num_modes, dim)``."""
    target = name.removeprefix(PREFIX)
    if target == "gmm40":
        return gmm40_centers()
    if target not in CENTERS:
        return None
    return torch.tensor([[-CENTERS[target], 0.0], [CENTERS[target], 0.0]])


@dataclass(frozen=True)
class Exact:
    """A target with exact draws and its normalised log-density."""

    truth: Callable[[int, int], Tensor]
    density: Target

    def sample(self, num: int) -> Tensor:
        return self.truth(num, int(torch.randint(2**31, ())))

    def log_prob(self, points: Tensor) -> Tensor:
        with poutine.block():
            return self.density.log_prob(points)


@dataclass(frozen=True)
class Fitted:
    """The distribution of the latent vector of a guide from ``fit``."""

    posterior: Any

    @torch.no_grad()
    def sample(self, num: int) -> Tensor:
        return self.posterior.sample(torch.Size((num,)))

    @torch.no_grad()
    def log_prob(self, points: Tensor) -> Tensor:
        return self.posterior.log_prob(points)


def good_one(name: str, case: Case, seed: int) -> Good:
    """A good approximation of a posterior, with its density.

    Where ``fit`` prefers a guide without a density, an injective guide is trained instead.
    """
    if name.startswith(PREFIX):
        target = make_target(name.removeprefix(PREFIX))
        return Exact(target.truth, Target(case.model, *case.args))
    guide = fit(case.model, "auto", *case.args, refine=False, seed=seed, progress=False).guide
    if isinstance(guide, AutoMixture):
        return Fitted(guide.get_posterior())
    if isinstance(guide, AutoSemiImplicit):
        guide = AutoImplicit(case.model, AutoregressiveGenerator, frame="mode")
        guide = fit(case.model, guide, *case.args, seed=seed, progress=False).guide
    return Fitted(dist.TransformedDistribution(guide.get_base_dist(), guide.get_transform()))
