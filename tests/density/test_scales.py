# SPDX-License-Identifier: Apache-2.0
"""Factors by which models scale their minibatches."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density.scales import DataScales


def model(a, b):
    with pyro.plate("rows", 100, subsample_size=len(a)):
        pyro.sample("a", dist.Normal(0.0, 1.0), obs=a)
    with pyro.plate("columns", 60, subsample_size=len(b)):
        pyro.sample("b", dist.Normal(0.0, 1.0), obs=b)


def test_plates_whose_sizes_change_differently_are_named():
    scales = DataScales(model, (torch.zeros(20), torch.zeros(12)), {})
    assert scales.of((torch.zeros(10), torch.zeros(6))) == 2 * scales.first  # both halved
    with pytest.warns(UserWarning, match="differently for the data 'b' and 'a'.*drop_last"):
        scales.of((torch.zeros(10), torch.zeros(12)))


def test_a_plate_with_all_rows_in_each_step_counts_alike():
    scales = DataScales(model, (torch.zeros(20), torch.zeros(60)), {})
    assert scales.of((torch.zeros(10), torch.zeros(60))) == 2 * scales.first
