# SPDX-License-Identifier: Apache-2.0
"""Predictive checks: numbers against closed forms; right models pass, and wrong ones are named."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.decisions.predictive_checks import _pit_ecdf, predictive_check
from pyro_implicit.density.target import Target
from pyro_implicit.fitting import Fit
from pyro_implicit.guides import StoredDraws

N = 60
GENERATOR = torch.Generator().manual_seed(5)
NORMAL = torch.randn(N, generator=GENERATOR)


def normal(y, prior_sd=5.0):
    x = pyro.sample("x", dist.Normal(0.0, prior_sd))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def posterior(y, num=(40, 25)):
    return {"x": y.mean() + torch.randn(num) / math.sqrt(len(y))}


def check(y, group="posterior", **options):
    return predictive_check(group, Target(normal, y), posterior(y), **options).sites["y"]


def test_a_right_model_passes_and_its_numbers_are_right():
    torch.manual_seed(0)
    site = check(NORMAL)
    assert site.kind == "continuous" and site.faults == []
    assert site.replicated.shape == (1000, N) and site.residuals is site.frequencies is None
    # leave-one-out predictions of y_i: normal, with the mean of the others
    others = (NORMAL.sum() - NORMAL) / (N - 1)
    exact = dist.Normal(others, math.sqrt(1 + 1 / (N - 1))).cdf(NORMAL)
    assert (site.pit - exact).abs().max() < 0.08
    assert site.statistics["mean"].observed == pytest.approx(NORMAL.mean().item())
    assert site.statistics["sd"].replicated.mean().item() == pytest.approx(1.0, abs=0.03)
    low, high = site.interval(0.9)
    assert (high - low).mean().item() == pytest.approx(2 * 1.645, abs=0.1)
    assert site.coverage(0.5) == pytest.approx(
        ((exact - 0.5).abs() < 0.25).double().mean().item(), abs=0.1
    )


def test_the_pit_is_that_of_leave_one_out_predictions():
    torch.manual_seed(0)
    y = torch.tensor([-1.0, 0.2, 1.0])
    draws = posterior(y, (40, 100))
    pit = predictive_check("posterior", Target(normal, y), draws).sites["y"].pit
    exact = dist.Normal((y.sum() - y) / 2, math.sqrt(1 + 1 / 2)).cdf(y)
    in_sample = dist.Normal(y.mean(), math.sqrt(1 + 1 / 3)).cdf(y)
    assert (pit - exact).abs().max() < 0.05 < (in_sample - exact).abs().max()


def test_observations_without_which_the_posterior_is_another_do_not_count():
    """Their importance weights are those of few draws, and would give an alarm."""
    torch.manual_seed(0)

    def one_vector(y, prior_sd=50.0):
        x = pyro.sample("x", dist.Normal(0.0, prior_sd))
        pyro.sample("y", dist.Normal(x, 1.0).expand(y.shape).to_event(1), obs=y)

    found = predictive_check("posterior", Target(one_vector, NORMAL), posterior(NORMAL))
    site = found.sites["y"]
    assert site.num_unreliable == 1 and site.pit_ecdf is None and not len(site.pit)
    assert site.faults == [] and "not counted" in str(found)
    assert "intervals" not in str(found) and found.plot() is not None

    far = torch.cat([NORMAL, torch.tensor([40.0])])
    site = check(far)
    assert site.num_unreliable == 1 and site.pit.shape == (N,)


def test_nearly_equal_weights_need_no_khat():
    """Where predictions are sure, likelihoods differ by little: their tail is heavy, but tiny."""
    torch.manual_seed(0)
    x = torch.linspace(-3.0, 3.0, 60)
    draws = {"a": 0.3 * torch.randn(4, 250)}
    target = Target(logistic, x, (x > 0).float(), 8.0)
    site = predictive_check("posterior", target, draws).sites["y"]
    assert site.num_unreliable == 0 and site.pit.shape == (60,)


def test_leave_one_out_predictions_by_draws_of_two_values():
    torch.manual_seed(0)
    y = torch.tensor([0.3, 1.1, 1.5])
    draws = {"x": torch.tensor([0.0, 1.0]).repeat(4, 500)}
    site = predictive_check("posterior", Target(normal, y), draws).sites["y"]
    values = torch.tensor([[0.0], [1.0]])
    weights = (-dist.Normal(values, 1.0).log_prob(y)).softmax(0)  # both values in half of the draws
    exact = (weights * dist.Normal(values, 1.0).cdf(y)).sum(0)
    assert site.num_unreliable == 0 and (site.pit - exact).abs().max() < 0.05


def test_leave_one_out_predictions_with_a_class_of_each_row():
    torch.manual_seed(0)
    y, draws = torch.tensor([0.0, 1.0, 2.0]), {"x": torch.tensor([0.0, 1.0]).repeat(4, 500)}

    def mixture(y):
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)

    site = predictive_check("posterior", Target(mixture, y), draws).sites["y"]
    means = torch.tensor([[0.0, 1.0], [1.0, 2.0]])  # of x, and of z
    normal_of_class = dist.Normal(means.unsqueeze(-1), 1.0)
    density, cdf = normal_of_class.log_prob(y).exp().mean(1), normal_of_class.cdf(y).mean(1)
    exact, in_sample = ((1 / density) * cdf).sum(0) / (1 / density).sum(0), cdf.mean(0)
    assert (site.pit - exact).abs().max() < 0.02 < 0.035 < (in_sample - exact).abs().max()


def test_few_draws_are_named():
    torch.manual_seed(0)
    y = NORMAL[:3]
    found = predictive_check("posterior", Target(normal, y), posterior(y, (4, 5)))
    assert found.sites["y"].num_unreliable == 3 and "draws are fewer than 25" in str(found)


def test_sites_of_a_loop_are_one_series():
    def loop(y):
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
        for step in range(len(y)):
            pyro.sample(f"y_{step}", dist.Normal(x, 1.0), obs=y[step])
        pyro.sample("total", dist.Poisson(x.exp()), obs=torch.tensor(3.0))

    torch.manual_seed(0)
    draws = posterior(NORMAL)
    found = predictive_check("posterior", Target(loop, NORMAL), draws)
    assert list(found.sites) == ["total", f"y_0 to y_{N - 1}"]
    site, single = found.sites[f"y_0 to y_{N - 1}"], found.sites["total"]
    torch.testing.assert_close(site.observed, NORMAL)
    torch.manual_seed(0)
    together = predictive_check("posterior", Target(normal, NORMAL), draws).sites["y"]
    assert site.replicated.shape == together.replicated.shape and site.faults == []
    torch.testing.assert_close(site.pit, together.pit, rtol=0, atol=0.1)
    assert set(single.statistics) == {"mean", "share of zeros", "max"}


@pytest.mark.parametrize(("num_lost", "is_fault"), [(0, True), (4, True), (25, False)])
def test_values_that_are_not_counted_may_lie_anywhere(num_lost, is_fault):
    """The middle of a uniform variable, with few values or all others left out."""
    torch.manual_seed(0)
    pit = torch.linspace(0.15, 0.85, 100)
    site = replace(check(NORMAL), pit=pit, pit_ecdf=_pit_ecdf(pit), num_unreliable=num_lost)
    site = replace(site, observed=torch.zeros(100 + num_lost))
    assert site.pit_ecdf.num_outside > 0 and site.is_miscalibrated == is_fault


def test_the_band_of_the_pit_ecdf_holds_at_all_points_together():
    torch.manual_seed(0)
    inside = 0
    band = check(NORMAL).pit_ecdf
    for _ in range(400):
        ecdf = (torch.rand(N, 1) <= band.x).double().mean(0) - band.x
        inside += bool(((ecdf >= band.low) & (ecdf <= band.high)).all())
    assert 0.90 < inside / 400 < 0.99


@pytest.mark.parametrize(
    ("y", "fault"),
    [(2 * NORMAL, "sd: "), (NORMAL.abs() ** 2, "PIT-ECDF leaves its 95 % band")],
)
def test_wrong_models_are_named(y, fault):
    assert any(fault in one for one in check(y).faults)


def test_prior_predictive_draws_the_prior():
    torch.manual_seed(0)
    site = check(NORMAL, group="prior")
    assert site.replicated.mean(-1).std().item() == pytest.approx(5.0, rel=0.15)
    assert site.coverage(0.9) > 0.95 and not site.faults  # a wide prior is no fault


def counts(y, dispersed):
    rate = pyro.sample("rate", dist.Gamma(1.0, 0.1))
    with pyro.plate("rows", len(y)):
        family = dist.NegativeBinomial(0.5, probs=rate / (rate + 0.5))
        pyro.sample("y", family if dispersed else dist.Poisson(rate), obs=y)


def test_rootograms_of_counts():
    torch.manual_seed(0)
    y = dist.NegativeBinomial(0.5, probs=torch.tensor(0.9)).sample((200,))
    draws = {"rate": (y.mean() + 0.1 * torch.randn(40, 10)).clamp(min=0.1)}
    wrong, right = (
        predictive_check("posterior", Target(counts, y, dispersed), draws).sites["y"]
        for dispersed in (False, True)
    )
    assert wrong.kind == "count" and any("frequencies are outside" in f for f in wrong.faults)
    assert any("share of zeros" in f for f in wrong.faults)
    assert not any("frequencies" in f or "zeros" in f for f in right.faults)
    assert wrong.frequencies.observed[0].item() == pytest.approx((y == 0).sum().sqrt().item())
    assert wrong.frequencies.observed.square().sum().item() == pytest.approx(200)


def logistic(x, y, slope):
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a + slope * x), obs=y)


def test_binned_residuals_of_binary_data():
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 400)
    y = dist.Bernoulli(logits=-3.0 * x).sample()
    draws = {"a": 0.1 * torch.randn(40, 10)}
    wrong, right = (
        predictive_check("posterior", Target(logistic, x, y, slope), draws).sites["y"]
        for slope in (-0.5, -3.0)
    )
    assert wrong.kind == "binary" and any("residuals are outside" in f for f in wrong.faults)
    assert not any("residuals" in f for f in right.faults) and len(right.residuals.x) == 20


def test_the_residuals_of_a_bin_against_their_formula():
    torch.manual_seed(0)
    x = torch.tensor([-4.0, -1.0, 1.0, 4.0]).repeat_interleave(4)  # four bins of four
    y = torch.tensor([0.0, 0.0, 0.0, 1.0] * 4)
    draws = {"a": 0.001 * torch.randn(40, 50)}
    found = predictive_check("posterior", Target(logistic, x, y, 1.0), draws).sites["y"].residuals
    p = torch.sigmoid(torch.tensor([-4.0, -1.0, 1.0, 4.0])).double()
    torch.testing.assert_close(found.x, p, rtol=0, atol=0.02)
    torch.testing.assert_close(found.observed, 0.25 - p, rtol=0, atol=0.02)
    torch.testing.assert_close(found.high, (p * (1 - p)).sqrt(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.low, -found.high)


def test_own_statistics_and_events():
    def pairs(y):
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0).expand([len(y), 2]).to_event(1), obs=y)

    torch.manual_seed(0)
    y = NORMAL.view(-1, 2)
    own = {"lag": lambda data: (data[:, 0] * data[:, 1]).mean()}
    target = Target(pairs, y)
    site = predictive_check("posterior", target, posterior(y.flatten()), own).sites["y"]
    assert site.replicated.shape == (1000, 30, 2) and site.pit.shape == (60,)
    assert site.statistics["lag"].observed == pytest.approx((y[:, 0] * y[:, 1]).mean().item())
    for mass in (-0.5, 90):
        for of_mass in (site.coverage, site.interval):
            with pytest.raises(ValueError, match="mass must be a probability between 0 and 1"):
                of_mass(mass)
    with pytest.raises(ValueError, match="log of 'y' is NaN for observed data. Cure"):
        undefined = {"log": lambda data: (data - data.mean()).log().mean()}
        predictive_check("posterior", target, posterior(y.flatten()), undefined)
    with pytest.raises(ValueError, match="statistic sum of 'y' gives \\(30,\\) values. Cure"):
        predictive_check("posterior", target, posterior(y.flatten()), {"sum": lambda d: d.sum(1)})


def test_refused_input():
    with pytest.raises(ValueError, match="all 3 observations of site 'y' are equal.*Cure"):
        check(torch.ones(3))
    with pytest.raises(ValueError, match="no posterior draws"):
        predictive_check("posterior", Target(normal, NORMAL), {"x": torch.ones(40, 2)})

    def flat(y):
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.raises(ValueError, match="prior of site 'x' is flat"):
        predictive_check("prior", Target(flat, torch.tensor(0.0)), {"x": torch.randn(4, 5)})


def test_of_a_result_with_several_sites():
    def both(y, z):
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)
            pyro.sample("z", dist.Poisson(1.0), obs=z)

    z = torch.poisson(torch.ones(N), generator=GENERATOR)
    guide = StoredDraws({"x": posterior(NORMAL, (400,))["x"]})
    result = Fit(guide=guide, source=(both, (NORMAL, z), {}))
    outside = torch.get_rng_state()
    found = result.check_posterior_predictive(seed=0, num_samples=200)
    assert torch.equal(torch.get_rng_state(), outside)
    assert [site.kind for site in found.sites.values()] == ["continuous", "count"]
    assert "Site 'y', continuous: 60 observations, 200 data sets from the posterior" in str(found)
    assert len(found.plot().axes) == 6
    again = result.check_posterior_predictive(seed=0, num_samples=200)
    assert torch.equal(found.sites["y"].pit, again.sites["y"].pit)
    assert "from the prior" in str(result.check_prior_predictive(seed=0, num_samples=100))
    with pytest.raises(ValueError, match="num_samples must be at least 40"):
        result.check_prior_predictive(num_samples=10)
