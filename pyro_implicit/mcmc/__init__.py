# SPDX-License-Identifier: Apache-2.0
"""What joins guides and Markov chain Monte Carlo."""

from __future__ import annotations

from pyro_implicit.mcmc.initial_params import warm_start
from pyro_implicit.mcmc.noise_space import NoiseSpaceReparam

__all__ = ["NoiseSpaceReparam", "warm_start"]
