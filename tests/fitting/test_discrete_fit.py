# SPDX-License-Identifier: Apache-2.0
"""``fit`` of models with discrete latent variables that cannot be summed out."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive, config_enumerate, infer_discrete

from pyro_implicit import diagnose, fit
from pyro_implicit.density import marginal_discrete
from pyro_implicit.density.policy import DISCRETE
from pyro_implicit.fitting import Fit
from pyro_implicit.fitting.policy import DEFAULT as FIT

Y = torch.tensor([6.0, 9.0, 4.0])
#: A policy with fewer draws and paths, and weights that take hardly any time. Those of the second
#: judgement, which tests/fitting/test_correction.py tests, are most of the time.
FEW = replace(
    FIT,
    integration=replace(FIT.integration, num_samples=1024, weigh_seconds=1e-3, step_seconds=1e-4),
    correction=replace(FIT.correction, num_weighed_again=2000),
)


def thinned(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", 3):
        n = pyro.sample("n", dist.Poisson(rate))
        pyro.sample("y", dist.Binomial(n, 0.3), obs=y)
    return n


def spins():
    """Six spins on a ring, in a field: all latent variables are discrete."""
    with pyro.plate("spins", 6):
        x = pyro.sample("x", dist.Bernoulli(0.5))
    s = 2 * x - 1
    pyro.factor("energy", 0.5 * (s * s.roll(1, -1)).sum(-1) + 0.2 * s.sum(-1))


def weighed(y):
    """The number of all animals is known roughly, so that the rows depend on each other."""
    n = thinned(y)
    pyro.sample("weight", dist.Normal(n.sum(-1), 5.0), obs=torch.tensor(60.0))


@pytest.fixture(scope="module")
def summed():
    return fit(thinned, "auto", Y, seed=0, progress=False)


@pytest.fixture(scope="module")
def sampled():
    return fit(weighed, "auto", Y, seed=0, progress=False)


def test_independent_elements_are_summed_out(summed):
    """The rate has a gamma posterior, and the animals that were not seen are Poisson."""
    assert summed.stages[0].outcome == "3 latent variables (n) summed out, 1 remain"
    assert summed.refined is None and summed.chosen == "marginal"
    draws = summed.sample(8000)
    rate, n = draws["rate"], draws["n"]
    assert n.shape == (8000, 3) and n.dtype == torch.float32 and (n >= Y).all()
    assert rate.mean().item() == pytest.approx(21.0, abs=0.05 * 21**0.5)
    assert rate.std().item() == pytest.approx(21**0.5, rel=0.03)
    unseen = n - Y
    variance = 0.7 * 21 + 0.7**2 * 21
    assert unseen.mean(0).tolist() == pytest.approx([14.7] * 3, abs=4 * (variance / 8000) ** 0.5)
    assert unseen.var(0).tolist() == pytest.approx([variance] * 3, rel=0.08)
    covariance = torch.stack([rate, unseen[:, 0]]).cov()[0, 1].item()
    assert covariance == pytest.approx(0.7 * 21, rel=0.1)


def test_data_that_no_draw_of_the_prior_allows():
    """More animals are seen than draws of the prior have, and sums are far from zero."""
    y = torch.tensor([300.0, 250.0, 280.0])
    result = fit(thinned, "auto", y, seed=0, progress=False)
    assert "summed out" in result.stages[0].outcome and result.draws is not None
    rate = result.sample(8000)["rate"]
    assert rate.mean().item() == pytest.approx(832.0, abs=0.06 * 832**0.5)
    assert rate.std().item() == pytest.approx(832**0.5, rel=0.03)


def test_results_with_summed_elements(summed, tmp_path):
    found = summed.diagnose(num_transitions=2)
    assert found.verdict == "trust"
    assert "Stein's identities  no error seen; errors below 0" in str(
        found
    ) and "skipped" not in str(found)
    summed.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", thinned, Y)
    assert "the discrete latents 'n' have no gradient" in str(loaded.diagnose(num_samples=200))
    assert torch.equal(loaded.draws.samples["n"], summed.draws.samples["n"])
    tree = loaded.to_datatree(50, log_likelihood=True, posterior_predictive=True, prior=10)
    assert tree["posterior"]["n"].shape == (1, 50, 3) == tree["posterior_predictive"]["y"].shape
    with pytest.raises(ValueError, match="no chains of all data"):
        loaded.refine_more()
    more = summed.update(thinned, Y + 1, sites=["rate"], policy=FEW, progress=False)
    mean = 43 / 1.9  # the posterior of both data
    assert more.sample(1000)["rate"].mean().item() == pytest.approx(mean, abs=0.1 * mean**0.5)


def population(y):
    growth = pyro.sample("growth", dist.LogNormal(0.0, 0.3))
    n = 10.0
    for year in range(len(y)):
        n = pyro.sample(f"n_{year}", dist.Poisson(growth * n + 0.5))
        pyro.sample(f"y_{year}", dist.Binomial(n, 0.5), obs=y[year])


def test_chains_of_counts_are_summed_out():
    y = torch.tensor([6.0, 5.0, 8.0])
    policy = replace(FEW, integration=replace(FEW.integration, chain_seconds=1e-3))
    result = fit(population, "auto", y, seed=0, policy=policy, progress=False)
    assert result.stages[0].outcome == "3 latent variables (n_0, n_1, n_2) summed out, 1 remain"
    assert result.refined is None
    draws = result.sample(1000)
    growth, n = torch.linspace(-1.2, 1.2, 61).exp(), torch.arange(200.0)
    step = dist.Poisson(growth[:, None, None] * n.unsqueeze(-1) + 0.5).log_prob(n).exp()
    ahead = dist.Poisson(10 * growth.unsqueeze(-1) + 0.5).log_prob(n).exp()
    for year, count in enumerate(y):
        ahead = ahead if year == 0 else (ahead.unsqueeze(1) @ step).squeeze(1)
        seen = dist.Binomial(n.clamp(min=count), 0.5).log_prob(count).exp()
        ahead = ahead * torch.where(n >= count, seen, 0.0)
    weight = ahead.sum(-1) * dist.Normal(0.0, 0.3).log_prob(growth.log()).exp()
    weight = weight / weight.sum()
    mean = (weight * growth.log()).sum()
    sd = (weight * (growth.log() - mean).square()).sum().sqrt().item()
    assert draws["growth"].log().mean().item() == pytest.approx(mean.item(), abs=0.15 * sd)
    assert draws["growth"].log().std().item() == pytest.approx(sd, rel=0.1)
    last = (weight * (ahead @ n) / ahead.sum(-1)).sum().item()
    assert draws["n_2"].mean().item() == pytest.approx(last, abs=0.15 * draws["n_2"].std().item())


def test_short_chains_of_counts_suffice_if_they_converge():
    y = torch.tensor([6.0, 5.0, 8.0])
    result = fit(population, "auto", y, seed=0, progress=False)
    assert [stage.name for stage in result.stages] == ["discrete", "refine"]
    assert result.refined.settled and result.chosen == "prior" and result.draws is None


def test_a_sum_that_is_cut_is_not_used(monkeypatch):
    monkeypatch.setattr(marginal_discrete, "DISCRETE", replace(DISCRETE, most_values=16))
    budget = replace(FEW.budget, most_gradients=200, least_gradients=200, patience=1)
    policy = replace(FEW, budget=replace(budget, patient_seconds=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short chains
        result = fit(thinned, "auto", Y, seed=0, policy=policy, progress=False)
    names = [stage.name for stage in result.stages]
    assert "dropped: their log-density is off by inf nats" in str(result)
    assert names[-2:] == ["discrete", "refine"] and result.draws is None


def test_dependent_elements_are_sampled(sampled):
    """The number of animals that were not seen is Poisson given the rate: a grid of rates."""
    assert [stage.name for stage in sampled.stages] == ["discrete", "refine"]
    assert sampled.stages[0].outcome.startswith("3 elements of 'n' are sampled")
    rate, unseen = torch.linspace(1.0, 60.0, 400).unsqueeze(-1), torch.arange(300.0)
    joint = dist.Gamma(2.0, 0.1).log_prob(rate) + dist.Poisson(0.9 * rate).log_prob(Y.sum())
    joint = joint + dist.Poisson(2.1 * rate).log_prob(unseen)
    joint = joint + dist.Normal(Y.sum() + unseen, 5.0).log_prob(torch.tensor(60.0))
    weight = joint.flatten().softmax(0).reshape(joint.shape)
    mean = (weight.sum(-1) * rate.squeeze(-1)).sum().item()
    sd = ((weight.sum(-1) * (rate.squeeze(-1) - mean) ** 2).sum() ** 0.5).item()
    total = (weight.sum(0) * (Y.sum() + unseen)).sum().item()
    draws = sampled.sample(2000)
    assert draws["rate"].mean().item() == pytest.approx(mean, abs=0.15 * sd)
    assert draws["rate"].std().item() == pytest.approx(sd, rel=0.15)
    assert draws["n"].sum(-1).mean().item() == pytest.approx(total, abs=1.0)


def test_the_diagnosis(sampled):
    found = sampled.diagnose()
    assert found.verdict == "trust"
    assert "skipped" in str(found) and "the discrete latents 'n' have no gradient" in str(found)
    with pytest.raises(ValueError, match="cannot use quantities= .*'n'.*Cure: leave it out"):
        diagnose(weighed, sampled.guide, Y, quantities=lambda draws: draws["rate"])
    prior = diagnose(weighed, sampled.guide, Y)
    assert prior.verdict != "trust"


def test_predictions_and_files(sampled, tmp_path):
    predicted = Predictive(weighed, sampled.sample(100))(None)["y"]
    assert predicted.shape[0] == 100 and predicted.mean().item() == pytest.approx(6.3, abs=1.5)
    tree = sampled.to_datatree(50, log_likelihood=True, posterior_predictive=True, prior=10)
    assert tree["posterior"]["n"].shape == (1, 50, 3) == tree["posterior_predictive"]["y"].shape
    assert tree["log_likelihood"]["y"].shape[-1] == 3
    path = tmp_path / "fit.pt"
    sampled.save(path)
    loaded = Fit.load(path, weighed, Y)
    assert torch.equal(loaded.refined.samples["n"], sampled.refined.samples["n"])
    more = loaded.refine_more(max_gradients=50, progress=False)
    assert more.refined.num_gradients > sampled.refined.num_gradients
    assert more.diagnose().verdict in ("trust", "check")


def test_discrete_latents_alone():
    result = fit(spins, "auto", seed=0, progress=False)
    x = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6)
    s = 2 * x - 1
    weight = (0.5 * (s * s.roll(1, -1)).sum(-1) + 0.2 * s.sum(-1)).softmax(0)
    draws = result.refined.get_samples()["x"]
    size = result.refined.drift.num_effective
    for found, expected in (
        (draws.mean(0), weight @ x),
        ((draws * draws.roll(1, -1)).mean(0), weight @ (x * x.roll(1, -1))),
    ):
        error = 4.5 * (expected * (1 - expected) / min(size, len(draws))).sqrt()
        assert ((found - expected).abs() < error).all()
    assert result.refined.settled


def test_equal_seeds_give_equal_draws():
    state = torch.get_rng_state()
    one, two = (fit(thinned, "auto", Y, seed=0, policy=FEW, progress=False) for _ in range(2))
    assert torch.equal(one.draws.samples["n"], two.draws.samples["n"])
    assert torch.equal(state, torch.get_rng_state())


def test_refusals():
    with pytest.raises(ValueError, match="refine=False excludes chains.*'n'.*Cure"):
        fit(thinned, "auto", Y, refine=False, progress=False)

    def learns():
        n = pyro.sample("n", dist.Poisson(pyro.param("rate", torch.tensor(3.0))))
        pyro.sample("y", dist.Normal(n, 1.0), obs=torch.tensor(2.0))

    with pytest.raises(ValueError, match="rate .*'n', which Pyro cannot enumerate. Cure: a prior"):
        fit(learns, "auto", progress=False)

    def too_large(y):
        rate = pyro.sample("rate", dist.Beta(1.0, 1.0))
        first = pyro.sample("first", dist.Categorical(torch.ones(4000)))
        second = pyro.sample("second", dist.Categorical(torch.ones(4000)))
        shift = pyro.param("shift", torch.tensor(0.0))
        pyro.sample("y", dist.Normal(first - second + rate + shift, 1.0), obs=y)

    with pytest.raises(ValueError, match="'first', 'second', as the sum .* fails .*Cure: a prior"):
        fit(too_large, "auto", torch.tensor(0.0), progress=False)


def test_the_cure_for_parameters_beside_enumerable_latents_works():
    """As in Pyro's mixture of ``contrib.autoname``: the only latents are assignments."""
    x = torch.tensor([0.0, 1.0, 2.0, 20.0, 30.0, 40.0])

    def assignments(x):
        locs = pyro.param("locs", torch.tensor([0.0, 10.0]))
        with pyro.plate("data", len(x)):
            which = pyro.sample("which", dist.Categorical(torch.tensor([0.5, 0.5])))
            pyro.sample("x", dist.Normal(locs[which], 5.0), obs=x)
        return which

    message = (
        r"parameters locs .* the discrete latents 'which' by guide=\"auto\": without continuous "
        r"latents it samples them. Cure: an empty guide and one particle, "
        r"fit\(model, lambda \*args, \*\*kwargs: None, ..., num_particles=1\)"
    )
    for model in (assignments, config_enumerate(assignments)):
        with pytest.raises(ValueError, match=message):
            fit(model, "auto", x, progress=False)
    pyro.clear_param_store()
    options = {"lr": 0.1, "num_steps": 1000, "num_particles": 1, "progress": False}
    result = fit(assignments, lambda *args, **kwargs: None, x, **options)
    locs = x.new_tensor([0.0, 10.0])
    for _ in range(200):  # the EM algorithm
        weights = dist.Normal(locs, 5.0).log_prob(x.unsqueeze(-1)).softmax(-1)
        locs = (weights * x.unsqueeze(-1)).sum(0) / weights.sum(0)
    torch.testing.assert_close(pyro.param("locs").detach(), locs, atol=0.2, rtol=0)
    parts = dist.Normal(locs, 5.0).log_prob(x.unsqueeze(-1)) + math.log(0.5)
    assert result.losses[-1] == pytest.approx(-parts.logsumexp(-1).sum().item(), abs=0.01)
    drawn = infer_discrete(config_enumerate(assignments), first_available_dim=-2)(x)
    assert drawn.tolist() == [0, 0, 0, 1, 1, 1]
