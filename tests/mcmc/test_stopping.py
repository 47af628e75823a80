# SPDX-License-Identifier: Apache-2.0
"""The stopping rule: what it lets pass and what not."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.mcmc import stopping
from pyro_implicit.mcmc.convergence import Convergence
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.mcmc.stopping import Drift, drift, open_errors, slowest, tracked


def powers(values):
    values = torch.cat([values, torch.randn_like(values[..., :1])], -1).double()
    return torch.stack([values, values**2, values**4])


def drift_of(values):
    return drift(powers(values), torch.arange(values.shape[-1] + 1))


@pytest.mark.parametrize("seed", range(5))
def test_independent_draws_are_settled(seed):
    torch.manual_seed(seed)
    assert drift_of(torch.randn(200, 256, 5)).is_settled()


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_or_an_sd_that_moves_is_not(seed):
    torch.manual_seed(seed)
    ramp = torch.linspace(0, 1, 200)[:, None, None]
    mean = drift_of(torch.randn(200, 256, 1) + 0.3 * ramp)
    assert not mean.is_settled() and 0.055 < mean.mean < 0.1
    spread = drift_of(torch.randn(200, 256, 1) * (1 + 0.3 * ramp))
    assert not spread.is_settled() and 0.05 < spread.sd < 0.1 and spread.mean < 0.05


def test_chains_that_do_not_move_are_not_settled_though_nothing_drifts():
    torch.manual_seed(0)
    fixed = torch.randn(1, 256, 1)
    stuck = drift_of(fixed.expand(60, -1, -1) + 0.01 * torch.randn(60, 256, 1))
    assert stuck.r_hat > 5 and not stuck.is_settled() and not stuck.is_steady()
    assert drift_of(fixed.expand(60, -1, -1)).r_hat > 1.3
    scale = drift_of(torch.randn(60, 256, 1) * (0.2 + fixed.abs()))
    assert scale.r_hat > 1.1


@pytest.mark.parametrize("memory", [5.0, 20.0, 60.0])
def test_the_error_of_chains_that_forget_slowly(memory):
    """Autoregressive chains that start a third of an sd off; their bias is known."""
    torch.manual_seed(0)
    rate, values = math.exp(-1 / memory), [torch.randn(4000, 1) + 1 / 3]
    for _ in range(59):
        noise = math.sqrt(1 - rate**2) * torch.randn(4000, 1)
        values.append(rate * values[-1] + noise)
    bias = torch.stack(values).mean().item()
    found = drift_of(torch.stack(values))
    # At most: two standard errors of the drift are in it.
    assert 0.7 * bias < found.mean < 1.5 * bias + 0.05
    assert found.is_settled() == (memory == 5.0)


@pytest.mark.parametrize("steps", [6, 30, 90, 200, 400])
def test_stated_errors_are_those_of_chains_that_spread_from_a_point(steps):
    """An autoregressive process of 100 steps of memory starts one sd from its mean."""
    torch.manual_seed(0)
    rate, values = math.exp(-1 / 100), [torch.ones(8000, 1)]
    for _ in range(steps):
        values.append(rate * values[-1] + math.sqrt(1 - rate**2) * torch.randn(8000, 1))
    stretch = torch.stack(values[1 + steps // 3 :])
    stated = drift_of(stretch).stated()
    bias, sd = stretch.mean().item(), stretch.sub(stretch.mean()).square().mean().sqrt().item()
    # R-hat of a path of steps differs from that of a continuous path, and the sd is about its mean.
    assert stated.mean > 0.95 * bias and stated.sd > 0.9 * (1 - sd) - 0.01
    assert open_errors(stated.r_hat)[0] == pytest.approx(bias, abs=0.06)


@pytest.mark.parametrize(("between", "r_hat"), [(0.0, 1.0), (1.0, 2**0.5), (5.0, 6**0.5)])
def test_stated_errors_follow_known_variances(between, r_hat):
    torch.manual_seed(0)
    centre = torch.randn(1, 4000, 1)
    values = torch.randn(400, 4000, 1)
    values = values - values.mean(0) + between**0.5 * (centre - centre.mean()) / centre.std()
    found = drift_of(values)
    assert found.r_hat == pytest.approx(r_hat, abs=0.005)
    # Nothing drifts, but chains that spread freely from a point have the last R-hat.
    assert max(found.mean, found.sd) < 0.1
    expected = {0.0: (0.0, 0.0), 1.0: (0.10, 0.01), 5.0: (1.0, 1.0)}[between]
    assert found.stated()[:2] == pytest.approx(
        [max(pair) for pair in zip(expected, found[:2], strict=True)], abs=0.03
    )
    assert Drift(2.0, 3.0, r_hat, 8).stated() == Drift(2.0, 3.0, r_hat, 8)


def test_steady_is_what_does_not_drift_though_it_remembers():
    torch.manual_seed(0)
    fixed = torch.randn(1, 256, 1)
    found = drift_of(fixed + torch.randn(400, 256, 1))
    assert found.is_steady() and not found.is_settled() and 1.3 < found.r_hat < 1.6
    assert not drift_of(3 * fixed + torch.randn(400, 256, 1)).is_steady()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_worst_of_many_is_not_held_against_them(seed):
    """One of a thousand drifts far by noise: as many draws settle them as settle one."""
    torch.manual_seed(seed)
    assert 0.02 < drift_of(torch.randn(30, 256, 1000)).mean < 0.05  # 0.06 and more as it stands
    moving = torch.randn(30, 256, 1000)
    moving[15:, :, 0] += 0.2
    assert drift_of(moving).mean > 0.07


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_heavy_tail_may_be_off_by_more_but_not_by_any(seed):
    torch.manual_seed(seed)
    scale = torch.ones(120, 1, 1)
    scale[60:] = 1.5
    light, heavy = (drift_of(torch.randn(120, 256, 1) ** power * scale).sd for power in (1, 3))
    assert 0.4 < heavy / light < 0.7


def test_few_draws_are_noise():
    torch.manual_seed(0)
    assert not drift_of(torch.randn(8, 16, 1)).is_settled()


def test_constants_are_settled():
    assert drift_of(torch.zeros(60, 256, 2)).is_settled()


def test_quantities_of_one_tensor_share_their_unit():
    torch.manual_seed(0)
    wide = torch.randn(200, 256, 1)
    tiny = 1e-3 * (torch.randn(200, 256, 1) + torch.linspace(0, 1, 200)[:, None, None])
    values = powers(torch.cat([wide, tiny], -1))
    assert drift(values, torch.tensor([0, 0, 1])).is_settled()
    assert not drift(values, torch.tensor([0, 1, 2])).is_settled()


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


def test_r_hat_of_a_few_chains_by_hand():
    """Means 0, 2 and 4, of variance 4."""
    means = torch.tensor([[0.0], [2.0], [4.0]])
    found = stopping._r_hat(means, means.square() + 0.5, torch.tensor([0]))
    torch.testing.assert_close(found, torch.tensor([(1 + 4 / 0.5) ** 0.5]))


def drift_of_history(values, ranges):
    history = History(capacity=400)
    for row in values:
        history.append(row, tracked([*row.unbind(-1)], torch.randn(len(row))), ranges)
    return history.drift()


@pytest.mark.parametrize("seed", range(5))
def test_tails_without_a_variance_settle_if_outliers_are_clamped(seed):
    torch.manual_seed(seed)
    draws = torch.distributions.Cauchy(3.0, 2.0).sample((300, 64, 5))
    assert drift_of_history(draws, 6.0).is_settled()
    assert not drift_of_history(draws, math.inf).is_settled()
    apart = draws + 8 * torch.randn(64, 5)  # which their tails hide
    assert drift_of_history(apart, 6.0).r_hat > 1.1 > drift_of_history(apart, math.inf).r_hat
    normal = torch.randn(300, 64, 5)
    torch.manual_seed(seed)
    clamped = drift_of_history(normal, 6.0)
    torch.manual_seed(seed)
    assert clamped == drift_of_history(normal, math.inf)


def test_the_log_density_is_not_clamped():
    """Chains that are lost have outliers of it, and must not be hidden."""
    history = History(capacity=8)
    for log_density in (torch.randn(64), torch.full((64,), -1e6)):
        history.append(torch.zeros(64, 1), tracked([torch.randn(64)], log_density), 6.0)
    assert history.powers[1][0, :, -1].abs().min() > 1e5 > history.powers[1][0, :, 0].abs().max()


@pytest.mark.parametrize(
    ("settled", "r_hat", "gradients", "is_extended", "ends"),
    [
        (None, 1.1, 9000, False, False),
        ("steady", 1.5, 300, False, True),
        ("converged", 1.1, 300, False, False),  # (1.1^2 - 1) 4,000 = 840 of 256 chains
        ("converged", 1.1, 449, False, False),
        ("converged", 1.1, 450, False, True),  # half of the warm-up's 300
        ("converged", 1.03, 300, False, True),  # 244 of 256 chains
        (None, 1.04, 9000, True, True),
        (None, 1.06, 9000, True, False),
        (None, 1.04, 9000, False, False),
    ],
)
def test_chains_end_before_their_budget(settled, r_hat, gradients, is_extended, ends):
    found = Convergence(16, Drift(0.01, 0.01, r_hat), settled)
    assert found.may_end(gradients - 300, 300, 256, DEFAULT.stopping, is_extended) is ends


def test_the_slowest_may_have_slow_squares():
    """Chains in one of two scales agree on their mean."""
    torch.manual_seed(0)
    steady, scales = torch.randn(2, 64, 200)
    scales = scales * torch.tensor([1.0, 4.0]).repeat(32).unsqueeze(-1)
    apart = torch.randn(64, 200) + 0.3 * torch.randn(64, 1)
    assert slowest(torch.stack([steady, apart, scales], -1)) == 2
    assert slowest(torch.stack([steady, apart], -1)) == 1


def test_words_of_errors_that_have_no_bound():
    small = Drift(mean=0.2, sd=0.05, r_hat=1.1)
    assert str(small) == "means may be off by 0.20 sd, sds by 5.0%, R-hat 1.100"
    annealed = str(small._replace(is_annealed=True))
    end = "sds by 5.0%, or more if annealing missed a region, as of 1219 independent draws"
    assert annealed.endswith(end)
    failed = str(small._replace(failed=0.255))
    assert failed.endswith(
        "sds by 5.0%, or more where trajectories fail (25.5% of them), R-hat 1.100"
    )
    assert str(Drift(0.2, 0.05, 3.0).stated()) == "means may be off by 1 sd or more, R-hat 3.000"
