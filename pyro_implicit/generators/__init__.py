# SPDX-License-Identifier: Apache-2.0
"""Generators: networks that turn noise, and perhaps a context, into values."""

from __future__ import annotations

from .autoregressive import AutoregressiveGenerator
from .base import Generator
from .gated import GatedMLP
from .linearisation import FunctionGenerator, Linearisation, as_generator
from .matmul import MMNN, CorrelatedMMNN, near_square_shape
from .mlp import MLP
from .noisy_encoder import NoisyEncoder
from .residual import ResidualGenerator
from .triangular import GatedResidualGenerator

__all__ = [
    "AutoregressiveGenerator",
    "CorrelatedMMNN",
    "GatedMLP",
    "GatedResidualGenerator",
    "FunctionGenerator",
    "Generator",
    "Linearisation",
    "MLP",
    "MMNN",
    "NoisyEncoder",
    "ResidualGenerator",
    "as_generator",
    "near_square_shape",
]
