# SPDX-License-Identifier: Apache-2.0
"""What joins guides and Markov chain Monte Carlo."""

from __future__ import annotations

from pyro_implicit.mcmc.auto_conditional import AutoConditional
from pyro_implicit.mcmc.chees import ChEES
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.conditional_space import conditional_reparams
from pyro_implicit.mcmc.minibatch_refined import MinibatchRefined
from pyro_implicit.mcmc.minibatch_refinement import refine_by_minibatches
from pyro_implicit.mcmc.nuts import NoiseSpaceReparam, warm_start
from pyro_implicit.mcmc.refined import Refined
from pyro_implicit.mcmc.refinement import refine
from pyro_implicit.mcmc.teaching import Taught, teach

__all__ = [
    "AutoConditional",
    "ChEES",
    "ConditionalReparam",
    "MinibatchRefined",
    "NoiseSpaceReparam",
    "Refined",
    "Taught",
    "conditional_reparams",
    "refine",
    "refine_by_minibatches",
    "teach",
    "warm_start",
]
