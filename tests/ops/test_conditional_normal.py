# SPDX-License-Identifier: Apache-2.0
"""Draws of a normal posterior, in closed form."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops.conditional_normal import from_standard, to_standard


@pytest.fixture
def given():
    """x, the scales, W and t."""
    torch.manual_seed(0)
    root = torch.randn(4, 4, dtype=torch.float64)
    rows = torch.randn(3, 3, 4, dtype=torch.float64).requires_grad_()
    return rows[0], rows[1], root @ root.mT, rows[2]


def test_they_have_the_mean_and_the_covariance(given):
    _, scale, precision, told = given
    basis = torch.cat([torch.zeros(1, 4), torch.eye(4)]).to(scale)
    for row in range(3):
        one = scale[row].expand(5, 4), precision, told[row].expand(5, 4)
        values, log_det = from_standard(basis, *one)
        matrix = torch.eye(4) + scale[row].diag() @ precision @ scale[row].diag()
        assert torch.allclose(values[0], torch.linalg.solve(matrix, told[row]))
        root = (values[1:] - values[0]).mT
        assert torch.allclose(root @ root.mT, torch.linalg.inv(matrix))
        assert torch.allclose(log_det.sum(-1), root.slogdet()[1].expand(5))
        assert torch.allclose(to_standard(values, *one), basis, atol=1e-12)


def test_gradients(given):
    standard, scale, precision, told = given
    assert torch.autograd.gradcheck(
        lambda one, other, third: from_standard(one, other, precision, third),
        (standard, scale, told),
    )


def test_where_there_is_no_factor_others_have_theirs(given):
    standard, scale, precision, told = given
    bad = scale.detach().index_fill(0, torch.tensor(1), torch.inf).requires_grad_()
    values, log_det = from_standard(standard, bad, precision, told)
    assert values[1].isnan().all() and values[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(log_det[[0, 2]].sum(), bad)
    assert gradient[[0, 2]].isfinite().all()
