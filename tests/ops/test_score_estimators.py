# SPDX-License-Identifier: Apache-2.0
"""Score estimators against the equations they solve, explicit sums, and Gaussians."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_implicit.ops import imq_kernel, median_bandwidth, rbf_kernel
from pyro_implicit.ops.score_estimators import (
    gaussian_entropy,
    kernel_stein_discrepancy,
    spectral_score,
    stein_score,
)
from tests.largest_tensor import LargestTensor

pytestmark = pytest.mark.usefixtures("double")


def kernel_value(kernel, x, y, bandwidth):
    return kernel(x.unsqueeze(0), y.unsqueeze(0), bandwidth).squeeze()


def explicit_slopes(kernel, x):
    """The sums of gradients, one pair of points at a time."""
    bandwidth = median_bandwidth(x)
    slopes = torch.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            xj = x[j].clone().requires_grad_()
            kernel_value(kernel, xj, x[i].clone(), bandwidth).backward()
            slopes[i] += xj.grad
    return slopes


@pytest.mark.parametrize("kernel", [rbf_kernel, imq_kernel])
def test_stein_score_satisfies_its_normal_equations(kernel):
    """Stein's identity, asked of the samples, up to the ridge."""
    x = torch.randn(7, 3) * torch.tensor([1.0, 2.0, 0.5])
    score = stein_score(x, 0.02, kernel)
    gram = kernel(x, x, median_bandwidth(x))
    residual = gram @ score + explicit_slopes(kernel, x)
    torch.testing.assert_close(residual, -0.02 * 7 * score, rtol=1e-10, atol=1e-12)


def test_stein_score_is_that_of_smoothed_functions():
    """GFSF in the form of its paper, -D' K^-1, is the limit of a small ridge."""
    x = torch.linspace(-2, 2, 6).unsqueeze(-1) + 0.1 * torch.randn(6, 2)
    gram = rbf_kernel(x, x, median_bandwidth(x))
    smoothed = -(explicit_slopes(rbf_kernel, x).T @ torch.linalg.inv(gram)).T
    torch.testing.assert_close(stein_score(x, 1e-13), smoothed, rtol=1e-6, atol=1e-6)


def explicit_spectral(x, points, num_eigen, kernel):
    """Algorithm 1 of the paper with sums over points and autograd of each eigenfunction."""
    n, bandwidth = len(x), median_bandwidth(x)
    gram = kernel(x, x, bandwidth)
    values, vectors = torch.linalg.eigh(gram)

    def eigenfunction(point, j):
        terms = [vectors[i, j] * kernel_value(kernel, point, x[i], bandwidth) for i in range(n)]
        return math.sqrt(n) / values[j] * sum(terms)

    score = torch.zeros_like(points)
    for j in range(n - num_eigen, n):
        coefficient = torch.zeros(x.shape[-1])
        for i in range(n):
            point = x[i].clone().requires_grad_()
            coefficient -= torch.autograd.grad(eigenfunction(point, j), point)[0] / n
        for row, point in enumerate(points):
            score[row] += coefficient * eigenfunction(point, j)
    return score


@pytest.mark.parametrize("kernel", [rbf_kernel, imq_kernel])
@pytest.mark.parametrize("num_eigen", [1, 3])
def test_spectral_score_is_its_algorithm(kernel, num_eigen):
    x, points = torch.randn(8, 2) * torch.tensor([1.0, 3.0]), torch.randn(4, 2)
    found = spectral_score(x, points, num_eigen, kernel=kernel)
    expected = explicit_spectral(x, points, num_eigen, kernel)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        spectral_score(x, num_eigen=num_eigen), spectral_score(x, x, num_eigen)
    )


def test_spectral_threshold_counts_the_largest_eigenvalues():
    x = torch.randn(30, 2)
    values = torch.linalg.eigvalsh(rbf_kernel(x, x, median_bandwidth(x))).flip(0)
    shares = values.cumsum(0) / values.sum()
    for threshold in (0.5, 0.9, 0.99):
        needed = int((shares < threshold).sum()) + 1
        torch.testing.assert_close(
            spectral_score(x, threshold=threshold), spectral_score(x, num_eigen=needed)
        )


def test_all_eigenfunctions_give_the_stein_score():
    x = torch.linspace(-2, 2, 6).unsqueeze(-1) + 0.1 * torch.randn(6, 2)
    expected = stein_score(x, 1e-13)
    torch.testing.assert_close(spectral_score(x, num_eigen=6), expected, rtol=1e-6, atol=1e-6)


CORRELATED = 0.5 * torch.eye(5, dtype=torch.float64) + 0.5
GAUSSIANS = {
    "1-d": MultivariateNormal(torch.tensor([2.0]).double(), torch.tensor([[4.0]]).double()),
    "5-d": MultivariateNormal(torch.arange(5.0).double(), CORRELATED),
}


def relative_error(estimator, q, num_samples):
    """Squared error over that of the estimate zero, a mean of 3 sets."""
    errors = []
    for _ in range(3):
        x = q.sample((num_samples,))
        exact = -(x - q.mean) @ q.precision_matrix
        errors.append((estimator(x) - exact).square().sum() / exact.square().sum())
    return sum(errors).item() / 3


@pytest.mark.parametrize("estimator", [stein_score, spectral_score])
@pytest.mark.parametrize("name", GAUSSIANS)
@pytest.mark.parametrize("seed", range(2))
def test_error_on_gaussians(estimator, name, seed):
    torch.manual_seed(seed)
    few, many = (relative_error(estimator, GAUSSIANS[name], n) for n in (60, 500))
    assert many < 0.15
    assert many < 0.6 * few


def test_spectral_score_at_new_points():
    x, points = torch.randn(500, 2), torch.rand(50, 2) * 2 - 1
    torch.testing.assert_close(spectral_score(x, points), -points, rtol=0, atol=0.7)
    assert (spectral_score(x, points) + points).square().mean() < 0.05


def test_units_and_origin():
    """Of x / 100 + 5 the score is 100 times that of x."""
    x = torch.randn(20, 3)
    for estimator in (stein_score, spectral_score):
        torch.testing.assert_close(estimator(x / 100 + 5), 100 * estimator(x), rtol=1e-5, atol=1e-5)


def test_batched_equals_looped():
    x = torch.randn(2, 3, 12, 4) * torch.tensor([1.0, 5.0, 0.2])[:, None, None]
    points = torch.randn(2, 3, 5, 4)
    scores = torch.randn(2, 3, 12, 4)
    for function, arguments in [
        (stein_score, (x,)),
        (spectral_score, (x,)),
        (spectral_score, (x, points)),
        (kernel_stein_discrepancy, (x, scores)),
        (gaussian_entropy, (x,)),
        (lambda s: gaussian_entropy(s, "full"), (x,)),
    ]:
        found = function(*arguments)
        for i in range(2):
            for j in range(3):
                expected = function(*(a[i, j] for a in arguments))
                torch.testing.assert_close(found[i, j], expected, rtol=1e-8, atol=1e-9)


def test_scores_carry_no_gradient_and_work_without_grad_mode():
    x = torch.randn(10, 2, requires_grad=True)
    for estimator in (stein_score, spectral_score):
        found = estimator(x)
        assert not found.requires_grad
        with torch.no_grad():
            assert estimator(x).equal(found)
        assert estimator(x.detach().float()).dtype == torch.float32


def test_memory_is_that_of_gram_matrix_and_samples():
    x, score = torch.randn(20, 50, requires_grad=True), torch.randn(20, 50)
    with LargestTensor() as largest:
        stein_score(x)
        spectral_score(x)
        kernel_stein_discrepancy(x, score).backward()
    assert largest.numel == 20 * 50


def test_equal_samples_have_finite_scores():
    for estimator in (stein_score, spectral_score):
        assert estimator(torch.ones(5, 2)).isfinite().all()


def explicit_discrepancy(x, score):
    """The Stein kernel by autograd of one pair of points at a time."""
    bandwidth, dim = median_bandwidth(x.detach()), x.shape[-1]
    total = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            a, b = (x[k].detach().clone().requires_grad_() for k in (i, j))
            value = kernel_value(rbf_kernel, a, b, bandwidth)
            da, db = torch.autograd.grad(value, (a, b), create_graph=True)
            mixed = sum(torch.autograd.grad(da[k], b, retain_graph=True)[0][k] for k in range(dim))
            total += score[i] @ score[j] * value + score[i] @ db + score[j] @ da + mixed
    return total / len(x) ** 2


def test_kernel_stein_discrepancy_is_its_double_sum():
    x, score = torch.randn(6, 3) + 10, torch.randn(6, 3)
    found = kernel_stein_discrepancy(x, score)
    torch.testing.assert_close(found, explicit_discrepancy(x, score).detach(), rtol=1e-9, atol=0)


def dense_discrepancy(x, score, bandwidth):
    delta = x.unsqueeze(-2) - x.unsqueeze(-3)
    squares = delta.square().sum(-1) / bandwidth**2
    slopes = ((score.unsqueeze(-2) - score.unsqueeze(-3)) * delta).sum(-1)
    terms = score @ score.T + (slopes + x.shape[-1] - squares) / bandwidth**2
    return (terms * torch.exp(-squares / 2)).mean()


def test_kernel_stein_discrepancy_gradient():
    """Through the samples and through scores that depend on them; the bandwidth is a constant."""
    x = torch.randn(6, 3, requires_grad=True)
    bandwidth = median_bandwidth(x.detach())
    gradients = []
    for function in (
        kernel_stein_discrepancy,
        lambda x, s: dense_discrepancy(x, s, bandwidth),
    ):
        (gradient,) = torch.autograd.grad(function(x, -x.pow(3) / 3), x)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


def test_kernel_stein_discrepancy_of_the_target_is_its_diagonal():
    """Without the n terms i = j it is unbiased for zero."""
    x = torch.randn(2000, 1)
    off = kernel_stein_discrepancy(x, -x) * 2000 - (
        x.square().mean() + 1 / median_bandwidth(x).square()
    )
    assert abs(off.item()) < 6
    assert kernel_stein_discrepancy(x, -2 * x) > 0.1


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_gaussian_entropy_is_unbiased(covariance):
    scale_tril = torch.tensor([[1.0, 0.0, 0.0], [0.7, 2.0, 0.0], [-0.5, 0.3, 0.5]])
    if covariance == "diagonal":
        scale_tril = scale_tril.diag().diag()
    q = MultivariateNormal(torch.zeros(3), scale_tril=scale_tril)
    found = gaussian_entropy(q.sample((5, 4000)).transpose(0, 1), covariance)
    error = found.std() / math.sqrt(4000)
    assert abs((found.mean() - q.entropy()).item()) < 4 * error
    assert error < 0.02


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: stein_score(x, 0.0), "ridge must be positive, but got 0.0"),
        (lambda x: spectral_score(x, num_eigen=0), "num_eigen must be from 1 to 4, but got 0"),
        (lambda x: spectral_score(x, num_eigen=5), "num_eigen must be from 1 to 4, but got 5"),
        (lambda x: spectral_score(x, threshold=0.0), "threshold must be above 0"),
        (lambda x: spectral_score(x[:1]), "at least 2 samples"),
        (lambda x: gaussian_entropy(x, "full"), "needs at least 6 samples"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.randn(4, 5))
