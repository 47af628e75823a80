# SPDX-License-Identifier: Apache-2.0
"""The metrics on draws whose distances are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.posteriordb.metrics import distance, floor, measure

SCALES = torch.tensor([[100.0, 0.0, 0.0], [99.0, 5.0, 0.0], [0.0, 0.0, 1e-3]]).double()


def normal(num_draws: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_draws, 3, generator=generator, dtype=torch.float64)


def reference(num_draws: int = 10_000, seed: int = 0) -> Tensor:
    return normal(num_draws, seed) @ SCALES.T + torch.tensor([1e4, 0.0, -3.0]).double()


def mean_direction(dim: int) -> float:
    """The mean of |u_1| over unit vectors u."""
    return math.gamma(dim / 2) / math.gamma((dim + 1) / 2) / math.sqrt(math.pi)


def test_distance_of_a_shift() -> None:
    """In every direction the shift's component; in the white frame it is 2 sds along one axis."""
    draws = reference()
    covariance = torch.cov(draws.T)
    shift = 2 * torch.linalg.cholesky(covariance)[:, 1]
    # 200 random directions: sd of |u_1| about 0.29
    assert distance(draws + shift, draws) == pytest.approx(2 * mean_direction(3), abs=0.16)


def test_distance_of_a_scaling() -> None:
    """W1 of N(0, 1) and N(0, 1.5²) is half of E|N(0, 1)|."""
    draws = reference()
    wide = draws.mean(0) + 1.5 * (draws - draws.mean(0))
    assert distance(wide, draws) == pytest.approx(0.5 * math.sqrt(2 / math.pi), rel=0.02)


def test_distance_does_not_see_units() -> None:
    draws, other = reference(2000), reference(1000, 1)
    units = torch.tensor([1e-4, 7.0, 30.0]).double()
    again = distance(other * units, draws * units)
    assert distance(other, draws) == pytest.approx(again, rel=1e-6)


@pytest.mark.parametrize("num_draws", [None, 100])
def test_floor_is_that_of_fresh_draws(num_draws: int | None) -> None:
    """And not that of rescaled sizes."""
    first, second = (num_draws, 900) if num_draws else (500, 500)
    pairs = [(reference(first, 2 * k + 1), reference(second, 2 * k + 2)) for k in range(50)]
    expected = sum(distance(a, b) for a, b in pairs) / 50
    found = sum(floor(reference(1000, 200 + k), num_draws) for k in range(6)) / 6
    assert found == pytest.approx(expected, rel=0.15)


def test_measure_by_hand() -> None:
    draws = reference()
    stretched = draws * torch.tensor([1.0, 0.5, 3.0]).double()
    stretched[:, 0] -= 0.25 * draws[:, 0].std()
    result = measure(stretched, draws)
    assert result["sd_ratio_min"] == pytest.approx(0.5)
    assert result["sd_ratio_max"] == pytest.approx(3.0)
    # the third coordinate, at -3, moved to -9: 6 in units of 1e-3
    assert result["mean_error"] == pytest.approx(6000, rel=0.02)
    assert result["distance"] == pytest.approx(distance(stretched, draws))
    assert result["distance"] > 1000
    result = measure(draws - 0.25 * draws.std(0), draws)
    assert result["mean_error"] == pytest.approx(0.25)


def test_draws_that_are_not_finite() -> None:
    draws = reference(100)
    broken = draws.clone()
    broken[3, 1], broken[4, 0], broken[4, 2] = math.inf, math.nan, math.nan
    with pytest.raises(ValueError, match="2 of 100 draws are not finite"):
        measure(broken, draws)
