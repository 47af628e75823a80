# SPDX-License-Identifier: Apache-2.0
"""The MLP and the gated MLP: their formulas and how they start."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.generators import MLP, GatedMLP
from pyro_implicit.ops import batch_jacobian


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_mlp_by_hand():
    generator = MLP(1, 1, hidden=(2,), activation="tanh")
    first, last = generator.layers
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[2.0], [-1.0]]))
        first.bias.copy_(torch.tensor([0.5, 0.25]))
        last.weight.copy_(torch.tensor([[3.0, 4.0]]))
        last.bias.fill_(-1.0)
    z = torch.tensor([0.3])
    tanh = torch.tanh(torch.tensor([1.1, -0.05]))
    linearisation = generator.linearise(z)
    value, jacobian = linearisation.value, linearisation.jacobian()
    torch.testing.assert_close(value, 3 * tanh[:1] + 4 * tanh[1:] - 1)
    slope = 1 - tanh.square()
    torch.testing.assert_close(jacobian, (6 * slope[:1] - 4 * slope[1:]).unsqueeze(0))


def test_mlp_parameter_count():
    assert count(MLP(3, 5, hidden=(8, 7), context_dim=2)) == 6 * 8 + 9 * 7 + 8 * 5


@pytest.mark.parametrize("seed", range(3))
def test_output_scale(seed):
    torch.manual_seed(seed)
    generator = MLP(4, 6)
    torch.manual_seed(seed)
    small = MLP(4, 6, output_scale=0.01)
    noise = torch.randn(10, 4)
    assert generator(noise).abs().max() > 1e-2
    torch.testing.assert_close(small(noise), 0.01 * generator(noise))


def test_first_outputs_only():
    torch.manual_seed(0)
    for hidden in ((8, 7), ()):
        generator = MLP(3, 5, hidden=hidden)
        noise = torch.randn(4, 3)
        linearisation = generator.linearise(noise)
        top = linearisation.jacobian(num_outputs=2)
        torch.testing.assert_close(top, linearisation.jacobian()[:, :2])


@pytest.mark.parametrize("hidden", [(8, 7), (6,), ()], ids=str)
@pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("context_dim", [0, 2])
def test_feature_tangent(context_dim, batch, hidden):
    """The derivative of what enters the last layer, transposed."""
    torch.manual_seed(0)
    generator = MLP(3, 5, hidden, "silu", context_dim=context_dim).double()
    noise = torch.randn(batch + (3,), dtype=torch.float64)
    context = torch.randn(batch + (context_dim,), dtype=torch.float64) if context_dim else None
    linearisation = generator.linearise(noise, context)
    seen = []
    generator.layers[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))

    def features(z):
        generator(z, context)
        return seen.pop()

    value, expected = batch_jacobian(features, noise)
    torch.testing.assert_close(linearisation.features, value)
    tangent = linearisation.feature_tangent()
    torch.testing.assert_close(tangent.expand(expected.mT.shape), expected.mT)


def test_gated_formula():
    torch.manual_seed(0)
    generator = GatedMLP(3, 4, hidden=(8,), context_dim=2).double()
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    noise = torch.randn(6, 3, dtype=torch.float64)
    context = torch.randn(6, 2, dtype=torch.float64)
    affine, context_weight = generator.affine, generator.context_linear.weight
    base = noise @ affine.weight.T + affine.bias + context @ context_weight.T
    log_gate, shift = generator.networks.linearise(noise, context).value
    expected = base * (3 * (log_gate / 3).tanh()).exp() + shift
    torch.testing.assert_close(generator(noise, context), expected)


def test_gate_is_bounded():
    torch.manual_seed(0)
    generator = GatedMLP(3, 4, hidden=(8,))
    noise = 10 * torch.randn(1000, 3)
    with torch.no_grad():
        generator.networks.weight_1.mul_(1e5)
        log_gate, shift = generator.networks.linearise(noise).value
        gated = generator(noise) - shift
    assert log_gate.max() > 100
    assert (gated.abs() <= 20.1 * generator.affine(noise).abs() + 1e-5 * shift.abs()).all()


def test_gated_parameter_count():
    network = 10 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    assert count(GatedMLP(10, 10)) == 10 * 10 + 10 + 2 * network


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise_dim, output_dim, context_dim", [(5, 5, 0), (3, 7, 0), (9, 4, 2)])
def test_gated_starts_affine_with_unit_spread(noise_dim, output_dim, context_dim, seed):
    torch.manual_seed(seed)
    generator = GatedMLP(noise_dim, output_dim, context_dim=context_dim)
    matrix = generator.affine.weight.detach()
    torch.testing.assert_close(matrix.norm(dim=-1), torch.ones(output_dim))
    if noise_dim == output_dim:
        assert torch.equal(matrix, torch.eye(output_dim))
    elif noise_dim > output_dim:
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(output_dim), atol=1e-5, rtol=0)
    else:
        assert torch.linalg.matrix_rank(matrix) == noise_dim
    assert not generator.affine.bias.any()

    noise = torch.randn(4000, noise_dim)
    context = torch.randn(4000, context_dim) if context_dim else None
    with torch.no_grad():
        value = generator(noise, context)
        moved = generator.affine(noise)
        if context_dim:
            shift = generator.context_linear(context)
            assert 0 < shift.std(0).max() < 0.15
            moved = moved + shift
    assert (value - moved).abs().max() < 0.05
    assert (value.std(0) - 1).abs().max() < 0.07
    assert value.mean(0).abs().max() < 0.07
