# SPDX-License-Identifier: Apache-2.0
"""Mixtures of normals and annealed weights, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from pyro_implicit.ops.annealing import (
    NormalMixture,
    next_power,
    stratified_errors,
)

DIM, NUMBER = 3, 4


@pytest.fixture
def mixture() -> NormalMixture:
    root = 0.3 * torch.randn(NUMBER, DIM, DIM, dtype=torch.float64)
    scale_tril = torch.linalg.cholesky(root @ root.mT + torch.eye(DIM).double())
    loc = 2 * torch.randn(NUMBER, DIM, dtype=torch.float64)
    return NormalMixture.of(torch.randn(NUMBER, dtype=torch.float64), loc, scale_tril)


def torchs(mixture):
    parts = MultivariateNormal(mixture.loc, scale_tril=mixture.scale_tril)
    return MixtureSameFamily(Categorical(logits=mixture.log_weights), parts)


def test_density_and_gradient_are_those_of_torch(mixture):
    points = 2 * torch.randn(50, DIM, dtype=torch.float64).requires_grad_()
    expected = torchs(mixture).log_prob(points)
    (slope,) = torch.autograd.grad(expected.sum(), points)
    log_prob, score = mixture.score(points.detach())
    torch.testing.assert_close(log_prob, expected.detach())
    torch.testing.assert_close(score, slope)
    torch.testing.assert_close(mixture.log_joint(points.detach()).logsumexp(-1), log_prob)


def test_white_coordinates_of_each_component(mixture):
    label = torch.arange(40) % NUMBER
    white = torch.randn(40, DIM, dtype=torch.float64).requires_grad_()
    points = mixture.to_points(white, label)
    by_hand = mixture.loc[label] + (mixture.scale_tril[label] @ white.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(points, by_hand)
    torch.testing.assert_close(mixture.to_white(points, label), white)
    gradient = torch.randn_like(points)
    (expected,) = torch.autograd.grad(points, white, gradient)
    torch.testing.assert_close(mixture.pull_back(gradient, label), expected)


def test_adapted_is_a_step_of_expectation_maximisation(mixture):
    points = 2 * torch.randn(500, DIM, dtype=torch.float64)
    weights = torch.rand(500, dtype=torch.float64)
    weights = weights / weights.sum()
    shares = mixture.log_joint(points).softmax(-1) * weights.unsqueeze(-1)
    found = mixture.adapted(points, weights, known=0.0)
    torch.testing.assert_close(found.log_weights.exp(), shares.sum(0))
    for k in range(NUMBER):
        own = shares[:, k] / shares[:, k].sum()
        loc = own @ points
        cov = (points - loc).mT @ (own.unsqueeze(-1) * (points - loc))
        torch.testing.assert_close(found.loc[k], loc)
        torch.testing.assert_close(found.scale_tril[k] @ found.scale_tril[k].mT, cov)
    kept = mixture.adapted(points, weights, known=1e12)
    torch.testing.assert_close(kept.loc, mixture.loc)
    torch.testing.assert_close(kept.scale_tril, mixture.scale_tril)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e9])
def test_the_next_power_has_the_wanted_effective_sample_size(scale):
    log_ratio = scale * torch.randn(1000, dtype=torch.float64)
    log_weights = torch.randn(1000, dtype=torch.float64).log_softmax(0)
    power = next_power(log_ratio, log_weights, 0.25, 0.8)
    weights, change = log_weights.exp(), ((power - 0.25) * log_ratio).exp()
    size = (weights @ change) ** 2 / (weights @ change.square())
    assert power == 1.0 if scale == 1e-3 else math.isclose(size, 0.8, abs_tol=0.01)


def test_errors_of_stratified_sums():
    """Two strata of 2,000 and 8,000 origins, whose particles have 1 to 3 copies."""
    stratum = torch.cat([torch.zeros(2000), torch.ones(8000)]).long()
    origin = torch.arange(10_000).repeat_interleave(torch.arange(10_000) % 3 + 1)
    sums = torch.randn(10_000, 2, dtype=torch.float64) * torch.tensor([1.0, 5.0])
    sums = sums * (1 + stratum).unsqueeze(-1) + 100 * stratum.unsqueeze(-1)
    terms = sums[origin] / (origin % 3 + 1).unsqueeze(-1)
    expected = math.sqrt(2000 + 4 * 8000) * torch.tensor([1.0, 5.0]).double()
    found = stratified_errors(terms, origin, stratum)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
