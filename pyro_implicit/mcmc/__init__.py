# SPDX-License-Identifier: Apache-2.0
"""Guides and Markov chain Monte Carlo."""

from __future__ import annotations

from pyro_implicit.mcmc.auto_conditional import AutoConditional
from pyro_implicit.mcmc.nuts import NoiseSpaceReparam, warm_start
from pyro_implicit.mcmc.policy import ChainPolicy, TeachPolicy
from pyro_implicit.mcmc.refine import refine
from pyro_implicit.mcmc.refine_by_minibatches import refine_by_minibatches
from pyro_implicit.mcmc.refined import Refined
from pyro_implicit.mcmc.spaces.conditional_noise import conditional_reparams
from pyro_implicit.mcmc.spaces.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.teaching import Taught, teach
from pyro_implicit.mcmc.tempering import ModeWeights

__all__ = [
    "AutoConditional",
    "ChainPolicy",
    "ConditionalReparam",
    "ModeWeights",
    "NoiseSpaceReparam",
    "Refined",
    "Taught",
    "TeachPolicy",
    "conditional_reparams",
    "refine",
    "refine_by_minibatches",
    "teach",
    "warm_start",
]
