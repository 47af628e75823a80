# SPDX-License-Identifier: Apache-2.0
"""Factors of covariances, and normal draws by their precision, against dense matrices."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops import matrices as small_matrices
from pyro_implicit.ops.matrices import (
    LinearTerm,
    eigenbasis,
    from_standard,
    from_symmetric_root,
    root_of_inverse,
    to_standard,
    to_symmetric_root,
)


def test_a_root_is_found_where_float32_does_not_converge(monkeypatch):
    torch.manual_seed(0)
    half = torch.randn(2, 4, 4)
    hessian = -(half @ half.mT) - torch.eye(4)
    expected, _ = root_of_inverse(hessian)
    eigh = torch.linalg.eigh

    def only_double(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", only_double)
    found, is_concave = root_of_inverse(hessian)
    assert found.dtype == torch.float32 and is_concave.all()
    torch.testing.assert_close(found @ found.mT, expected @ expected.mT)
    torch.testing.assert_close(found @ found.mT, -hessian.inverse())


@pytest.fixture(params=[3, 6], ids=["written out", "by LAPACK"])
def given(request):
    """x, a root of the precision, and t: three of each."""
    torch.manual_seed(0)
    size = request.param
    rows = torch.randn(2, 3, size, dtype=torch.float64).requires_grad_()
    root = torch.randn(3, size, size, dtype=torch.float64).requires_grad_()
    return rows[0], root, rows[1]


def of_root(standard, root, linear):
    precision = root @ root.mT + torch.eye(root.shape[-1], dtype=root.dtype)
    return from_standard(standard, precision, linear)


def test_they_have_the_mean_and_the_covariance(given):
    _, root, linear = given
    precision = root @ root.mT + torch.eye(root.shape[-1])
    basis = torch.cat([0 * root[0, :1], torch.eye(root.shape[-1])])
    for one, known in zip(precision, linear, strict=True):
        values, log_det = from_standard(basis, one, known)
        assert torch.allclose(values[0], torch.linalg.solve(one, known))
        found = (values[1:] - values[0]).mT
        assert torch.allclose(found @ found.mT, torch.linalg.inv(one))
        assert torch.allclose(log_det.sum(-1), found.slogdet()[1].expand(len(basis)))
        assert torch.allclose(to_standard(values, one, known), basis, atol=1e-12)


def test_gradients_and_second_derivatives(given):
    assert torch.autograd.gradcheck(of_root, given)
    assert torch.autograd.gradgradcheck(of_root, given)


def test_one_at_a_time_is_all_at_once(given):
    def total(standard, root, linear):
        values, log_det = of_root(standard, root, linear)
        return values.square().sum() + (values * log_det).sum()

    together = torch.autograd.grad(torch.func.vmap(total)(*given).sum(), given)
    for row in range(3):
        alone = [one[row].detach().requires_grad_() for one in given]
        found = torch.autograd.grad(total(*alone), alone)
        for one, other in zip(found, together, strict=True):
            assert torch.allclose(one, other[row])
    standard, root, linear = given
    shared = torch.func.vmap(of_root, in_dims=(0, None, 0))(standard, root[0], linear)
    for one, other in zip(shared, of_root(standard, root[0].expand_as(root), linear), strict=True):
        assert torch.allclose(one, other)


def test_where_there_is_no_factor_others_have_theirs(given):
    standard, root, linear = given
    precision = (root @ root.mT).detach()
    bad = precision.index_fill(0, torch.tensor(1), torch.nan).requires_grad_()
    values, log_det = from_standard(standard, bad, linear)
    if standard.shape[-1] > 4:  # LAPACK's factor of this is not NaN
        negative = precision.index_copy(0, torch.tensor([1]), -precision[1:2])
        assert from_standard(standard, negative, linear)[0][1].isnan().all()
    assert values[1].isnan().all() and values[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(log_det[[0, 2]].sum(), bad)
    assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_against_lapack(size):
    torch.manual_seed(size)
    root = torch.randn(2, 5, size, size, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(size)
    vector = torch.randn(2, 5, size, dtype=torch.float64)
    factor = small_matrices.cholesky(matrix)
    assert torch.allclose(factor, torch.linalg.cholesky(matrix), rtol=1e-10, atol=1e-12)
    for triangle, upper in ((factor, False), (factor.mT, True)):
        expected = torch.linalg.solve(triangle, vector)
        found = small_matrices.solve_triangular(triangle, vector, upper=upper)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    expected = torch.einsum("...ij,...jk->...ik", matrix, root[..., :2])
    assert torch.allclose(small_matrices.product(matrix, root[..., :2]), expected)


def test_gradients():
    torch.manual_seed(0)
    root = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def solved(root):
        factor = small_matrices.cholesky(root @ root.mT + torch.eye(3))
        return small_matrices.solve_triangular(factor, root[0], upper=False)

    assert torch.autograd.gradcheck(solved, root)


@pytest.mark.parametrize("rank", [2, 5])
def test_the_map_is_that_of_the_symmetric_root(rank):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    root = randn(5, rank)
    vectors, values = eigenbasis(root @ root.mT, 1e-9)
    assert vectors.shape == (5, rank)
    assert torch.allclose((vectors * values) @ vectors.mT, root @ root.mT)
    factors = torch.tensor([0.5, 3.0], dtype=torch.float64).unsqueeze(-1)
    gains, inner, outer = factors.square() * values, randn(2, rank), randn(2, 5)
    outer = outer - outer @ vectors @ vectors.mT
    linear, standard = LinearTerm(inner, outer), randn(2, 5)
    found, log_det = from_symmetric_root(standard, vectors, gains, linear)
    for row in range(2):
        precision = torch.eye(5, dtype=torch.float64) + factors[row] ** 2 * root @ root.mT
        half_values, half_vectors = torch.linalg.eigh(precision)
        inverse_root = (half_vectors * half_values.rsqrt()) @ half_vectors.mT
        mean = torch.linalg.solve(precision, vectors @ inner[row] + outer[row])
        assert torch.allclose(found[row], inverse_root @ standard[row] + mean)
        assert torch.allclose(log_det[row], -0.5 * precision.logdet())
    assert torch.allclose(to_symmetric_root(found, vectors, gains, linear), standard)
