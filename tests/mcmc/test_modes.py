# SPDX-License-Identifier: Apache-2.0
"""Separate modes: their weights, and what the result says."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import AutoImplicit, AutoMixture, AutoregressiveGenerator
from pyro_implicit.guides import Frame
from pyro_implicit.mcmc import refine


def bimodal():
    """Three quarters at -9, of sd 2; one at 9, of sd 1."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([1]).to_event(1).mask(False))[..., 0]
    parts = (dist.Normal(-9.0, 2.0).log_prob(x), dist.Normal(9.0, 1.0).log_prob(x))
    pyro.factor("modes", torch.logaddexp(math.log(0.75) + parts[0], math.log(0.25) + parts[1]))


def mixture(model):
    frames = [Frame(torch.tensor([loc]), torch.tensor([1.5])) for loc in (-9.0, 9.0)]
    parts = [AutoImplicit(model, AutoregressiveGenerator, frame=frame) for frame in frames]
    return AutoMixture(model, parts)


def test_annealing_gives_modes_their_due_weights():
    """The guide has both weights and scales wrong."""
    result = refine(bimodal, mixture(bimodal), temper=True, seed=0, progress=False)
    draws = result.get_samples()["x"][..., 0]
    assert result.stopped == "converged" and abs((draws < 0).double().mean() - 0.75) < 0.02
    assert abs(draws[draws < 0].std() - 2) < 0.1 and abs(draws[draws > 0].std() - 1) < 0.1
    assert result.modes_weighed and result.as_guide().modes_weighed


def test_chains_keep_the_weights_of_the_guide():
    result = refine(
        bimodal, mixture(bimodal), seed=0, num_chains=128, max_gradients=300, progress=False
    )
    assert result.stopped == "max_gradients" and "keeps the weight" in result.modes
    assert not result.modes_weighed and result.drift.r_hat > 3
