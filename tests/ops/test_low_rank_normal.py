# SPDX-License-Identifier: Apache-2.0
"""Normal vectors by the eigenvectors of their precision, against dense matrices."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops.low_rank_normal import (
    LinearTerm,
    eigenbasis,
    from_symmetric_root,
    to_symmetric_root,
)


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
    told, standard = LinearTerm(inner, outer), randn(2, 5)
    found, log_det = from_symmetric_root(standard, vectors, gains, told)
    for row in range(2):
        precision = torch.eye(5, dtype=torch.float64) + factors[row] ** 2 * root @ root.mT
        half_values, half_vectors = torch.linalg.eigh(precision)
        inverse_root = (half_vectors * half_values.rsqrt()) @ half_vectors.mT
        mean = torch.linalg.solve(precision, vectors @ inner[row] + outer[row])
        assert torch.allclose(found[row], inverse_root @ standard[row] + mean)
        assert torch.allclose(log_det[row], -0.5 * precision.logdet())
    assert torch.allclose(to_symmetric_root(found, vectors, gains, told), standard)
