# SPDX-License-Identifier: Apache-2.0
"""From a model to a fitted guide, without settings."""

from pyro_implicit.fitting.fit import Fit, fit
from pyro_implicit.fitting.frames import gaussian_guide
from pyro_implicit.fitting.modes import Modes, find_modes
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.fitting.weights import MixtureWeights, mixture_weights

__all__ = [
    "Fit",
    "MixtureWeights",
    "Modes",
    "Schedule",
    "find_modes",
    "fit",
    "gaussian_guide",
    "mixture_weights",
    "train",
]
