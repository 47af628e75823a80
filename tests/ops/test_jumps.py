# SPDX-License-Identifier: Apache-2.0
"""Jumps of densities with slopes, walls and smooth ends."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops.jumps import jump_share
from pyro_implicit.ops.policy import JUMPS

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("height", [0.0, 0.1])
def test_a_slope_is_no_jump(height):
    """Over the shortest steps, a slope of a million nats per sd is more than the nats of a jump."""
    torch.manual_seed(0)
    slope = 1e6
    assert slope * JUMPS.step / 2**JUMPS.num_halvings > 10 * JUMPS.least_jump
    draws = torch.randn(500, 1)

    def score(points):
        jump = torch.where(points > 0, height, 0.0)
        return (slope * points + jump).squeeze(-1), torch.full_like(points, slope)

    share = jump_share(draws, score)
    assert share == 0.0 if height == 0 else share > 0.02


def test_rounding_of_positions_is_no_jump():
    """In single precision, a slope of a million nats turns it into tenths of a nat."""
    torch.manual_seed(0)
    draws = torch.randn(500, 1, dtype=torch.float32)

    def score(points):
        return 1e3 * (1e3 * points).sin().squeeze(-1), 1e6 * (1e3 * points).cos()

    assert jump_share(draws, score) == 0.0

    def steeper(points):  # whose gradients times positions overflow
        value, slope = score(points)
        return 1e31 * value, 1e31 * slope

    assert jump_share(100 * draws, steeper) == 0.0


@pytest.mark.parametrize("outside", [0.0, torch.nan])
@pytest.mark.parametrize(("shape", "jumps"), [(1.0, True), (3.0, False)])
def test_the_end_of_a_support_is_a_jump_unless_the_density_vanishes(shape, jumps, outside):
    torch.manual_seed(0)
    law = torch.distributions.Gamma(shape, 1.0, validate_args=False)
    draws = law.sample((2000, 1))

    def score(u):
        inside = (u > 0).squeeze(-1)
        log_prob = torch.where(inside, law.log_prob(u.abs()).squeeze(-1), -torch.inf)
        return log_prob, torch.where(inside[:, None], (shape - 1) / u - 1, outside)

    share = jump_share(draws, score)
    assert share > 0.03 if jumps else share == 0
