# SPDX-License-Identifier: Apache-2.0
"""Draws in the frame of their own moments, near the resolution of their dtype."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.diagnostics.whitening import CollapsedError, whiten_draws


@pytest.mark.parametrize(("loc", "sd"), [(2000.0, 2e-3), (1e6, 1.0)])
def test_draws_of_a_few_units_in_the_last_place_have_their_moments(loc, sd):
    torch.manual_seed(0)
    exact = loc + sd * torch.randn(2000, 2, dtype=torch.double)
    draws = exact.float()
    whitened = whiten_draws(draws)
    assert all(part.dtype == torch.float32 for part in whitened if part is not None)
    covariance = whitened.white.double().mT.cov()
    torch.testing.assert_close(covariance, torch.eye(2, dtype=torch.double), rtol=0, atol=1e-3)
    spread = whitened.frame.double().norm(dim=0)
    torch.testing.assert_close(spread, exact.std(0), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_draws_and_copies_have_collapsed(dtype):
    torch.manual_seed(0)
    draws = torch.randn(500, 3, dtype=dtype)
    constant = draws.clone()
    constant[:, 1] = 0.1 * constant[:1, 1]
    copied = draws.clone()
    copied[:, 2] = 3 * copied[:, 0] - copied[:, 1]
    for lying in (constant, copied):
        with pytest.raises(CollapsedError, match="hyperplane") as caught:
            whiten_draws(lying)
        assert ("float64" in str(caught.value)) == (dtype == torch.float32)
