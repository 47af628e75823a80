# SPDX-License-Identifier: Apache-2.0
"""Draws of guides in a target's coordinates."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density.target import Target
from pyro_implicit.guides.sampler import Sampler


def model(shift, scale=1.0):
    pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("b", dist.LogNormal(0.0, 1.0))
    pyro.sample("y", dist.Normal(shift, scale), obs=torch.tensor(0.0))


def guide(shift, scale):
    pyro.sample("b", dist.Delta(torch.as_tensor(shift * scale)))
    pyro.sample("a", dist.Delta(torch.tensor([shift, scale]), event_dim=1))


def test_the_guide_gets_the_arguments_of_the_target():
    target = Target(model, 2.0, model_kwargs={"scale": 3.0})
    draws = Sampler(target, guide).draw(4)
    # The order is the model's, and the positive site is a logarithm.
    expected = torch.stack([torch.tensor(2.0), torch.tensor(3.0), torch.tensor(6.0).log()])
    torch.testing.assert_close(draws, expected.expand(4, 3))


def test_given_draws_are_taken_in_turn():
    target = Target(model, 2.0)
    given = {"b": torch.tensor([1.0, 4.0]), "a": torch.arange(4.0).reshape(2, 2)}
    sampler = Sampler(target, given)
    assert sampler.num_given == 2 and Sampler(target, guide).num_given is None
    rows = torch.tensor([[0.0, 1.0, 0.0], [2.0, 3.0, math.log(4.0)]])
    torch.testing.assert_close(sampler.draw(3), rows[[0, 1, 0]])


def test_draws_outside_of_a_support_are_refused_or_nan():
    target = Target(model, 2.0)
    a = torch.zeros(2, 2)
    rows = Sampler(target, {"a": a, "b": torch.tensor([1.0, -1.0])}).draw(2)
    assert rows.isfinite().all(-1).tolist() == [True, False]
    with pytest.raises(ValueError, match="'b' are -1, outside of its support"):
        Sampler(target, {"a": a, "b": torch.tensor([-1.0, -1.0])}).draw(2)
