# SPDX-License-Identifier: Apache-2.0
"""Distributions without checks leave those that they are copies of as they were."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density.model import without_validation


@pytest.mark.parametrize(
    "fn",
    [
        dist.Exponential(torch.ones(2)),
        dist.Exponential(torch.ones(2)).to_event(1),
        dist.LogNormal(torch.zeros(2), 1.0).to_event(1),
        dist.Exponential(torch.ones(2)).to_event(1).mask(torch.tensor(True)),
    ],
)
def test_the_original_goes_on_checking(fn):
    impossible = -torch.ones(2)
    without_validation(fn).log_prob(impossible)
    with pytest.raises(ValueError, match="Expected value argument"):
        fn.log_prob(impossible)
