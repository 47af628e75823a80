# SPDX-License-Identifier: Apache-2.0
"""Densities of semi-implicit distributions, and the two ways to the noise behind a value."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from pyro_implicit.ops.semi_implicit import (
    conditional_log_density,
    linearised_reverse_conditional,
    mixture_log_density,
)
from tests.largest_tensor import LargestTensor

DOUBLE = torch.double


def network(d: int, m: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, m)).double()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, requires_grad=True)


def test_conditional_is_the_normal_density():
    value, mean, scale = random(4, 3), random(6, 1, 3), random(3).exp()
    found = conditional_log_density(value, mean, scale)
    torch.testing.assert_close(found, Normal(mean, scale).log_prob(value).sum(-1))
    assert found.shape == (6, 4)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch", [(), (4,), (4, 3)])
def test_mixture_equals_a_loop(batch, weighted, chunk_size):
    """Noise of each element's own beside noise that they share along the first dimension."""
    generate, m, d = network(2, 3), 3, 2
    value, scale = random(*batch, m), random(*batch, m).exp()
    shared_batch = (1,) * bool(batch) + batch[1:]
    noises = [random(1, *batch, d), random(7, *shared_batch, d)]
    log_weights = [random(1, *batch), random(7, *shared_batch)]
    found = mixture_log_density(
        value, generate, scale, noises, log_weights if weighted else None, chunk_size
    )
    assert found.shape == batch
    density = torch.zeros(batch, dtype=DOUBLE)
    for noise, log_weight in zip(noises, log_weights, strict=True):
        for z, log_w in zip(noise, log_weight, strict=True):
            term = Normal(generate(z), scale).log_prob(value).sum(-1).exp()
            density = density + (term * log_w.exp() if weighted else term)
    expected = (density / 8).log()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    inputs = [value, scale, *noises, *generate.parameters()] + log_weights * weighted
    weight = 1 + torch.rand_like(found)
    torch.testing.assert_close(
        torch.autograd.grad((weight * found).sum(), inputs),
        torch.autograd.grad((weight * expected).sum(), inputs),
        rtol=1e-9,
        atol=1e-9,
    )


def test_mixture_works_where_all_densities_underflow():
    value, noise = torch.full((1,), 1e3, dtype=DOUBLE), torch.zeros(5, 1, dtype=DOUBLE)
    found = mixture_log_density(value, lambda z: z, torch.ones(1, dtype=DOUBLE), [noise])
    torch.testing.assert_close(found, Normal(0.0, 1.0).log_prob(value).sum())


def numbers_made(chunk_size: int) -> tuple[int, int]:
    """The largest tensor of value and gradient, and what is kept between the two."""
    particles, num_noises, m = 10, 60, 50
    generate = network(2, m)
    value = torch.randn(particles, m, dtype=DOUBLE)
    noise, scale = torch.randn(num_noises, 1, 2, dtype=DOUBLE), torch.ones(m, dtype=DOUBLE)
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            log_q = mixture_log_density(value, generate, scale, [noise], chunk_size=chunk_size)
        log_q.sum().backward()
    return largest.numel, sum(kept)


def test_chunks_bound_the_memory():
    assert numbers_made(chunk_size=60)[0] == 60 * 10 * 50
    largest, kept = numbers_made(chunk_size=4)
    assert largest == 4 * 10 * 50
    assert kept < 60 * 10 * 50 / 10


def test_default_chunks_bound_the_memory(monkeypatch):
    monkeypatch.setattr("pyro_implicit.ops.semi_implicit.MAX_ENTRIES", 2_000)
    assert numbers_made(None)[0] == 4 * 10 * 50  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
@pytest.mark.parametrize("m,d", [(4, 2), (3, 3), (2, 5), (1, 1)])
def test_linearised_is_exact_for_linear_generators(m, d, batch):
    linear = nn.Linear(d, m, dtype=DOUBLE)
    nn.init.normal_(linear.weight)
    scale = 0.02 + torch.rand(m, dtype=DOUBLE)
    value = torch.randn(batch + (m,), dtype=DOUBLE)
    mean, rows = linearised_reverse_conditional(
        value,
        lambda z: (linear(z), linear.weight.expand(z.shape[:-1] + (m, d))),
        scale,
        value.new_zeros((*value.shape[:-1], d)),
        12,
    )
    weight = linear.weight.detach()
    precision = torch.eye(d, dtype=DOUBLE) + weight.T @ (weight / scale.square()[:, None])
    target = (value - linear.bias) / scale.square() @ weight
    expected = torch.linalg.solve(precision, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-6, atol=1e-6)
    found = torch.eye(d, dtype=DOUBLE) + rows.mT @ rows
    torch.testing.assert_close(found, precision.expand(found.shape))


def banana(noise: Tensor) -> Tensor:
    return torch.stack([noise[..., 0], 0.5 * noise[..., 1] + noise[..., 0].square()], -1)


def banana_and_jacobian(noise: Tensor) -> tuple[Tensor, Tensor]:
    one, zero = torch.ones_like(noise[..., 0]), torch.zeros_like(noise[..., 0])
    rows = [torch.stack([one, zero], -1), torch.stack([2 * noise[..., 0], 0.5 * one], -1)]
    return banana(noise), torch.stack(rows, -2)


@pytest.mark.parametrize("scale", [0.5, 0.02])
def test_linearised_finds_the_mode_of_a_banana(scale):
    true_noise = torch.randn(200, 2, dtype=DOUBLE)
    value, scale = banana(true_noise), torch.full((2,), scale, dtype=DOUBLE)
    mean, rows = linearised_reverse_conditional(
        value, banana_and_jacobian, scale, value.new_zeros((*value.shape[:-1], 2)), 20
    )
    z = mean.clone().requires_grad_()
    log_joint = conditional_log_density(value, banana(z), scale) - 0.5 * z.square().sum(-1)
    gradient = torch.autograd.grad(log_joint.sum(), z)[0]
    # In units of the posterior's own width; a few on the way round the bend are not there yet.
    factor = torch.linalg.cholesky(torch.eye(2, dtype=DOUBLE) + rows.mT @ rows)
    remaining = torch.linalg.solve_triangular(factor, gradient[..., None], upper=False).abs()
    assert remaining.quantile(0.95) < 1e-3
    jacobian = banana_and_jacobian(mean)[1] / scale[:, None]
    torch.testing.assert_close(rows, jacobian)


def test_linearised_survives_a_generator_that_overflows():
    """exp(exp(8 z)) is infinite after the first full step, and so is its Jacobian."""

    def explosive(z: Tensor) -> tuple[Tensor, Tensor]:
        value = (8 * z).exp().exp()
        return value, (8 * (8 * z).exp() * value).unsqueeze(-1)

    value = torch.tensor([[1e3]], dtype=DOUBLE)
    scale = torch.ones(1, dtype=DOUBLE)
    mean, _ = linearised_reverse_conditional(value, explosive, scale, torch.zeros_like(value), 60)
    assert mean.item() == pytest.approx(math.log(math.log(1e3)) / 8, abs=1e-4)
