# SPDX-License-Identifier: Apache-2.0
"""The residual generator: block triangular Jacobian, exact log-determinant, injective start."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.generators import ResidualGenerator
from pyro_implicit.generators.residual import GatedResidualGenerator

CASES = [(6, 2, 0), (4, 4, 0), (5, 1, 0), (6, 3, 2)]


def build(output_dim: int, core_dim: int, context_dim: int) -> ResidualGenerator:
    torch.manual_seed(0)
    generator = ResidualGenerator(output_dim, core_dim, (8, 7), context_dim=context_dim).double()
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return generator


def test_formula():
    generator = build(5, 2, 0)
    noise = torch.randn(7, 5, dtype=torch.float64)
    expected = generator.network(noise[:, :2]) + generator.log_scale.exp() * noise
    torch.testing.assert_close(generator(noise), expected)
    assert generator.noise_dim == generator.output_dim == 5


def test_density_integrates_to_one():
    # exp(log N(z) - log|det J|) is the density of f(z): integrate it over f's own grid.
    torch.manual_seed(0)
    generator = ResidualGenerator(1, 1, (8,), output_scale=1.0).double()
    noise = torch.linspace(-8, 8, 4001, dtype=torch.float64).unsqueeze(-1)
    with torch.no_grad():
        value = generator(noise).squeeze(-1)
        log_normal = torch.distributions.Normal(0.0, 1.0).log_prob(noise.squeeze(-1))
        density = (log_normal - generator.linearise(noise).log_abs_det()).exp()
    assert (value.diff() > 0).all()
    assert torch.trapezoid(density, value).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("generator_class", "distance"), [(ResidualGenerator, 0.05), (GatedResidualGenerator, 0.1)]
)
def test_starts_injective_near_the_noise(generator_class, distance, seed):
    torch.manual_seed(seed)
    generator = generator_class(20, 5)
    noise = torch.randn(1000, 20)
    with torch.no_grad():
        linearisation = generator.linearise(noise)
        value, jacobian = linearisation.value, linearisation.jacobian()
    assert (value - noise).abs().max() < distance
    core = jacobian[:, :5, :5]
    assert torch.linalg.eigvalsh(core + core.mT).min() > 1.9


def test_core_dim_errors():
    with pytest.raises(ValueError, match="core_dim is 6 but output_dim only 5.*core_dim <="):
        ResidualGenerator(5, 6)
    with pytest.raises(ValueError, match="core_dim must be at least 1, but got 0"):
        ResidualGenerator(5, 0)


@pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("output_dim, core_dim, context_dim", CASES)
def test_inverse_transposed(output_dim, core_dim, context_dim, batch):
    generator = build(output_dim, core_dim, context_dim)
    noise, vector = torch.randn((2, *batch, output_dim), dtype=torch.float64)
    context = torch.randn(batch + (context_dim,), dtype=torch.float64) if context_dim else None
    jacobian = generator.linearise(noise, context).jacobian()
    expected = torch.linalg.inv(jacobian).mT
    with torch.no_grad():
        solved = generator.linearise(noise, context).solve_transposed(vector)
    torch.testing.assert_close(solved, (expected @ vector.unsqueeze(-1)).squeeze(-1))
    inverse = generator.linearise(noise, context).inverse_transposed()
    assert inverse.rows.shape == (*batch, core_dim, core_dim + 7)
    upper = (inverse.rows @ inverse.compress(vector).unsqueeze(-1)).squeeze(-1)
    product = torch.cat([upper, inverse.diagonal * vector[..., core_dim:]], -1)
    torch.testing.assert_close(product, solved)
    assert not (solved.requires_grad or product.requires_grad)


def test_inverse_transposed_of_an_affine_map():
    generator = ResidualGenerator(4, 2, hidden=(), output_scale=1.0).double()
    noise, vector = torch.randn((2, 5, 4), dtype=torch.float64)
    inverse = generator.linearise(noise).inverse_transposed()
    upper = (inverse.rows @ inverse.compress(vector).unsqueeze(-1)).squeeze(-1)
    expected = generator.linearise(noise).solve_transposed(vector)
    torch.testing.assert_close(upper, expected[:, :2])
