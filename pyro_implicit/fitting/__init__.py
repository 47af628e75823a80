# SPDX-License-Identifier: Apache-2.0
"""From a model to a fitted guide, without settings."""

from pyro_implicit.fitting.auto import Fit, fit
from pyro_implicit.fitting.gaussian import gaussian_guide
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.fitting.weights import MixtureWeights, mixture_weights

__all__ = [
    "Fit",
    "MixtureWeights",
    "Schedule",
    "fit",
    "gaussian_guide",
    "mixture_weights",
    "train",
]
