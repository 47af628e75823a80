# SPDX-License-Identifier: Apache-2.0
"""Annealing of discrete latent variables in separate modes, against enumeration."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit import fit, refine
from pyro_implicit.density import Target
from pyro_implicit.fitting import FitPolicy
from pyro_implicit.mcmc.mixed_tempering import TemperedSpace, _Particles, why_not_tempered
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.mcmc.stopping import OutOfTime

NUM_SPINS, COUPLING, FIELD = 14, 0.17, 0.03


def magnet():
    """Spins in two modes of unequal mass, between which flips of one spin never pass."""
    with pyro.plate("spins", NUM_SPINS):
        x = pyro.sample("x", dist.Bernoulli(torch.tensor(0.5)))
    spins = (2 * x - 1).sum(-1)
    pyro.factor("energy", 0.5 * COUPLING * spins**2 + FIELD * spins)


def exact_share():
    """The probability that most spins point up."""
    spins = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=NUM_SPINS))).sum(-1)
    weights = (0.5 * COUPLING * spins**2 + FIELD * spins).softmax(0)
    return weights[spins > 0].sum().item()


PLACES = 10 * torch.tensor([0.0, 7, -5, 11, 2, -9, 4, -2, 9, -7, 13, -13])


def clusters(y):
    """A count that moves a location by twenty standard deviations and more, in no order."""
    n = pyro.sample("n", dist.Poisson(torch.tensor(1.0)))
    x = pyro.sample("x", dist.Normal(PLACES[n.long().clamp(max=11)], 0.5))
    pyro.sample("y", dist.Normal(n + 0.0 * x, 1.0), obs=y)


def counts(y):
    rate = pyro.sample("rate", dist.Gamma(y.new_tensor(2.0), 1.0))
    n = pyro.sample("n", dist.Poisson(rate))
    pyro.sample("y", dist.Normal(n.to(y) + rate, 1.5), obs=y)


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_a_power_of_the_likelihood(power):
    y = torch.tensor(3.0, dtype=torch.float64)
    space = TemperedSpace(Target(counts, y, sample_discrete=True))
    space.power = power
    points = torch.tensor([[0.4, 2.0], [-0.3, 5.0]], dtype=torch.float64)
    log_rate, n = points[:, 0].requires_grad_(), points[:, 1].detach()
    rate = log_rate.exp()
    data = dist.Normal(n + rate, 1.5).log_prob(y)
    exact = dist.Gamma(2.0, 1.0).log_prob(rate) + log_rate + dist.Poisson(rate).log_prob(n)
    exact = exact + power * data
    log_density, gradient = space.score(points.detach())
    torch.testing.assert_close(log_density, exact.detach())
    (slope,) = torch.autograd.grad(exact.sum(), log_rate)
    torch.testing.assert_close(gradient[:, 0], slope)
    torch.testing.assert_close(space.log_prob(points.detach()), exact.detach())
    torch.testing.assert_close(space.terms(points.detach()).sum(-1), (exact - log_rate).detach())
    torch.testing.assert_close(space.log_likelihood(points.detach()), data.detach())


def fit_magnet(patient_seconds, least_gradients=200, **options):
    budget = replace(FitPolicy().budget, chain_seconds=0.1, patience=1)
    budget = replace(budget, least_gradients=least_gradients)
    policy = FitPolicy(budget=replace(budget, patient_seconds=patient_seconds))
    return fit(magnet, "auto", seed=0, progress=False, policy=policy, **options)


def test_fit_anneals_chains_that_stay_in_separate_modes():
    result = fit_magnet(30.0)
    assert "annealed, because chains stayed in separate modes" in result.stages[-1].outcome
    draws = result.sample(8000)["x"]
    share = (draws.sum(-1) > NUM_SPINS / 2).double() + 0.5 * (draws.sum(-1) == NUM_SPINS / 2)
    assert share.mean().item() == pytest.approx(exact_share(), abs=0.03)
    assert result.diagnose().verdict == "trust"


def test_chains_stay_if_annealing_has_no_time(monkeypatch):
    """After the chains no patience is left; with a time limit, it ends during the annealing."""
    powers, patience, walk, is_late = [], [], _Particles.walk, _Particles._is_late

    def counted(particles, cloud, number):
        powers.append(particles.space.power)
        if particles.plan.limit.seconds() is not None:
            particles.plan.limit.end = 0.0
        return walk(particles, cloud, number)

    def seen(particles):
        patience.append(particles.plan.patience)
        return is_late(particles)

    monkeypatch.setattr(_Particles, "walk", counted)
    monkeypatch.setattr(_Particles, "_is_late", seen)
    for options in ({}, {"max_seconds": 60.0}):
        powers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of chains that have not converged
            result = fit_magnet(0.05, 40, **options)
        assert len(powers) == len(options) and "annealed" not in result.stages[-1].outcome
        assert result.refined.stopped == "max_gradients"
        assert result.refined.drift.r_hat > 1.2
    assert patience[0] < 0.05 and patience[1] == float("inf")


def test_refine_anneals_on_request():
    start = {"n": torch.ones(64), "x": 70 + 0.5 * torch.randn(64)}
    y = torch.tensor(1.5)
    result = refine(
        clusters, start, y, temper=True, num_chains=64, max_gradients=3000, seed=0, progress=False
    )
    n = result.get_samples()["n"]
    numbers = torch.arange(12.0)
    log_weights = dist.Poisson(1.0).log_prob(numbers) + dist.Normal(numbers, 1.0).log_prob(y)
    found = (n.unsqueeze(-1) == numbers).double().mean(0)
    torch.testing.assert_close(found, log_weights.softmax(0).double(), rtol=0, atol=0.04)
    assert result.modes == "Annealing began with draws of the prior." and result.settled


@pytest.mark.parametrize("error", [OutOfTime, TimeoutError])
def test_annealed_clouds_stay_if_the_next_one_has_no_time(monkeypatch, error):
    clouds, anneal = [], _Particles.anneal

    def counted(particles, number):
        if clouds:
            raise error
        clouds.append(anneal(particles, number))
        return clouds[0]

    monkeypatch.setattr(_Particles, "anneal", counted)
    policy = replace(DEFAULT, tempering=replace(DEFAULT.tempering, mixed_error=0.0))
    start = {"n": torch.ones(64), "x": 70 + 0.5 * torch.randn(64)}
    with pytest.raises(TimeoutError) if error is TimeoutError else nullcontext():  # of the model
        result = refine(
            clusters, start, torch.tensor(1.5), temper=True, policy=policy, num_chains=64, seed=0,
            progress=False,
        )  # fmt: skip
        assert result.stopped == "max_gradients" and len(result.get_samples()["n"]) > 0


@pytest.mark.parametrize(
    ("prior", "is_possible"),
    [
        (dist.Normal(0.0, 1.0), True),
        (dist.Normal(0.0, 1.0).expand([2]).to_event(1), True),
        (dist.ImproperUniform(dist.constraints.real, (), ()), False),
        (dist.Normal(0.0, 1.0).mask(torch.tensor(False)), False),
        (None, False),
    ],
)
def test_annealing_needs_priors_that_can_be_drawn_from(prior, is_possible):
    def model():
        if prior is None:
            with poutine.scale(scale=2.0):
                x = pyro.sample("x", dist.Normal(0.0, 1.0))
        else:
            x = pyro.sample("x", prior)
        n = pyro.sample("n", dist.Poisson(2.0))
        pyro.sample("y", dist.Normal(x.sum() + n, 1.0), obs=torch.tensor(1.0))

    target = Target(model, sample_discrete=True)
    assert why_not_tempered(target) == ("" if is_possible else "x")
