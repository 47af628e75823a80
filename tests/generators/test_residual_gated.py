# SPDX-License-Identifier: Apache-2.0
"""The gated residual generator: its formula, its exact derivatives, and the funnels it carries."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.generators.residual import GatedResidualGenerator


def build(output_dim: int, core_dim: int, context_dim: int = 0) -> GatedResidualGenerator:
    torch.manual_seed(0)
    generator = GatedResidualGenerator(output_dim, core_dim, (8, 7), context_dim=context_dim)
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return generator.double()


def test_formula():
    generator = build(5, 2)
    noise = torch.randn(7, 5, dtype=torch.float64)
    core, rest = noise.split([2, 3], -1)
    shift = generator.network(core) + core @ generator.linear.weight.T
    gate = (generator.gate(core) + core @ generator.gate_linear.weight.T).exp()
    scale = generator.log_scale.exp()
    upper = shift[:, :2] + scale[:2] * core
    lower = shift[:, 2:] + scale[2:] * gate * rest
    torch.testing.assert_close(generator(noise), torch.cat([upper, lower], -1))
    assert generator.noise_dim == generator.output_dim == 5


def test_errors():
    with pytest.raises(ValueError, match="core_dim is 5 but output_dim only 5.*ResidualGenerator"):
        GatedResidualGenerator(5, 5)
    with pytest.raises(ValueError, match="core_dim must be at least 1, but got 0"):
        GatedResidualGenerator(5, 0)
