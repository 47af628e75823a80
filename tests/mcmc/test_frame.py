# SPDX-License-Identifier: Apache-2.0
"""Whitening frames: the moments they take over, and their gradients."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.mcmc.frame import estimate_frame, independent_draws

KINDS = ["diagonal", "low-rank", "full"]


def correlated(count, dim, strength=5.0):
    axis = torch.ones(dim, dtype=torch.double) / dim**0.5
    draws = torch.randn(count, dim, dtype=torch.double)
    draws = draws + strength * torch.randn(count, 1, dtype=torch.double) * axis
    return 3 + draws * torch.logspace(-2, 2, dim, dtype=torch.double)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_and_gradients(kind):
    torch.manual_seed(0)
    frame = estimate_frame(correlated(500, 6), kind)
    white = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
    points = frame.to_points(white)
    torch.testing.assert_close(frame.to_white(points), white)
    gradient = torch.randn_like(white)
    (expected,) = torch.autograd.grad((points * gradient).sum(), white)
    torch.testing.assert_close(frame.pull_back(gradient), expected)


@pytest.mark.parametrize("kind", ["low-rank", "full"])
def test_whitens(kind):
    torch.manual_seed(0)
    frame = estimate_frame(correlated(4000, 20), kind)
    eigenvalues = torch.linalg.eigvalsh(frame.to_white(correlated(20_000, 20)).T.cov())
    assert 0.7 < eigenvalues.min() and eigenvalues.max() < 1.4


def test_low_rank_leaves_noise_alone_and_frees_variances_of_it():
    torch.manual_seed(0)
    noise = torch.randn(200, 400, dtype=torch.double)
    assert estimate_frame(noise, "low-rank").directions is None
    frame = estimate_frame(correlated(200, 400, strength=20.0), "low-rank")
    # In units of the other axes the common one has variance 1 + 20².
    assert frame.stretch.shape == (1,) and abs(frame.stretch.item() ** 2 / 401 - 1) < 0.4


@pytest.mark.parametrize("correlation", [0.9, -0.9])
def test_low_rank_leaves_noise_of_correlated_draws_alone(correlation):
    """Chains that move slowly, or from side to side as HMC does."""
    torch.manual_seed(0)
    paths = [torch.randn(50, 400, dtype=torch.double)]
    for _ in range(19):
        noise = torch.randn(50, 400, dtype=torch.double)
        paths.append(correlation * paths[-1] + (1 - correlation**2) ** 0.5 * noise)
    draws = torch.stack(paths)
    assert estimate_frame(draws.flatten(0, 1), "low-rank").directions is not None
    independent = independent_draws(draws)
    # The largest eigenvalue of 20 such correlations is 11.4.
    assert abs(independent / (1000 / 11.4) - 1) < 0.15
    frame = estimate_frame(draws.flatten(0, 1), "low-rank", independent=independent)
    assert frame.directions is None
    assert independent_draws(torch.randn(20, 50, 400)) > 850


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_and_constant_draws(kind, dtype):
    draws = torch.randn(9, 12, dtype=dtype)
    draws[:, 3] = 2.0
    draws[:, 4] *= torch.finfo(dtype).tiny / 100  # weights of dead units, after much decay
    frame = estimate_frame(draws, kind)
    assert (frame.scale[3:5] == 1).all() and all(
        part.dtype == dtype for part in frame if part is not None
    )
    assert frame.to_white(draws).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_coordinate_that_does_not_vary_keeps_its_unit_among_many_draws(kind):
    """Nothing is shrunk there, which would give it one."""
    torch.manual_seed(0)
    draws = torch.randn(512, 3)
    draws[:, 1] = 5.1
    draws[:, 2] *= 1e-40
    frame = estimate_frame(draws, kind)
    moved = frame.to_points(torch.eye(3)) - frame.loc
    torch.testing.assert_close(moved[1:], torch.eye(3)[1:])
    assert abs(moved[0, 0] - 1) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_draws_that_are_not_finite(kind):
    draws = torch.randn(50, 3)
    draws[7, 1] = torch.nan
    with pytest.raises(ValueError, match="finite draws. Cure"):
        estimate_frame(draws, kind)
