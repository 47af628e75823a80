# SPDX-License-Identifier: Apache-2.0
"""Separate modes: their weights, R-hat within them, and what the result says."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import AutoImplicit, AutoMixture, AutoregressiveGenerator, AutoSemiImplicit
from pyro_implicit.density import Target
from pyro_implicit.guides import Frame
from pyro_implicit.mcmc import refine
from pyro_implicit.mcmc.guide_density import MixtureModes
from pyro_implicit.mcmc.policy import DEFAULT


def bimodal():
    """Three quarters at -9, of sd 2; one at 9, of sd 1."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([1]).to_event(1).mask(False))[..., 0]
    parts = (dist.Normal(-9.0, 2.0).log_prob(x), dist.Normal(9.0, 1.0).log_prob(x))
    pyro.factor("modes", torch.logaddexp(math.log(0.75) + parts[0], math.log(0.25) + parts[1]))


def mixture(model, locs=(-9.0, 9.0), scale=1.5, weights=(0.5, 0.5), kind=AutoImplicit):
    generator = AutoregressiveGenerator if kind is AutoImplicit else None
    parts = [
        kind(model, generator, frame=Frame(torch.tensor([loc]), torch.tensor([scale])))
        for loc in locs
    ]
    return AutoMixture(model, parts, log_weights=torch.tensor(weights).log())


OPTIONS = {"num_chains": 128, "max_gradients": 300, "progress": False}


def test_separate_modes_converge_and_get_their_due_weights():
    """The guide has both weights and scales wrong."""
    pyro.clear_param_store()
    result = refine(bimodal, mixture(bimodal), seed=0, **(OPTIONS | {"max_gradients": 1500}))
    draws = result.get_samples()["x"][..., 0]
    assert result.stopped == "converged" and result.drift.r_hat < 1.1
    assert abs((draws < 0).double().mean() - 0.75) < 0.02
    assert abs(draws[draws < 0].std() - 2) < 0.1 and abs(draws[draws > 0].std() - 1) < 0.1
    assert "bridge sampling" in str(result) and result.num_chains == 128
    assert result.modes_weighed and result.as_guide().modes_weighed


def test_modes_that_chains_cross_are_left_to_the_chains():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    guide = mixture(model, (-0.5, 0.5), 1.0)
    result = refine(model, guide, seed=0, **OPTIONS)
    assert "went over" in result.modes and abs(result.get_samples()["x"].mean()) < 0.15


def test_other_guides_keep_their_weights():
    result = refine(bimodal, mixture(bimodal, kind=AutoSemiImplicit), seed=0, **OPTIONS)
    assert result.stopped == "max_gradients" and "keeps the weight" in result.modes
    assert not result.modes_weighed
    assert MixtureModes.of(Target(bimodal), {"x": torch.zeros(8, 1)}) is None


def test_a_component_without_chains_has_no_mass():
    guide = mixture(bimodal)
    guide()
    modes = MixtureModes(Target(bimodal), guide)
    latents = torch.randn(16, 5, 1) - 9
    masses = modes.log_masses(latents, modes.label(latents[:, 0]), num_draws=500)
    assert masses[1] == -torch.inf and masses[0].isfinite()
    assert modes.chosen(latents, DEFAULT.stopping) == (
        None,
        "All chains are in one component of the mixture.",
    )
