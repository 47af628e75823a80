# SPDX-License-Identifier: Apache-2.0
"""What bounds the step of minibatch chains, and when they leave draws."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.mcmc.kernels.step_choice import Probe, choose_step, judge, probe
from pyro_implicit.mcmc.minibatch_chains import StepSchedule


def test_heat_balances_what_is_left_of_the_start():
    choice = choose_step(Probe(2.0, 20.0, 0), 4000)
    assert choice.limit == "balance" and math.isclose(choice.heat * choice.relaxations, 1.0)
    assert math.isclose(choose_step(Probe(2.0, 20.0, 0), 16_000).heat, choice.heat / 2)


def test_short_runs_stay_cool():
    choice = choose_step(Probe(2.0, 1e4, 0), 1000)
    assert choice.limit == "heat" and math.isclose(choice.heat, 0.5) and choice.relaxations < 2


def test_stable_steps():
    choice = choose_step(Probe(100.0, 0.0, 0), 10)
    assert choice.limit == "stability" and math.isclose(choice.step_size, 0.1)
    assert judge(Probe(100.0, 2.0, 0), 10, 0.5, "user").heat == 0.5


@pytest.mark.parametrize("dim", [5, 300_000])
def test_probe(dim):
    """Also with more dimensions than a square matrix in memory can have."""
    torch.manual_seed(0)
    noises = [
        2.0 * torch.randn(dim) if dim < 10 else torch.tensor(2.0 * (-1) ** k) for k in range(4)
    ]
    position = torch.zeros(10, 1).expand(10, dim)
    scores = [lambda z, noise=noise: (torch.zeros(len(z)), noise - 3 * z) for noise in noises]
    found = probe(scores, position)
    assert abs(found.curvature - 3) < 1e-3 and found.noise > 0
    assert found.gradients == 4 + 2 * 7


@pytest.mark.parametrize("steps", [1, 7, 100, 2000])
def test_draws_and_steps(steps):
    schedule = StepSchedule(steps, round(0.3 * steps), max_draws=20)
    kept = [step for step in range(steps) if schedule.keeps(step)]
    factors = [schedule.factor(step) for step in range(steps)]
    assert 1 <= len(kept) <= 20 and min(kept) >= schedule.warmup
    assert max(factors) == 1 and min(factors) > 0
    if steps == 2000:
        assert len(kept) >= 15 and kept[-1] == steps - 1
        assert factors[0] == 4 / 600 and schedule.windows == {150, 300, 600}
