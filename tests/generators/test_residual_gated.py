# SPDX-License-Identifier: Apache-2.0
"""The gated residual generator: its formula, its exact derivatives, and the funnels it carries."""

from __future__ import annotations

import math

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


def test_carries_a_funnel_exactly():
    """By its linear gate: v ~ N(0, 9), x_i | v ~ N(0, e^v) (Neal, 2003)."""
    generator = GatedResidualGenerator(4, 1, output_scale=0.0).double()
    torch.nn.init.constant_(generator.gate_linear.weight, 1.5)
    generator.log_scale.data[0] = math.log(3.0)
    noise = torch.randn(50, 4, dtype=torch.float64)
    v, x = generator(noise).split([1, 3], -1)
    normal = torch.distributions.Normal
    log_p = normal(0.0, 3.0).log_prob(v) + normal(0.0, (v / 2).exp()).log_prob(x).sum(-1, True)
    log_q = normal(0.0, 1.0).log_prob(noise).sum(-1) - generator.linearise(noise).log_abs_det()
    torch.testing.assert_close(log_q, log_p.squeeze(-1))


def test_errors():
    with pytest.raises(ValueError, match="core_dim is 5 but output_dim only 5.*ResidualGenerator"):
        GatedResidualGenerator(5, 5)
    with pytest.raises(ValueError, match="core_dim must be at least 1, but got 0"):
        GatedResidualGenerator(5, 0)
