# SPDX-License-Identifier: Apache-2.0
"""Draws of a normal posterior, in closed form."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops.matrices import from_standard, to_standard


@pytest.fixture(params=[3, 6], ids=["written out", "by LAPACK"])
def given(request):
    """x, a root of the precision, and t: three of each."""
    torch.manual_seed(0)
    size = request.param
    rows = torch.randn(2, 3, size, dtype=torch.float64).requires_grad_()
    root = torch.randn(3, size, size, dtype=torch.float64).requires_grad_()
    return rows[0], root, rows[1]


def of_root(standard, root, told):
    precision = root @ root.mT + torch.eye(root.shape[-1], dtype=root.dtype)
    return from_standard(standard, precision, told)


def test_they_have_the_mean_and_the_covariance(given):
    _, root, told = given
    precision = root @ root.mT + torch.eye(root.shape[-1])
    basis = torch.cat([0 * root[0, :1], torch.eye(root.shape[-1])])
    for one, known in zip(precision, told, strict=True):
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
    def total(standard, root, told):
        values, log_det = of_root(standard, root, told)
        return values.square().sum() + (values * log_det).sum()

    together = torch.autograd.grad(torch.func.vmap(total)(*given).sum(), given)
    for row in range(3):
        alone = [one[row].detach().requires_grad_() for one in given]
        found = torch.autograd.grad(total(*alone), alone)
        for one, other in zip(found, together, strict=True):
            assert torch.allclose(one, other[row])
    standard, root, told = given
    shared = torch.func.vmap(of_root, in_dims=(0, None, 0))(standard, root[0], told)
    for one, other in zip(shared, of_root(standard, root[0].expand_as(root), told), strict=True):
        assert torch.allclose(one, other)


def test_where_there_is_no_factor_others_have_theirs(given):
    standard, root, told = given
    precision = (root @ root.mT).detach()
    bad = precision.index_fill(0, torch.tensor(1), torch.nan).requires_grad_()
    values, log_det = from_standard(standard, bad, told)
    if standard.shape[-1] > 4:  # LAPACK's factor of this is not NaN
        negative = precision.index_copy(0, torch.tensor([1]), -precision[1:2])
        assert from_standard(standard, negative, told)[0][1].isnan().all()
    assert values[1].isnan().all() and values[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(log_det[[0, 2]].sum(), bad)
    assert gradient[[0, 2]].isfinite().all()
