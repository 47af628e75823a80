# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from pyro_implicit.diagnostics import (
    distances,
    maximum_mean_discrepancy,
    sliced_wasserstein,
    sliced_wasserstein_floor,
    sliced_wasserstein_interval,
    whiten,
)
from pyro_implicit.diagnostics.distances import pairwise_distances

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_sliced_wasserstein_of_shifted_gaussians(dim):
    shift = torch.linspace(1.0, 2.0, dim)
    expected = shift.norm() / dim**0.5
    x, y = torch.randn(2, 4000, dim)
    exact_shift = sliced_wasserstein(x[:20], x[:20] + shift, num_projections=20_000)
    independent = sliced_wasserstein(x, y + shift)
    torch.testing.assert_close(exact_shift, expected, rtol=0.015, atol=0.0)
    torch.testing.assert_close(independent, expected, rtol=0.08, atol=0.0)


def test_sliced_wasserstein_of_scaled_gaussians():
    # Between u.x and 1.7 u.x it is 0.7 sqrt(E[(u.x)^2]), and E_u[(u.x)^2] = |x|^2 / dim.
    x = torch.randn(50, 3) * torch.tensor([0.5, 1.0, 3.0])
    expected = 0.7 * x.square().mean().sqrt()
    distance = sliced_wasserstein(x, 1.7 * x.flip(0), num_projections=20_000)
    torch.testing.assert_close(distance, expected, rtol=0.015, atol=0.0)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(6, 6), (6, 4), (4, 6), (5, 7), (1, 3)])
def test_unequal_numbers_of_draws_are_exact(p, sizes):
    n, m = sizes
    x, y = torch.randn(n, 1), torch.randn(m, 1)
    # Repeating each draw equally often leaves an empirical distribution as it is.
    common = np.lcm(n, m)
    x_sorted = np.sort(np.repeat(x.numpy()[:, 0], common // n))
    y_sorted = np.sort(np.repeat(y.numpy()[:, 0], common // m))
    expected = (np.abs(x_sorted - y_sorted) ** p).mean() ** (1 / p)
    assert sliced_wasserstein(x, y, num_projections=3, p=p).item() == pytest.approx(expected)


def test_sliced_wasserstein_uses_unit_directions():
    x, y = torch.randn(50, 4), torch.randn(30, 4)
    directions = torch.randn(20, 4, generator=torch.Generator().manual_seed(3)).numpy()
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    squares = []
    for u in directions:
        a, b = np.sort(x.numpy() @ u).repeat(3), np.sort(y.numpy() @ u).repeat(5)
        squares.append(((a - b) ** 2).mean())
    assert sliced_wasserstein(x, y, num_projections=20, seed=3).item() == pytest.approx(
        np.sqrt(np.mean(squares))
    )


def test_sliced_wasserstein_gradient():
    x, y = torch.randn(8, 3), torch.randn(6, 3)

    def squared(value):
        return sliced_wasserstein(x, value, num_projections=11).square()

    assert torch.autograd.gradcheck(squared, y.requires_grad_())
    line = torch.tensor([[2.0], [0.0]], requires_grad=True)
    sliced_wasserstein(torch.tensor([[0.5], [1.0]]), line).square().backward()
    # Sorted pairs: 0 with 0.5 and 2 with 1; the derivative of a mean of squared differences.
    torch.testing.assert_close(line.grad, torch.tensor([[1.0], [-0.5]]))


def test_chunks_do_not_change_the_distance(monkeypatch):
    x, y = torch.randn(40, 3), torch.randn(30, 3)
    whole = sliced_wasserstein(x, y, num_projections=50)
    monkeypatch.setattr(distances, "MAX_ENTRIES", 500)
    torch.testing.assert_close(sliced_wasserstein(x, y, num_projections=50), whole)


@pytest.mark.parametrize(
    "function",
    [
        sliced_wasserstein,
        lambda x, y, seed=0: sliced_wasserstein_floor(x, seed=seed),
        lambda x, y, seed=0: maximum_mean_discrepancy(x, y, max_rows=20, seed=seed),
    ],
)
def test_reproducible_without_touching_the_global_generator(function):
    x, y = torch.randn(60, 3), torch.randn(50, 3)
    before = torch.get_rng_state()
    first = function(x, y)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(77)
    assert function(x, y) == first
    assert function(x, y, seed=1) != first


@pytest.mark.parametrize("num_samples", [None, 400])
@pytest.mark.parametrize("dim", [2, 5])
def test_floor_agrees_with_independent_full_sets(num_samples, dim):
    scale = torch.linspace(1.0, 3.0, dim)
    truths, floors = [], []
    for _ in range(50):
        reference = torch.randn(1600, dim) * scale
        other = torch.randn(num_samples or 1600, dim) * scale
        truths.append(sliced_wasserstein(other, reference, num_projections=20))
        floors.append(sliced_wasserstein_floor(reference, num_samples, num_projections=20))
    truth, floor = (torch.stack(values).square().mean().sqrt() for values in (truths, floors))
    torch.testing.assert_close(floor, truth, rtol=0.15, atol=0.0)


@pytest.mark.parametrize("dim", [3, 400])
def test_pairwise_distances_far_from_the_origin(dim):
    """As NumPy in double precision, with more than 25 points: ``cdist`` then expands."""
    x, y = (20_000 + 0.1 * torch.randn(n, dim).float() for n in (60, 50))
    a, b = x.double().numpy(), y.double().numpy()
    expected = np.sqrt(np.square(a[:, None] - b).sum(-1))
    np.testing.assert_allclose(pairwise_distances(x, y).numpy(), expected, rtol=1e-5)
    assert pairwise_distances(x, y).dtype == torch.float32


def test_distances_far_from_the_origin():
    """A shift of both sets changes nothing, in float32 neither."""
    x, y = (0.125 * torch.randint(-9, 9, (n, 3)).float() for n in (60, 50))
    for function in (sliced_wasserstein, maximum_mean_discrepancy):
        near, far = function(x, y), function(x + 20_000, y + 20_000)
        torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-6)


def test_floor_of_correlated_draws():
    """By the effective size, which is known: that of as many independent draws."""
    reference = torch.randn(1600, 3)
    whole, some = (
        sliced_wasserstein_floor(reference, 400, effective_size=size) for size in (None, 400)
    )
    torch.testing.assert_close(some / whole, torch.tensor((2 / 400) / (1 / 400 + 1 / 1600)).sqrt())


@pytest.mark.parametrize("shift", [0.0, 0.6])
def test_interval_covers_the_distance_of_the_distributions(shift):
    """Of a shift s along one of d coordinates it is s / sqrt(d); the second set is worth half."""
    dim, inside, above = 3, 0, 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(300, dim, generator=generator)
        x[:, 0] += shift
        y = torch.randn(150, dim, generator=generator).repeat(2, 1)
        low, high = sliced_wasserstein_interval(x, y, effective_size=150)
        inside += low <= shift / dim**0.5 <= high
        above += low > 0
        assert low <= sliced_wasserstein(x, y) and high < 1
    assert inside >= 9  # a binomial(10, 0.95) is below with a probability of 0.09; seeds are fixed
    assert above == 0 if shift == 0 else above >= 5


def test_interval_of_equal_sets():
    x = torch.randn(100, 2)
    low, high = sliced_wasserstein_interval(x, x)
    assert low == 0 and 0 < high < 0.5
    assert sliced_wasserstein_interval(torch.ones(9, 2), torch.ones(9, 2)) == (0.0, 0.0)
    # A point mass and another one: no noise.
    low, high = sliced_wasserstein_interval(torch.ones(9, 1), torch.zeros(9, 1))
    assert low == pytest.approx(1, abs=2e-3) and high == pytest.approx(1, abs=2e-3)


def test_interval_uses_a_distance_that_one_direction_explains(monkeypatch):
    """Noise that cancels the difference in 6 % of the resamples, and is large elsewhere."""
    x = torch.randn(100, 2)
    y = x + 0.1  # every projection is shifted by a constant
    draw = torch.Generator().manual_seed(0)

    def resampled(projected, generator):
        noise = torch.randn(200, 100, projected.shape[-1], generator=draw)
        if resampled.calls:
            return torch.zeros_like(noise)
        resampled.calls += 1
        shift = distances._quantiles(x @ directions.mT) - distances._quantiles(y @ directions.mT)
        noise[:12] = -2 * shift
        return noise

    resampled.calls = 0
    directions = distances._directions(x, 32, torch.Generator().manual_seed(0))
    monkeypatch.setattr(distances, "_resampled_quantiles", resampled)
    low, high = sliced_wasserstein_interval(x, y)
    # Three times the distance; that of the large noise is 1.
    assert low == 0 and high == pytest.approx(0.3, rel=0.05)


def test_mmd_against_a_double_loop():
    x = torch.randn(7, 3, requires_grad=True)
    y = torch.randn(5, 3) + 0.5
    pooled = torch.cat([x, y]).detach()
    pairs = [(pooled[i] - pooled[j]).norm() for i in range(12) for j in range(i)]
    bandwidth = torch.stack(pairs).median()

    def k(a, b):
        return torch.exp(-(a - b).square().sum() / (2 * bandwidth**2))

    expected = (
        sum(k(x[i], x[j]) for i in range(7) for j in range(7) if i != j) / 42
        + sum(k(y[i], y[j]) for i in range(5) for j in range(5) if i != j) / 20
        - 2 * sum(k(a, b) for a in x for b in y) / 35
    )
    actual = maximum_mean_discrepancy(x, y)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x)[0], torch.autograd.grad(expected, x)[0]
    )


def test_mmd_is_unbiased_and_sees_a_difference():
    same = torch.stack([maximum_mean_discrepancy(*torch.randn(2, 50, 2)) for _ in range(200)])
    assert same.mean().abs() < 3 * same.std() / 200**0.5
    assert same.min() < 0 < same.max()
    assert maximum_mean_discrepancy(torch.randn(50, 2), torch.randn(50, 2) + 1) > same.max()


def test_mmd_reduces_large_sets_to_a_random_subset():
    # In order, the first rows would be all zeros, and the sets would look equal.
    x = torch.cat([torch.zeros(500, 1), torch.ones(500, 1)])
    y = torch.zeros(1000, 1)
    assert maximum_mean_discrepancy(x, y, max_rows=100) > 0.1
    assert maximum_mean_discrepancy(x[:100], y[:100], max_rows=100) == 0.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_whiten(sign):
    factor = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [-1.0, 0.3, 0.1]])
    reference = sign * (torch.randn(500, 3) @ factor.mT + torch.tensor([1.0, 2.0, 3.0]))
    white = whiten(reference, reference)
    torch.testing.assert_close(white.mean(dim=0), torch.zeros(3), rtol=0, atol=1e-12)
    torch.testing.assert_close(white.mT.cov(), torch.eye(3))
    x = torch.randn(4, 3)
    cholesky = torch.linalg.cholesky(reference.mT.cov())
    expected = torch.linalg.solve(cholesky, (x - reference.mean(dim=0)).mT).mT
    torch.testing.assert_close(whiten(x, reference), expected)


def test_whiten_in_float32_stands_strong_correlation():
    reference = (torch.randn(2000, 2) @ torch.tensor([[1.0, 1.0], [0.0, 1e-3]])).float()
    torch.testing.assert_close(
        whiten(reference, reference).mT.cov(), torch.eye(2).float(), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("reference", [torch.ones(50, 2), torch.eye(2)])
def test_whiten_refuses_a_singular_reference(reference):
    with pytest.raises(ValueError, match="singular. Cure: leave out constant or duplicated"):
        whiten(torch.zeros(3, 2, dtype=reference.dtype), reference)


@pytest.mark.parametrize("function", [sliced_wasserstein, maximum_mean_discrepancy, whiten])
def test_shapes_that_do_not_fit(function):
    with pytest.raises(ValueError, match=r"\(5, 2\) and \(5, 3\). Cure: flatten the sites"):
        function(torch.zeros(5, 2), torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"same dim, but got \(5,\)"):
        function(torch.zeros(5), torch.zeros(5, 1))


def test_too_few_draws():
    with pytest.raises(ValueError, match="reference has 3 draws.*Cure: more draws"):
        sliced_wasserstein_floor(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="but got 1 of x and 3 of y. Cure: more draws"):
        maximum_mean_discrepancy(torch.zeros(1, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="x or y is empty.*Cure: at least one draw"):
        sliced_wasserstein(torch.zeros(0, 2), torch.zeros(3, 2))


def test_float32_stays_float32():
    x, y = torch.randn(2, 30, 3).float()
    results = (
        sliced_wasserstein(x, y),
        sliced_wasserstein_floor(x),
        maximum_mean_discrepancy(x, y),
    )
    assert {value.dtype for value in results} == {torch.float32}
