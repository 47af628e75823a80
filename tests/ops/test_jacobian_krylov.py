# SPDX-License-Identifier: Apache-2.0
"""Krylov methods against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_implicit.ops import lanczos, log_quadratic_and_solve, smallest_eigenpair

BATCH_SHAPES = [(), (3,), (2, 3)]


def symmetric(values: Tensor) -> Tensor:
    """Matrices ``(*batch, d, d)`` with the eigenvalues ``(*batch, d)`` and random eigenvectors."""
    basis = torch.linalg.qr(torch.randn(values.shape + values.shape[-1:], dtype=values.dtype)).Q
    return (basis * values.unsqueeze(-2)) @ basis.mT


def spectrum(batch_shape: tuple[int, ...], d: int, low: float = 1.0, high: float = 10.0) -> Tensor:
    return low + (high - low) * torch.rand(batch_shape + (d,), dtype=torch.double)


def product(matrix: Tensor):
    return lambda v: (matrix @ v.unsqueeze(-1)).squeeze(-1)


def dense_log(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.log().unsqueeze(-2)) @ vectors.mT


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("d,num_steps", [(1, 1), (6, 1), (6, 4), (12, 12), (30, 12)])
def test_lanczos_projects_the_operator(batch_shape, d, num_steps):
    matrix = symmetric(spectrum(batch_shape, d))
    start = torch.randn(batch_shape + (d,), dtype=torch.double)
    basis, tridiagonal = lanczos(product(matrix), start, num_steps)
    assert basis.shape == batch_shape + (d, num_steps)
    identity = torch.eye(num_steps, dtype=torch.double).expand(basis.mT.shape[:-1] + (num_steps,))
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(basis.mT @ matrix @ basis, tridiagonal, rtol=0, atol=1e-10)
    assert tridiagonal.equal(tridiagonal.triu(-1).tril(1))
    unit_start = start / start.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(basis[..., 0], unit_start, rtol=1e-12, atol=1e-12)
    if num_steps == d:
        torch.testing.assert_close(basis @ tridiagonal @ basis.mT, matrix, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_lanczos_ends_early_on_a_small_krylov_space(dtype, seed):
    """Identity plus rank 3 has Krylov spaces of dimension 4, whatever the number of steps."""
    torch.manual_seed(seed)
    low_rank = torch.randn(2, 10, 3, dtype=dtype)
    matrix = torch.eye(10, dtype=dtype) + low_rank @ low_rank.mT
    start = torch.randn(2, 10, dtype=dtype)
    basis, tridiagonal = lanczos(product(matrix), start, 9)
    tolerance = 1e-3 if dtype == torch.float else 1e-11
    gram = basis.mT @ basis
    # Each further direction is either absent (zero) or one more orthonormal vector.
    present = (gram.diagonal(dim1=-2, dim2=-1) > 0.5).to(dtype)
    torch.testing.assert_close(gram, torch.diag_embed(present), rtol=0, atol=tolerance)
    torch.testing.assert_close(basis.mT @ matrix @ basis, tridiagonal, rtol=0, atol=30 * tolerance)
    assert (present.sum(-1) >= 4).all()
    assert (tridiagonal[..., 3, 4].abs() < 30 * tolerance).all()


def test_lanczos_of_the_identity_has_one_direction():
    basis, tridiagonal = lanczos(lambda v: v, torch.tensor([3.0, 4.0, 0.0]), 3)
    assert basis[:, 1:].equal(torch.zeros(3, 2))
    torch.testing.assert_close(tridiagonal, torch.diag(torch.tensor([1.0, 0.0, 0.0])))


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("d,num_steps", [(1, 5), (2, 2), (15, 15), (40, 30)])
def test_log_quadratic_and_solve_match_dense(batch_shape, d, num_steps):
    matrix = symmetric(spectrum(batch_shape, d))
    probe = torch.randn(batch_shape + (d,), dtype=torch.double)
    log, solution, residual = log_quadratic_and_solve(product(matrix), probe, num_steps)
    expected = (probe * product(dense_log(matrix))(probe)).sum(-1)
    torch.testing.assert_close(log, expected, rtol=1e-9, atol=1e-9)
    expected = torch.linalg.solve(matrix, probe)
    torch.testing.assert_close(solution, expected, rtol=1e-7, atol=1e-7)
    assert residual.shape == batch_shape and (residual < 1e-7).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_log_quadratic_and_solve_after_an_early_end(dtype, seed):
    torch.manual_seed(seed)
    low_rank = torch.randn(10, 3, dtype=dtype)
    matrix = torch.eye(10, dtype=dtype) + low_rank @ low_rank.mT
    probe = torch.randn(10, dtype=dtype)
    log, solution, residual = log_quadratic_and_solve(product(matrix), probe, 10)
    tolerance = 1e-4 if dtype == torch.float else 1e-11
    expected = probe @ dense_log(matrix.double()).to(dtype) @ probe
    torch.testing.assert_close(log, expected, rtol=tolerance, atol=tolerance)
    expected = torch.linalg.solve(matrix, probe)
    torch.testing.assert_close(solution, expected, rtol=tolerance, atol=tolerance)
    assert residual < tolerance


def test_few_steps_are_optimal_and_honest():
    """The solution is the Galerkin one, the quadrature an upper bound, the residual the truth."""
    matrix = symmetric(spectrum((4,), 50, high=1000.0))
    probe = torch.randn(4, 50, dtype=torch.double)
    exact = (probe * product(dense_log(matrix))(probe)).sum(-1)
    before = torch.full((4,), torch.inf, dtype=torch.double)
    for num_steps in (1, 3, 6, 12, 25):
        log, solution, residual = log_quadratic_and_solve(product(matrix), probe, num_steps)
        remainder = product(matrix)(solution) - probe
        torch.testing.assert_close(residual, remainder.norm(dim=-1) / probe.norm(dim=-1))
        basis = lanczos(product(matrix), probe, num_steps)[0]
        galerkin = (basis.mT @ remainder.unsqueeze(-1)).abs().max()
        assert galerkin < 1e-9
        assert (log < before).all() and (log > exact - 1e-9).all()
        before = log


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("d", [1, 2, 3, 40])
def test_smallest_eigenpair_matches_dense(batch_shape, d):
    values = spectrum(batch_shape, d)
    values[..., 0] = 0.5
    matrix = symmetric(values)
    start = torch.randn(batch_shape + (d,), dtype=torch.double)
    value, vector, residual = smallest_eigenpair(product(matrix), start, 300, tolerance=1e-9)
    torch.testing.assert_close(value, values[..., 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(value, torch.linalg.eigvalsh(matrix)[..., 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(vector.norm(dim=-1), torch.ones_like(value))
    dense = torch.linalg.eigh(matrix).eigenvectors[..., 0]
    assert ((vector * dense).sum(-1).abs() > 1 - 1e-6).all()
    assert residual.shape == batch_shape and (residual <= 1e-9).all()


@pytest.mark.parametrize("gap", [0.0, 1e-10, 1e-6, 1e-3])
def test_smallest_eigenpair_repeated_or_clustered(gap):
    values = torch.linspace(2.0, 9.0, 20, dtype=torch.double).repeat(5, 1)
    values[:, :3] = 1 + gap * torch.arange(3, dtype=torch.double)
    matrix = symmetric(values)
    start = torch.randn(5, 20, dtype=torch.double)
    value, vector, residual = smallest_eigenpair(product(matrix), start, 500, tolerance=1e-8)
    assert (residual <= 1e-8).all()
    torch.testing.assert_close(value, torch.ones_like(value), rtol=1e-8 + gap * 1e-2, atol=0)
    assert torch.isfinite(vector).all()


def test_smallest_eigenvalue_falls_from_above_and_the_residual_is_true():
    matrix = symmetric(spectrum((6,), 40, low=0.01, high=10.0))
    start = torch.randn(6, 40, dtype=torch.double)
    exact = torch.linalg.eigvalsh(matrix)[:, 0]
    before = torch.full((6,), torch.inf, dtype=torch.double)
    for num_steps in (0, 1, 2, 3, 5, 10, 20, 40, 80):
        value, vector, residual = smallest_eigenpair(product(matrix), start, num_steps, 0.0)
        assert (value <= before * (1 + 1e-12)).all()
        assert (value >= exact * (1 - 1e-10)).all()
        torch.testing.assert_close((vector * product(matrix)(vector)).sum(-1), value)
        remainder = product(matrix)(vector) - value.unsqueeze(-1) * vector
        torch.testing.assert_close(residual, remainder.norm(dim=-1) / value, rtol=1e-6, atol=1e-9)
        if num_steps <= 3:
            assert (residual > 0.1).all()  # far from converged, and it says so
        before = value


def test_smallest_eigenpair_stops_at_the_tolerance():
    matrix = symmetric(spectrum((4,), 30, low=0.5))
    calls = []

    def operator(v: Tensor) -> Tensor:
        calls.append(None)
        return product(matrix)(v)

    start = torch.randn(4, 30, dtype=torch.double)
    counts = []
    for tolerance in (1e-1, 1e-3, 1e-6):
        calls.clear()
        residual = smallest_eigenpair(operator, start, 2000, tolerance)[2]
        assert (residual <= tolerance).all() and residual.max() > 1e-3 * tolerance
        counts.append(len(calls))
    assert counts[0] < counts[1] < counts[2] < 4 * 2000


def test_smallest_eigenpair_in_float32():
    matrix = symmetric(spectrum((4,), 30, low=0.5)).float()
    start = torch.randn(4, 30)
    value, vector, _ = smallest_eigenpair(product(matrix), start)
    assert value.dtype == vector.dtype == torch.float
    torch.testing.assert_close(value, torch.linalg.eigvalsh(matrix)[:, 0], rtol=1e-4, atol=0)
