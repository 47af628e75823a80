# SPDX-License-Identifier: Apache-2.0
"""Generators: networks that turn noise, and perhaps a context, into values."""

from __future__ import annotations

from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.generators.base import (
    FunctionGenerator,
    Generator,
    Linearisation,
    as_generator,
)
from pyro_implicit.generators.matmul import MMNN, CorrelatedMMNN, near_square_shape
from pyro_implicit.generators.mlp import MLP, GatedMLP, NoisyEncoder
from pyro_implicit.generators.residual import GatedResidualGenerator, ResidualGenerator

__all__ = [
    "MLP",
    "MMNN",
    "AutoregressiveGenerator",
    "CorrelatedMMNN",
    "FunctionGenerator",
    "GatedMLP",
    "GatedResidualGenerator",
    "Generator",
    "Linearisation",
    "NoisyEncoder",
    "ResidualGenerator",
    "as_generator",
    "near_square_shape",
]
