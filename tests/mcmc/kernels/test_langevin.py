# SPDX-License-Identifier: Apache-2.0
"""Langevin steps under gradient noise, against the stationary covariances in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.mcmc.kernels import sghmc
from pyro_implicit.mcmc.kernels.step_choice import gradient_noise, largest_curvature


def stationary(precision, noise, step, friction):
    """The variance of z, by iterating the covariance of (z, v) under the linear step."""
    c = math.exp(-friction * step)
    drift = torch.tensor([[1.0, step / 2], [0.0, 1.0]], dtype=torch.float64)
    damp = torch.diag(torch.tensor([1.0, c], dtype=torch.float64))
    kick = torch.tensor([[1.0, 0.0], [-step * precision, 1.0]], dtype=torch.float64)
    move = kick @ drift @ damp @ drift
    entry = kick @ drift @ torch.tensor([0.0, math.sqrt(1 - c**2)], dtype=torch.float64)
    added = torch.outer(entry, entry) + torch.diag(torch.tensor([0.0, step**2 * noise]))
    covariance = torch.eye(2, dtype=torch.float64)
    for _ in range(2000):
        covariance = move @ covariance @ move.T + added
    return covariance[0, 0].item()


@pytest.mark.parametrize(("precision", "noise"), [(1.0, 0.0), (4.0, 0.0), (1.0, 3.0)])
def test_stationary_variance(precision, noise):
    torch.manual_seed(0)
    step, friction = 0.4, 1.0

    def score(z):
        return 0 * z.sum(-1), -precision * z + math.sqrt(noise) * torch.randn_like(z)

    state = sghmc.init(torch.randn(20_000, 1, dtype=torch.float64))
    for _ in range(80):
        state, info = sghmc.step(state, score, sghmc.Settings(step, friction))
    z = state.position
    assert info.num_gradients == 1
    expected = stationary(precision, noise, step, friction)
    assert abs(z.var() / expected - 1) < 4 * math.sqrt(2 / len(z))
    assert noise or math.isclose(expected, 1 / precision, rel_tol=1e-9)
    temperature = 1 + step**2 * noise / (1 - math.exp(-friction * step) ** 2)
    if precision == 1.0:  # the kinetic error of the splitting is of second order
        assert abs(state.velocity.var() / temperature - 1) < 0.06


def test_steps_beyond_the_limit_of_stability_diverge():
    state = sghmc.State(*torch.ones(2, 1, 1, dtype=torch.float64))
    for _ in range(200):
        state, _ = sghmc.step(state, lambda z: (z.sum(-1), -25 * z), sghmc.Settings(0.41, 0.1))
    assert state.position.abs() > 1e3


def test_noise_is_unbiased_with_fewer_minibatches_than_dimensions():
    torch.manual_seed(1)
    sds = torch.tensor([3.0] + [0.5] * 49, dtype=torch.float64)
    found = [gradient_noise(sds * torch.randn(8, 200, 50, dtype=torch.float64)) for _ in range(20)]
    mean = sds.square().mean()
    rms = sds.pow(4).mean().sqrt()
    assert abs(sum(f.mean for f in found) / 20 / mean - 1) < 0.02
    assert abs(sum(f.rms for f in found) / 20 / rms - 1) < 0.05


def test_no_noise():
    noise = gradient_noise(torch.ones(4, 3, 5))
    assert noise.mean == noise.rms == 0


def test_curvature_of_a_quadratic():
    torch.manual_seed(0)
    axes = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q
    matrix = axes * torch.cat([torch.tensor([50.0]), torch.ones(19)]).double() @ axes.T
    found = largest_curvature(lambda z: -z @ matrix, torch.randn(3, 20, dtype=torch.float64))
    assert torch.allclose(found, torch.full_like(found, 50.0), rtol=1e-3)
