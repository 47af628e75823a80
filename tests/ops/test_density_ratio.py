# SPDX-License-Identifier: Apache-2.0
"""Density ratios against brute force, finite differences and the KL of known Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_implicit.ops import (
    adaptive_log_density,
    fit_density_ratio,
    imq_kernel,
    log_density_ratio,
    rbf_kernel,
    standardize,
)

pytestmark = pytest.mark.usefixtures("double")

DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "reverse"])


def gaussian_kl(dim, loc, scale):
    """KL(N(loc, scale²) || N(0, 1)) in each of dim dimensions."""
    return dim * (0.5 * (scale**2 + loc**2 - 1) - math.log(scale))


@pytest.mark.parametrize("kernel", [rbf_kernel, imq_kernel])
def test_weights_solve_the_regression(kernel):
    """The objective of the docstring, as a quadratic in all weights, solved at once."""
    numerator, denominator = 2 * torch.randn(5, 3), 2 * torch.randn(7, 3)
    ridge = 0.05
    ratio = fit_density_ratio(numerator, denominator, ridge, kernel)
    centers = torch.cat([denominator, numerator])
    assert ratio.centers.equal(centers)
    gram = kernel(centers, centers, ratio.bandwidth)
    gram_d, gram_n = gram[:7], gram[7:]
    quadratic = gram_d.T @ gram_d / 7 + ridge * gram
    expected = torch.linalg.solve(quadratic, gram_n.mean(0))
    torch.testing.assert_close(ratio.weights, expected, rtol=1e-8, atol=1e-10)
    assert ratio.weights[:7].sum() < 0  # alpha, whose sign the paper's eq 6 lost
    torch.testing.assert_close(ratio(centers), gram @ expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("dim", "loc", "scale", "direction", "tolerance"),
    [
        (1, 1.0, 1.0, "forward", 0.06),
        (1, 1.0, 1.0, "reverse", 0.1),
        (1, 0.0, 0.3, "forward", 0.08),
        (1, 0.0, 0.5, "forward", 0.06),
        (1, 0.5, 0.8, "forward", 0.04),
        (1, 0.5, 0.8, "reverse", 0.04),
        (1, 0.0, 1.25, "forward", 0.04),
        (1, 0.0, 1.25, "reverse", 0.05),
        (1, 0.0, 1.4, "reverse", 0.06),
        (5, 0.2, 0.7, "forward", 0.13),
        (5, 0.2, 0.9, "forward", 0.15),
        (5, 0.2, 0.9, "reverse", 0.17),
        (5, 0.2, 1.0, "reverse", 0.13),
    ],
)
def test_kl_of_gaussians_where_the_direction_holds(dim, loc, scale, direction, tolerance):
    q, p = loc + scale * torch.randn(10, 400, dim), torch.randn(10, 400, dim)
    kl = log_density_ratio(q, p, direction).mean()
    assert kl.item() == pytest.approx(gaussian_kl(dim, loc, scale), abs=tolerance)


@pytest.mark.parametrize(
    ("dim", "scale", "direction", "least_error", "other_is_better"),
    [
        (1, 0.3, "reverse", 1.2, True),
        (1, 2.0, "forward", 0.1, False),
        (1, 3.0, "forward", 2.5, True),
        (5, 0.5, "reverse", 3.0, True),
        (5, 2.0, "forward", 2.5, False),
    ],
)
def test_kl_of_gaussians_where_the_ratio_has_no_second_moment(
    dim, scale, direction, least_error, other_is_better
):
    """E_q[(p/q)²] is infinite for q narrower than p/√2, E_p[(q/p)²] for q wider than √2 p."""
    q, p = scale * torch.randn(10, 400, dim), torch.randn(10, 400, dim)
    other = "forward" if direction == "reverse" else "reverse"
    exact = gaussian_kl(dim, 0.0, scale)
    errors = {
        d: (log_density_ratio(q, p, d, clip=1e-8).mean() - exact).abs() for d in (direction, other)
    }
    assert errors[direction] > least_error
    if other_is_better:  # else it is poor, too: its ratio varies too much for 400 draws
        assert errors[direction] > 1.5 * errors[other]


@DIRECTIONS
@pytest.mark.parametrize(("dim", "loc", "scale"), [(1, 1.0, 0.3), (1, 1.0, 2.5), (3, 0.5, 0.5)])
def test_adaptive_entropy_of_gaussians(dim, loc, scale, direction):
    q, normal = loc + scale * torch.randn(10, 400, dim), torch.randn(10, 400, dim)
    entropy = -adaptive_log_density(q, normal, "diagonal", direction).mean()
    exact = dim * (0.5 * math.log(2 * math.pi * math.e) + math.log(scale))
    assert entropy.item() == pytest.approx(exact, abs=0.06 * dim + 0.05)


@pytest.mark.parametrize(("covariance", "tolerance"), [("diagonal", 0.25), ("full", 0.12)])
def test_adaptive_entropy_of_a_correlated_gaussian(covariance, tolerance):
    """The full contrast takes the correlation out; else the ratio makes up 0.8 nats for it."""
    q = MultivariateNormal(torch.ones(2), torch.tensor([[1.0, 0.9], [0.9, 1.0]]))
    draws, normal = q.sample((10, 300)), torch.randn(10, 300, 2)
    entropy = -adaptive_log_density(draws, normal, covariance).mean()
    assert entropy.item() == pytest.approx(q.entropy().item(), abs=tolerance)


def test_adaptive_entropy_of_two_modes():
    """The contrast alone would say 2.57; the ratio must find the gap between the modes."""
    draws = torch.where(torch.rand(10, 300, 1) < 0.5, -3.0, 3.0) + torch.randn(10, 300, 1)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(2)),
        torch.distributions.Normal(torch.tensor([-3.0, 3.0]), 1.0),
    )
    exact = -mixture.log_prob(draws).mean()
    entropy = -adaptive_log_density(draws, torch.randn(10, 300, 1)).mean()
    assert entropy.item() == pytest.approx(exact.item(), abs=0.15)


def finite_differences(function, points, step=1e-6):
    gradient = torch.zeros_like(points)
    for index in range(points.numel()):
        shift = torch.zeros(points.numel())
        shift[index] = step
        shift = shift.reshape(points.shape)
        difference = function(points + shift) - function(points - shift)
        gradient.view(-1)[index] = difference / (2 * step)
    return gradient


@DIRECTIONS
@pytest.mark.parametrize("kernel", [rbf_kernel, imq_kernel])
def test_gradient_flows_through_the_evaluation_points_only(direction, kernel):
    q = (0.5 + 0.9 * torch.randn(8, 2)).requires_grad_()
    p = torch.randn(9, 2, requires_grad=True)
    log_ratio = log_density_ratio(q, p, direction, 0.05, kernel=kernel).sum()
    log_ratio.backward()
    assert p.grad is None
    sign = 1 if direction == "forward" else -1
    pair = (q, p) if direction == "forward" else (p, q)
    ratio = fit_density_ratio(*pair, 0.05, kernel)  # alpha, beta and the centres held
    held = lambda points: sign * ratio(points).clamp(0.01).log().sum()  # noqa: E731
    assert log_ratio.item() == pytest.approx(held(q).item(), rel=1e-12)
    expected = finite_differences(held, q.detach())
    torch.testing.assert_close(q.grad, expected, rtol=1e-5, atol=1e-6)


@DIRECTIONS
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_adaptive_gradient(direction, covariance):
    q = (2 + torch.randn(9, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.5]])).requires_grad_()
    normal = torch.randn(10, 2)
    adaptive_log_density(q, normal, covariance, direction, 0.05).mean().backward()
    white = standardize(q.detach(), covariance)[0]
    sign = 1 if direction == "forward" else -1
    ratio = fit_density_ratio(*(white, normal)[::sign], 0.05)

    def held(points):
        white, log_det = standardize(points, covariance)
        return (
            -0.5 * white.square().sum(-1) + sign * ratio(white).clamp(0.01).log()
        ).mean() - log_det

    expected = finite_differences(held, q.detach())
    torch.testing.assert_close(q.grad, expected, rtol=1e-5, atol=1e-7)


@DIRECTIONS
def test_adaptive_gradient_of_location_and_scale_is_exact(direction):
    """Standardised draws know neither, so no noise of the ratio reaches them."""
    loc = torch.tensor([3.0, -1.0], requires_grad=True)
    factor = torch.tensor([[2.0, 0.0], [-1.5, 0.3]], requires_grad=True)
    draws = loc + torch.randn(50, 2) @ factor.mT
    adaptive_log_density(draws, torch.randn(60, 2), "full", direction).mean().backward()
    torch.testing.assert_close(loc.grad, torch.zeros(2), rtol=0, atol=1e-9)
    # The Cholesky factor of the draws' covariance changes with a lower triangular change of theirs.
    expected = -torch.linalg.inv(factor.detach()).mT
    torch.testing.assert_close(factor.grad.diagonal(), expected.diagonal(), rtol=1e-8, atol=1e-8)

    scale = torch.tensor([2.0, 0.1], requires_grad=True)
    draws = torch.randn(50, 2) * scale
    adaptive_log_density(draws, torch.randn(60, 2), "diagonal", direction).mean().backward()
    torch.testing.assert_close(scale.grad, -1 / scale.detach(), rtol=1e-9, atol=0)


@DIRECTIONS
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_batch_is_a_loop(direction, covariance):
    q, p = 0.5 * torch.randn(2, 3, 30, 2), torch.randn(2, 3, 40, 2)
    batch = log_density_ratio(q, p, direction)
    adaptive = adaptive_log_density(q, p, covariance, direction)
    assert batch.shape == adaptive.shape == (2, 3, 30)
    for i in range(2):
        for j in range(3):
            one = log_density_ratio(q[i, j], p[i, j], direction)
            torch.testing.assert_close(batch[i, j], one, rtol=1e-8, atol=1e-9)
            one = adaptive_log_density(q[i, j], p[i, j], covariance, direction)
            torch.testing.assert_close(adaptive[i, j], one, rtol=1e-8, atol=1e-9)


@DIRECTIONS
@pytest.mark.parametrize("num_samples", [100, 500])
@pytest.mark.parametrize("dim", [1, 5])
def test_single_precision_agrees(direction, num_samples, dim):
    q, p = 100 + 3 * torch.randn(num_samples, dim), torch.randn(num_samples, dim)
    for estimate in (
        lambda x: adaptive_log_density(x, p.to(x.dtype), "diagonal", direction),
        lambda x: log_density_ratio(x, (2 * p + 100).to(x.dtype), direction),
    ):
        results = []
        for dtype in (torch.float64, torch.float32):
            points = q.to(dtype).requires_grad_()
            mean = estimate(points).mean()
            results.append((mean.double(), torch.autograd.grad(mean, points)[0].double()))
        assert results[1][0].item() == pytest.approx(results[0][0].item(), abs=2e-3)
        error = (results[1][1] - results[0][1]).norm() / results[0][1].norm()
        assert error < 0.02


def test_clip():
    q = torch.full((3, 1), 50.0) + torch.arange(3.0).unsqueeze(-1)
    q.requires_grad_()
    log_ratio = log_density_ratio(q, torch.randn(20, 1), "reverse", clip=1e-5)
    torch.testing.assert_close(log_ratio, torch.full((3,), -math.log(1e-5)))
    log_ratio.sum().backward()
    assert (q.grad == 0).all()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_standardize(covariance):
    x = 5 + torch.randn(2, 40, 3) @ torch.randn(3, 3)
    white, log_det = standardize(x, covariance)
    torch.testing.assert_close(white.mean(-2), torch.zeros(2, 3), rtol=0, atol=1e-12)
    for row in range(2):
        cov = torch.cov(x[row].T, correction=0)
        found = torch.cov(white[row].T, correction=0)
        if covariance == "full":
            torch.testing.assert_close(found, torch.eye(3), rtol=0, atol=1e-10)
            expected = 0.5 * cov.logdet()
        else:
            torch.testing.assert_close(found.diagonal(), torch.ones(3))
            expected = 0.5 * cov.diagonal().log().sum()
        torch.testing.assert_close(log_det[row], expected)


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: log_density_ratio(X, X, "backward"), 'direction must be "forward" or "reverse"'),
        (lambda: log_density_ratio(X, X, clip=0.0), "clip must be positive"),
        (lambda: fit_density_ratio(X, X, ridge=0.0), "ridge must be positive"),
        (lambda: standardize(X, "low-rank"), 'covariance must be "diagonal" or "full"'),
        (lambda: standardize(X, "full"), 'at least 5 samples, but got 3.*or use "diagonal"'),
        (lambda: standardize(X[:1]), "at least 2 samples, but got 1"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()
