# SPDX-License-Identifier: Apache-2.0
"""The stopping rule: what it lets pass and what not."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.mcmc.history import History
from pyro_implicit.mcmc.stopping import drift, tracked


def powers(values):
    values = torch.cat([values, torch.randn_like(values[..., :1])], -1).double()
    return torch.stack([values, values**2, values**4])


def drift_of(values):
    return drift(powers(values), torch.arange(values.shape[-1] + 1))


@pytest.mark.parametrize("seed", range(5))
def test_independent_draws_are_settled(seed):
    torch.manual_seed(seed)
    assert drift_of(torch.randn(200, 256, 5)).settled


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_or_an_sd_that_moves_is_not(seed):
    torch.manual_seed(seed)
    ramp = torch.linspace(0, 1, 200)[:, None, None]
    mean = drift_of(torch.randn(200, 256, 1) + 0.2 * ramp)
    assert not mean.settled and 0.07 < mean.mean < 0.17
    spread = drift_of(torch.randn(200, 256, 1) * (1 + 0.2 * ramp))
    assert not spread.settled and 0.06 < spread.sd < 0.15 and spread.mean < 0.05


def test_chains_that_do_not_move_are_not_settled_though_nothing_drifts():
    torch.manual_seed(0)
    fixed = torch.randn(1, 256, 1)
    stuck = drift_of(fixed.expand(60, -1, -1) + 0.01 * torch.randn(60, 256, 1))
    assert stuck.mean < 0.05 and stuck.r_hat > 5 and not stuck.settled
    assert drift_of(fixed.expand(60, -1, -1)).r_hat > 1.3
    scale = drift_of(torch.randn(60, 256, 1) * (0.2 + fixed.abs()))
    assert scale.r_hat > 1.1


def test_few_draws_are_noise():
    torch.manual_seed(0)
    assert not drift_of(torch.randn(8, 16, 1)).settled


def test_constants_are_settled():
    assert drift_of(torch.zeros(60, 256, 2)).settled


def test_quantities_of_one_tensor_share_their_unit():
    torch.manual_seed(0)
    wide = torch.randn(200, 256, 1)
    tiny = 1e-3 * (torch.randn(200, 256, 1) + torch.linspace(0, 1, 200)[:, None, None])
    values = powers(torch.cat([wide, tiny], -1))
    assert drift(values, torch.tensor([0, 0, 1])).settled
    assert not drift(values, torch.tensor([0, 1, 2])).settled


def test_history_thins_draws_but_averages_all():
    torch.manual_seed(0)
    history = History(capacity=8)
    values = torch.randn(37, 5, 2)
    for row in values:
        history.append(row, tracked([row], torch.zeros(5)))
    assert len(history.latents) < 8 and history.batch == 8
    assert history.draws()[-1].equal(values[31])
    mean, unit = history._unit
    total = torch.stack([p[0] for p in history.powers]).mean(0)[:, :2]
    expected = ((values[:32] - mean[:2]) / unit[:2]).mean(0)
    torch.testing.assert_close(total, expected.double())
