# SPDX-License-Identifier: Apache-2.0
"""Rules for integrals: exact moments, and the bias of random nodes."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.ops.quadrature import NormalRule, log_integral, normal_draws, normal_rule

LIKE = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize(("dim", "size"), [(1, 5), (2, 4), (3, 3), (5, 9), (8, 9)])
def test_moments_of_a_standard_normal(dim, size):
    nodes, log_weights = normal_rule(dim, NormalRule(size), LIKE)
    normal = -0.5 * nodes.square().sum(-1) - 0.5 * dim * math.log(2 * math.pi)
    weights = (log_weights + normal).exp()
    assert weights.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(weights @ nodes, LIKE.new_zeros(dim), rtol=0, atol=1e-12)
    second = torch.einsum("k,ki,kj->ij", weights, nodes, nodes)
    torch.testing.assert_close(second, torch.eye(dim).double(), rtol=0, atol=1e-10)
    third = torch.einsum("k,ki,kj,kl->ijl", weights, nodes, nodes, nodes)
    torch.testing.assert_close(third, torch.zeros_like(third), rtol=0, atol=1e-10)
    if dim <= 3:
        fourth = weights @ (nodes[:, 0] ** 2 * nodes[:, -1] ** 2)
        assert fourth.item() == pytest.approx(3 if dim == 1 else 1, abs=1e-10)


@pytest.mark.parametrize("dim", [1, 3, 5])
def test_scale_and_seed(dim):
    """A normal density of the same scale is integrated exactly."""
    rules = [NormalRule(9, scale=1.5, seed=seed) for seed in (0, 1)]
    for nodes, log_weights in (normal_rule(dim, rule, LIKE) for rule in rules):
        scaled = torch.distributions.Normal(LIKE, LIKE + 1.5).log_prob(nodes).sum(-1)
        assert log_integral(scaled + log_weights, dim).item() == pytest.approx(0, abs=1e-12)
    one, two = (normal_rule(dim, rule, LIKE)[0] for rule in rules)
    assert torch.equal(one, two) == (dim <= 3)  # only random nodes have a seed


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_integral_of_another_density(dim):
    """The logarithm of a product of logistic densities of unit mass."""
    nodes, log_weights = normal_rule(dim, NormalRule(41), LIKE)
    scale = 2**0.5  # the logistic density has the curvature 1/2 at its mode
    points = scale * nodes
    logistic = (-points - 2 * torch.nn.functional.softplus(-points)).sum(-1)
    found = log_integral(logistic + log_weights, dim) + dim * math.log(scale)
    assert found.item() == pytest.approx(0, abs=1e-4 if dim < 4 else 0.04)


@pytest.mark.parametrize("least", [-1000.0, -math.inf])
def test_the_jackknife_is_bounded_if_one_half_has_no_weight(least: float) -> None:
    logs = torch.tensor([0.0, 0.0, least, least])
    assert log_integral(logs, 5).item() == pytest.approx(math.log(4), abs=1e-6)
    assert log_integral(torch.full((4,), -math.inf), 5).item() == -math.inf


def test_the_jackknife_removes_the_first_order_of_the_bias():
    """Of log mean exp of K draws N(0, s), which is s^2 / 2 up to -(exp(s^2) - 1) / 2 K."""
    generator = torch.Generator().manual_seed(0)
    number, scale = 16, 0.5
    logs = scale * torch.randn(number, 200_000, generator=generator, dtype=torch.float64)
    exact = 0.5 * scale**2 + math.log(number)
    plain = (logs.logsumexp(0) - exact).mean().item()
    corrected = (log_integral(logs, 5) - exact).mean().item()
    assert plain == pytest.approx(-(math.exp(scale**2) - 1) / (2 * number), rel=0.15)
    assert abs(corrected) < 0.15 * abs(plain)


def test_draws_are_reproducible_and_leave_the_stream():
    before = torch.get_rng_state()
    draws = normal_draws(256, 2, LIKE)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws, normal_draws(256, 2, LIKE))
    torch.testing.assert_close(draws.std(0), torch.ones(2).double(), rtol=0.03, atol=0)
