# SPDX-License-Identifier: Apache-2.0
"""Whitening frames: the moments they take over, and their gradients."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.mcmc.frame import estimate_frame, fisher_frame, frame_at

KINDS = ["diagonal", "low-rank", "full"]


def precision_of(variance):
    """A covariance with these eigenvalues in random directions, and its inverse."""
    axes = torch.linalg.qr(torch.randn(len(variance), len(variance), dtype=torch.double)).Q
    return axes * variance @ axes.T, axes / variance @ axes.T


def frame_of(draws, kind):
    """The frame of draws of independent normals of width 1, by whose scores a low rank is told."""
    return frame_at(draws, kind, lambda points: (points.sum(-1), -points), 5)


def condition(frame, covariance):
    """The condition number of a covariance in white coordinates."""
    root = (frame.to_points(torch.eye(len(frame.loc)).to(frame.loc)) - frame.loc).mT
    return torch.linalg.cond(torch.linalg.solve(root, torch.linalg.cholesky(covariance))) ** 2


def correlated(count, dim, strength=5.0):
    axis = torch.ones(dim, dtype=torch.double) / dim**0.5
    draws = torch.randn(count, dim, dtype=torch.double)
    draws = draws + strength * torch.randn(count, 1, dtype=torch.double) * axis
    return 3 + draws * torch.logspace(-2, 2, dim, dtype=torch.double)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_and_gradients(kind):
    torch.manual_seed(0)
    draws = correlated(500, 6)
    precision = torch.linalg.inv(draws.mT.cov())
    frame = frame_at(draws, kind, lambda points: (points.sum(-1), -points @ precision), 100)
    assert frame.kind == kind
    if kind != "diagonal":
        assert condition(frame, draws.mT.cov()) < 1.2
    white = torch.randn(4, 6, dtype=torch.double, requires_grad=True)
    points = frame.to_points(white)
    torch.testing.assert_close(frame.to_white(points), white)
    gradient = torch.randn_like(white)
    (expected,) = torch.autograd.grad((points * gradient).sum(), white)
    torch.testing.assert_close(frame.pull_back(gradient), expected)


def test_a_full_frame_whitens():
    torch.manual_seed(0)
    frame = estimate_frame(correlated(4000, 20), "full")
    eigenvalues = torch.linalg.eigvalsh(frame.to_white(correlated(20_000, 20)).T.cov())
    assert 0.7 < eigenvalues.min() and eigenvalues.max() < 1.4


@pytest.mark.parametrize("correlation", [0.0, 0.95, -0.95])
def test_scores_tell_a_normal_law_from_few_and_correlated_draws(correlation):
    """200 draws of sixty dimensions, of which three are wide and three are narrow."""
    torch.manual_seed(0)
    variance = torch.cat([torch.tensor([400.0, 50.0, 9.0, 0.1, 0.02, 1e-3]), torch.ones(54)])
    covariance, precision = precision_of(variance.double())
    root = torch.linalg.cholesky(covariance)
    noise = [torch.randn(60, dtype=torch.double)]
    for _ in range(199):
        new = torch.randn(60, dtype=torch.double)
        noise.append(correlation * noise[-1] + (1 - correlation**2) ** 0.5 * new)
    draws = torch.stack(noise) @ root.mT + 5
    frame = fisher_frame(draws, -(draws - 5) @ precision)
    diagonal = frame._replace(directions=None, stretch=None)
    before, after = (condition(one, covariance) for one in (diagonal, frame))
    assert before > 1e4 and after < 8


def test_noise_has_no_axes():
    torch.manual_seed(0)
    draws, scores = torch.randn(2, 400, 200, dtype=torch.double)
    assert fisher_frame(draws, -draws).directions is None
    stretch = fisher_frame(draws, scores).stretch  # of a density that is far from normal
    assert stretch is None or (1 / 1.6 < stretch.min() and stretch.max() < 1.6)


def test_few_draws_show_an_axis():
    torch.manual_seed(0)
    axis = torch.ones(400, 1, dtype=torch.double) / 20  # (1, ..., 1): units are equal
    draws = torch.randn(100, 400, dtype=torch.double)
    draws = draws + 20 * torch.randn(100, 1, dtype=torch.double) @ axis.mT
    frame = fisher_frame(draws, draws @ axis @ axis.mT * (400 / 401) - draws)
    assert frame.stretch.shape == (1,)
    covariance = torch.eye(400, dtype=torch.double) + 400 * axis @ axis.mT  # condition 401
    # The rest is the error of the units, of 100 draws.
    assert condition(frame, covariance) < 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_and_constant_draws(kind, dtype):
    draws = torch.randn(9, 12, dtype=dtype)
    draws[:, 3] = 2.0
    draws[:, 4] *= torch.finfo(dtype).tiny / 100  # weights of dead units, after much decay
    frame = frame_of(draws, kind)
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
    frame = frame_of(draws, kind)
    moved = frame.to_points(torch.eye(3)) - frame.loc
    torch.testing.assert_close(moved[1:], torch.eye(3)[1:])
    assert abs(moved[0, 0] - 1) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_draws_that_are_not_finite(kind):
    draws = torch.randn(50, 3)
    draws[7, 1] = torch.nan
    with pytest.raises(ValueError, match="finite draws. Cure"):
        fisher_frame(draws, draws) if kind == "low-rank" else estimate_frame(draws, kind)
