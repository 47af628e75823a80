# SPDX-License-Identifier: Apache-2.0
"""Fits of models with latent angles."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import i0, i1

from pyro_implicit import fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import Fit, log_evidence, turns
from pyro_implicit.fitting.turns import find_phases, middle_of_turns

OBSERVED = torch.tensor([3.0, -3.1, -2.9, 2.6, -2.7])
CONCENTRATION = 2.0


def headings(y):
    phi = pyro.sample("phi", dist.VonMises(0.0, 0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.VonMises(phi, CONCENTRATION), obs=y)


@pytest.fixture(scope="module")
def result():
    return fit(headings, "auto", OBSERVED, refine=True, seed=0)


def test_an_angle_at_the_end_of_its_turn_has_the_exact_posterior(result):
    """A von Mises distribution, whose parameters follow from the sum of all directions."""
    cos = 0.5 + CONCENTRATION * OBSERVED.cos().sum()
    sin = CONCENTRATION * OBSERVED.sin().sum()
    loc, concentration = torch.atan2(sin, cos).item(), torch.hypot(cos, sin).item()
    resultant = i1(concentration) / i0(concentration)
    phi = result.sample(2000)["phi"]
    error = (phi - loc).sin().mean() / (phi - loc).sin().std()
    assert abs(error) < 0.1
    assert abs((phi - loc).cos().mean() - resultant) < 0.01
    # The turn lies around the posterior, so that moments mean what they say.
    assert abs(abs(phi.mean()) - abs(loc)) < 0.1
    assert phi.std() < 1.5 / math.sqrt(concentration)
    assert result.num_modes == 1
    norm = [i0(kappa) for kappa in (0.5, *[CONCENTRATION] * len(OBSERVED))]
    expected = math.log(i0(concentration)) - sum(map(math.log, norm))
    expected -= len(OBSERVED) * math.log(2 * math.pi)
    assert abs(log_evidence(result).value - expected) < 0.05
    assert result.diagnose().verdict.startswith("trust")


def test_a_loaded_result_has_the_same_turn(result, tmp_path):
    result.save(tmp_path / "fit.pt")
    again = Fit.load(tmp_path / "fit.pt", headings, OBSERVED)
    latent = torch.linspace(-6.0, 6.0, 20).unsqueeze(-1)
    before, after = (one.target.constrain(latent)["phi"] for one in (result, again))
    assert torch.equal(before, after)
    assert torch.equal(again.target.log_prob(latent), result.target.log_prob(latent))


def test_a_model_that_is_not_periodic_keeps_the_angles_of_its_prior():
    def model(y):
        phi = pyro.sample("phi", dist.VonMises(3.0, 5.0))
        pyro.sample("y", dist.Normal(phi, 0.2), obs=y)

    y = torch.tensor(3.3)
    assert middle_of_turns(Target(model, y), 100, 10.0) == {"phi": None}
    phi = fit(model, "auto", y, seed=0).sample(2000)["phi"]
    assert -math.pi <= phi.min() and phi.max() < math.pi
    grid = torch.linspace(-math.pi, math.pi, 20_001)[:-1].double()
    log_p = dist.VonMises(3.0, 5.0).log_prob(grid) + dist.Normal(grid, 0.2).log_prob(y)
    weights = log_p.softmax(0)
    mean = (weights * grid).sum()
    sd = (weights * (grid - mean).square()).sum().sqrt()
    assert abs(phi.mean() - mean) < 0.1 * sd
    assert abs(phi.std() / sd - 1) < 0.1


def test_a_difference_of_two_angles_is_not_periodic():
    def model(y):
        a = pyro.sample("a", dist.VonMises(0.0, 1.0))
        b = pyro.sample("b", dist.VonMises(0.0, 1.0))
        pyro.sample("y", dist.Normal(a - b, 0.5), obs=y)

    middle = middle_of_turns(Target(model, torch.tensor(1.0)), 100, 10.0)
    assert middle == {"a": None, "b": None}


def test_angles_of_a_plate_in_minibatches_lie_within_a_turn():
    def model(y):
        phi = pyro.sample("phi", dist.VonMises(torch.zeros(3), 0.5).to_event(1))
        with pyro.plate("rows", 20, subsample_size=len(y)):
            pyro.sample("y", dist.VonMises(phi, 2.0).to_event(1), obs=y)

    torch.manual_seed(0)
    rows = dist.VonMises(torch.tensor([0.0, 2.0, 3.1]), 2.0).sample((20,))
    loader = torch.utils.data.DataLoader(rows, batch_size=10)
    result = fit(model, "auto", batches=loader, epochs=60, seed=0, refine=False)
    phi = result.sample(500)["phi"]
    assert phi.min() >= -math.pi and phi.max() < math.pi
    found = torch.atan2(phi.sin().mean(0), phi.cos().mean(0))
    expected = torch.atan2(rows.sin().sum(0), rows.cos().sum(0))
    assert torch.allclose((found - expected).cos(), torch.ones(3), atol=0.02)


def wave(y, low=0.0):
    size = pyro.sample("size", dist.HalfNormal(2.0))
    phase = pyro.sample("phase", dist.Uniform(low, low + 1.0))
    with pyro.plate("rows", len(y)):
        times = 0.1 * torch.arange(len(y))
        pyro.sample("y", dist.Normal(size * (2 * math.pi * (times + phase)).cos(), 1.0), obs=y)


WAVE = 0.8 * (2 * math.pi * 0.1 * torch.arange(12)).cos() + 0.3 * torch.tensor(
    [0.5, -1.2, 0.7, 0.9, -0.4, 1.1, -0.8, 0.2, -1.0, 0.6, -0.3, 0.8]
)


def test_a_phase_at_its_bounds_has_the_exact_posterior():
    """Its posterior lies at both bounds, which cut it into two modes."""
    result = fit(wave, "auto", WAVE, 2.0, seed=0, progress=False)
    assert result.num_modes == 1 and result.diagnose().verdict.startswith("trust")
    drawn = result.sample(4000)
    phase = drawn["phase"]
    assert phase.min() >= 2.0 and phase.max() < 3.0
    size, places = torch.meshgrid(
        torch.linspace(0.005, 6.0, 600).double(),
        2.0 + (torch.arange(400).double() + 0.5) / 400,
        indexing="ij",
    )
    angle = 2 * math.pi * (0.1 * torch.arange(12) + places.unsqueeze(-1))
    log_p = dist.Normal(size.unsqueeze(-1) * angle.cos(), 1.0).log_prob(WAVE).sum(-1)
    log_p = log_p + dist.HalfNormal(2.0).log_prob(size)
    weights = log_p.flatten().softmax(0).reshape(log_p.shape)
    for wave_of in (torch.cos, torch.sin):
        exact = (weights * wave_of(2 * math.pi * places)).sum()
        assert abs(wave_of(2 * math.pi * phase).mean() - exact) < 0.03
    exact = (weights * size).sum()
    assert abs(drawn["size"].mean() - exact) < 0.03
    assert abs((phase > 2.5).double().mean() - weights[:, 200:].sum()) < 0.03
    assert 0.2 < weights[:, 200:].sum() < 0.8  # on both sides
    log_cell = math.log(6.0 / 600 / 400)
    assert abs(log_evidence(result).value - log_p.logsumexp((0, 1)) - log_cell) < 0.03


def test_which_uniform_variables_are_phases():
    def of_square(y):  # even: the same at both bounds, but with opposite slopes
        rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
        pyro.sample("y", dist.Normal(rho.square(), 0.1), obs=y)

    def of_scale(y):  # undefined at one bound
        scale = pyro.sample("scale", dist.Uniform(0.0, 5.0))
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    def of_several(y):
        with pyro.plate("waves", 3):
            phase = pyro.sample("phase", dist.Uniform(-math.pi, math.pi))
        shift = pyro.sample("shift", dist.Uniform(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((3 * phase).sin().sum() + shift.sum(), 0.5), obs=y)

    def of_vague(y):  # next to draws of `mean`, the effect of `shift` is lost
        mean = pyro.sample("mean", dist.Normal(0.0, 1e7))
        shift = pyro.sample("shift", dist.Uniform(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean + shift, 1.0), obs=y)

    def of_share(y):  # density 0 at one bound, and finite at the other
        share = pyro.sample("share", dist.Uniform(0.0, 1.0))
        scale = ((1 - share) / share).sqrt()
        pyro.sample("y", dist.Normal(0.0, scale, validate_args=False), obs=y)

    def of_located(offset):  # impossible near the origin, at both bounds or between them
        size = pyro.sample("size", dist.Normal(50.0, 2.0))
        phase = pyro.sample("phase", dist.Uniform(0.0, 2 * math.pi))
        pyro.sample("y", dist.Poisson(size + 10 * (offset + phase).cos()), obs=torch.tensor(45.0))

    one = torch.tensor(0.3)
    target = Target(of_vague, one)
    assert not find_phases(target)
    bounds = {"shift": (torch.tensor(0.0), torch.tensor(1.0))}
    assert middle_of_turns(target, 100, 10.0, bounds) == {}
    assert not any(find_phases(Target(model, one)) for model in (of_square, of_scale, of_share))
    assert list(find_phases(Target(of_several, one))) == ["phase"]
    for offset in (0.3, 2.8):
        assert list(find_phases(Target(of_located, torch.tensor(offset)))) == ["phase"]
    assert list(find_phases(Target(wave, WAVE))) == ["phase"]
    assert not find_phases(Target(headings, OBSERVED))
    target, state = Target(wave, WAVE), torch.get_rng_state()
    find_phases(target)
    assert torch.equal(torch.get_rng_state(), state)


def test_phases_of_exchangeable_waves_share_their_turn():
    def waves(y):
        with pyro.plate("waves", 2):
            phase = pyro.sample("phase", dist.Uniform(1.0, 3.0))
        total = (math.pi * (0.2 * torch.arange(len(y)).unsqueeze(-1) + phase)).cos().sum(-1)
        pyro.sample("y", dist.Normal(total, 0.3).to_event(1), obs=y)

    target = Target(waves, 2 * (math.pi * (0.2 * torch.arange(8) + 1.02)).cos())
    middle = middle_of_turns(target, 100, 10.0, find_phases(target))["phase"]
    assert torch.equal(middle, torch.full((2,), 3.0))  # which is 1, and far from 2


def test_exchangeable_angles_share_their_turn():
    """Otherwise the order of components would not be one that symmetries find."""
    y = torch.tensor([3.1, -3.0, 2.8, -1.0, -1.2, -0.8])

    def plated():
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.VonMises(0.0, 0.1))
        with pyro.plate("rows", len(y)):
            which = pyro.sample("which", dist.Categorical(torch.ones(2)))
            pyro.sample("y", dist.VonMises(mu[which], 10.0), obs=y)

    def loop():
        mu = torch.stack([pyro.sample(f"mu_{k}", dist.VonMises(0.0, 0.1)) for k in range(2)])
        rows = dist.VonMises(mu, 10.0).log_prob(y.unsqueeze(-1))
        pyro.factor("y", rows.logsumexp(-1).sum())

    for model in (plated, loop):
        target = Target(model)
        middle = middle_of_turns(target, 100, 10.0)
        assert all(torch.allclose(one, torch.tensor(math.pi)) for one in middle.values())


def test_without_a_search_the_middle_is_climbed_to():
    target = Target(headings, OBSERVED)
    one, two = (middle_of_turns(target, number, 10.0)["phi"] for number in (100, 0))
    assert (one - two).cos() > 0.8


def test_an_angle_beside_counts_that_are_summed_out():
    hours = 2 * math.pi * torch.arange(12.0) / 12

    def model(y):
        phi = pyro.sample("phi", dist.VonMises(0.0, 0.1))
        birds = pyro.sample("birds", dist.Poisson(3.0))
        rate = 0.1 * birds + (1 + hours.add(phi).cos()).exp()
        pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    y = torch.poisson((1 + (hours - 3.1).cos()).exp(), torch.Generator().manual_seed(0))
    result = fit(model, "auto", y, seed=0, progress=False)
    assert result.stages[0].outcome.endswith("1 remain") and result.num_modes == 1
    phi = result.sample(1000)["phi"]
    grid, counts = torch.arange(-3.0, 3.0, 0.01), torch.arange(30.0)
    grid = grid + phi.mean()
    rate = 0.1 * counts.view(-1, 1, 1) + (1 + hours.add(grid.unsqueeze(-1)).cos()).exp()
    log_p = dist.Poisson(rate).log_prob(y).sum(-1) + dist.Poisson(3.0).log_prob(counts)[:, None]
    weight = (log_p.logsumexp(0) + dist.VonMises(0.0, 0.1).log_prob(grid)).softmax(0)
    mean = (weight * grid).sum()
    sd = (weight * (grid - mean).square()).sum().sqrt()
    assert abs(phi.mean() - mean) < 0.15 * sd and abs(phi.std() / sd - 1) < 0.15


def test_the_climb_ends_in_time(monkeypatch):
    monkeypatch.setattr(turns, "find_symmetries", lambda *_: SimpleNamespace(groups=()))

    def calls(seconds):
        pyro.set_rng_seed(0)  # the climb begins at medians of draws
        target, score, number = Target(headings, OBSERVED), Target.score, 0

        def counted(latent):
            nonlocal number
            number += 1
            return score(target, latent)

        target.score = counted
        middle_of_turns(target, 0, seconds)
        return number

    assert 0 < calls(0.0) < calls(60.0)
