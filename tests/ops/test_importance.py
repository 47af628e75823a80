# SPDX-License-Identifier: Apache-2.0
"""Smoothed importance weights against ArviZ and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pyro_implicit.ops.importance import pareto_smoothed


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_as_arviz(scale):
    arviz = pytest.importorskip("arviz")
    generator = torch.Generator().manual_seed(int(10 * scale))
    log_weights = scale * torch.randn(2000, generator=generator, dtype=torch.float64)
    expected, khat = arviz.psislw(log_weights.numpy())
    found = pareto_smoothed(log_weights)
    assert found.khat == pytest.approx(float(khat), abs=1e-6)
    np.testing.assert_allclose(found.weights.log().numpy(), expected, rtol=0, atol=1e-6)


def test_the_tail_index():
    """Of Pareto weights whose index is .4."""
    errors = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(400, generator=generator, dtype=torch.float64)
        weights = uniform**-0.4
        errors.append(abs(pareto_smoothed(weights.log()).khat - 0.4))
    assert torch.tensor(errors).mean() < 0.15


def test_even_weights_and_few():
    even = pareto_smoothed(torch.full((50,), -3.0))
    assert even.khat == 0.0 and even.efficiency == pytest.approx(1.0)
    few = pareto_smoothed(torch.tensor([0.0, -1.0, -math.inf]))
    assert few.khat == math.inf
    torch.testing.assert_close(
        few.weights, torch.tensor([1.0, math.exp(-1), 0.0]).double() / 1.36788, rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("bad", [[-math.inf] * 3, [0.0, math.nan], [math.inf, 0.0]])
def test_refused(bad):
    with pytest.raises(ValueError, match="not all of them -inf"):
        pareto_smoothed(torch.tensor(bad))
