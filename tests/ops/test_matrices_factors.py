# SPDX-License-Identifier: Apache-2.0
"""Factors of covariances."""

import torch

from pyro_implicit.ops.matrices import root_of_inverse


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
