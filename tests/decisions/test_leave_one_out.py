# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out densities against closed forms; weights and masks of observations."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.decisions.leave_one_out import leave_one_out
from pyro_implicit.decisions.pointwise import Pointwise, WeightedObservations
from pyro_implicit.density.target import Target

Y = torch.tensor([0.3, -0.8, 1.1, 0.2, -0.4, 12.0], dtype=torch.float64)  # one far outlier


def normal(y, mask=True, scale=1.0):
    x = pyro.sample("x", dist.Normal(torch.zeros((), dtype=torch.float64), 2.0))
    with pyro.plate("rows", len(y)), poutine.mask(mask=mask), poutine.scale(scale=scale):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def exact_elpd(y):
    """p(y_i | y_-i) of a normal mean with prior variance 4 and noise variance 1."""
    found = []
    for i in range(len(y)):
        rest = torch.cat([y[:i], y[i + 1 :]])
        variance = 1 / (1 / 4 + len(rest))
        found.append(dist.Normal(variance * rest.sum(), math.sqrt(1 + variance)).log_prob(y[i]))
    return torch.stack(found)


def posterior_draws(y, num_chains=40, num_draws=100):
    variance = 1 / (1 / 4 + len(y))
    noise = torch.randn(num_chains, num_draws, dtype=torch.float64)
    return {"x": variance * y.sum() + math.sqrt(variance) * noise}


def test_leave_one_out_against_the_closed_form():
    target = Target(normal, Y)
    found = Pointwise.of(target, posterior_draws(Y))
    loo = leave_one_out(target, found, max_seconds=300.0)
    exact = exact_elpd(Y)
    assert loo.is_repaired[5] and not loo.bad
    assert loo.is_repaired.tolist() == (loo.khat > 0.5).tolist() and loo.khat[5] > 0.7
    assert (loo.error < 0.1).all() and loo.elpd[5] < -60
    assert ((loo.elpd - exact).abs() < 4 * loo.error + 0.002).all()
    # the effective number of parameters: in-sample minus left-out log densities
    in_sample = found.log_likelihood.flatten(0, 1).logsumexp(0).sum() - 6 * math.log(4000)
    assert loo.num_parameters == pytest.approx((in_sample - loo.total).item(), abs=1e-9)


def test_observations_stay_bad_without_time_and_are_named():
    target = Target(normal, Y)
    loo = leave_one_out(target, Pointwise.of(target, posterior_draws(Y)), max_seconds=1e-9)
    assert list(loo.bad) == ["y[5]"] and "max_seconds were over" in loo.bad["y[5]"]
    assert not loo.is_repaired.any()


def test_errors_of_importance_weights_are_those_of_repeated_runs():
    y, runs = Y[:5], []
    target = Target(normal, y)
    for _ in range(25):
        loo = leave_one_out(target, Pointwise.of(target, posterior_draws(y, 10, 100)), 1.0)
        runs.append((loo.elpd, loo.error))
    values, errors = (torch.stack(part) for part in zip(*runs, strict=True))
    ratio = values.std(0) / errors.mean(0)
    assert ((ratio > 0.55) & (ratio < 1.6)).all()


def test_masked_observations_do_not_count():
    mask = torch.tensor([True, True, False, True, True, False])
    y = torch.where(mask, Y, math.nan)
    found = Pointwise.of(Target(normal, y, mask), posterior_draws(Y[mask]))
    assert found.labels == ("y[0]", "y[1]", "y[3]", "y[4]")
    x = found.draws["x"][..., None]
    torch.testing.assert_close(found.log_likelihood, dist.Normal(x, 1.0).log_prob(Y[mask]))
    weights = found.weights_with(torch.tensor([1]), 0.25)["y"]
    assert weights.tolist() == [1.0, 0.25, 0.0, 1.0, 1.0, 0.0]


def test_weights_of_observations_multiply_masks_and_scales():
    mask = torch.tensor([True, True, True, True, False, False])

    weights = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    x = torch.tensor([[0.7]], dtype=torch.float64)
    found = Target(WeightedObservations(normal, {"y": weights}), Y, mask, 2.0).log_prob(x)
    logs = dist.Normal(x[0], 1.0).log_prob(Y)
    prior = dist.Normal(0.0, 2.0).log_prob(x[0])
    torch.testing.assert_close(found, prior + 2 * (logs[0] + 0.5 * logs[2] + logs[3]))


def test_several_sites_and_events():
    def two(y, z):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 2):
            pyro.sample("y", dist.Normal(x, 1.0).expand([2, 3]).to_event(1), obs=y)
        pyro.sample("z", dist.Poisson(x.exp()), obs=z)

    y, z = torch.arange(6.0).view(2, 3), torch.tensor(3.0)
    found = Pointwise.of(Target(two, y, z), {"x": torch.randn(4, 5)})
    assert found.labels == ("y[0]", "y[1]", "z") and found.log_likelihood.shape == (4, 5, 3)
    assert [one.is_discrete for one in found.sites.values()] == [False, True]
    assert found.weights_with(torch.tensor([2]), 0.0)["z"].tolist() == 0.0


def test_sites_are_ordered_by_name_and_equal_weights_are_good():
    """However the model orders them; site b has the same density at all draws."""

    def model(names):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        for name in names:
            scale = 0.0 if name == "b" else 1.0
            pyro.sample(name, dist.Normal(scale * x, 1.0), obs=torch.tensor(float(len(name))))

    draws = {"x": 0.1 * torch.randn(4, 50)}
    first, second = (
        Pointwise.of(Target(model, names), draws)
        for names in (["b", "y_10", "y_9"], ["y_9", "b", "y_10"])
    )
    assert first.labels == second.labels == ("b", "y_9", "y_10")
    torch.testing.assert_close(first.log_likelihood, second.log_likelihood)
    loo = leave_one_out(Target(model, ["b", "y_10", "y_9"]), first, max_seconds=300.0)
    assert loo.khat[0] == 0 and not loo.is_repaired[0]
    torch.testing.assert_close(loo.elpd[0], first.log_likelihood[0, 0, 0])


def infinite_weight(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        with poutine.scale(scale=torch.tensor([1.0, math.inf, 1.0])):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def only_a_factor(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", -(x - y.sum()).square())


def summed_out(y):
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(x[..., 0] * z + x[..., 1] * (1 - z), 1.0), obs=y)
        pyro.sample("same_class", dist.Normal(z, 1.0), obs=y)


def test_rows_of_a_factor_are_left_out_with_a_warning():
    def model(y, late, is_factor):
        x = pyro.sample("x", dist.Normal(torch.zeros((), dtype=torch.float64), 2.0))
        pyro.factor("of the prior", -x.square())
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        log_survival = dist.Normal(0.0, 1.0).cdf(x - late).log()
        with pyro.plate("late", len(late)), poutine.mask(mask=late > 0):
            if is_factor:
                pyro.factor("censored", log_survival)
            else:
                pyro.sample("censored", dist.Bernoulli(log_survival.exp()), obs=late.new_ones(3))

    late, draws = torch.tensor([-1.0, 1.0, 2.0], dtype=torch.float64), posterior_draws(Y)
    with pytest.warns(
        UserWarning, match="the 2 elements of the pyro.factor 'censored' are left.*Cu"
    ):
        found = Pointwise.of(Target(model, Y, late, True), draws)
    assert found.labels == tuple(f"y[{i}]" for i in range(6))
    found = Pointwise.of(Target(model, Y, late, False), draws)
    assert found.labels[:2] == ("censored[1]", "censored[2]") and len(found.labels) == 8


@pytest.mark.parametrize(
    ("model", "y", "draws", "message"),
    [
        (infinite_weight, [0.0, 1.0, 2.0], 0, r"observation y\[1\] .* not finite at 20 of 20"),
        (only_a_factor, [0.0, 1.0], 0, "observes nothing by pyro.sample"),
        (
            summed_out,
            [0.0, 1.0],
            1,
            "is not known, because they share discrete latents",
        ),
        (normal, [2.0, 2.0, 2.0], 0, "all 3 observations of site 'y' are equal"),
        (normal, [0.0, 1.0], 2, "no posterior draws: all values of 'x' are equal.*Cure"),
    ],
)
def test_errors_name_the_site_and_the_cure(model, y, draws, message):
    found = [torch.randn(4, 5), torch.randn(4, 5, 2), torch.ones(4, 5)][draws]
    target = Target(model, torch.tensor(y)) if model is not infinite_weight else None
    if target is None:  # its density is not finite anywhere
        with pytest.raises(ValueError, match=message):
            Pointwise.of(Target(model, torch.tensor(y)), {"x": found})
        return
    with pytest.raises(ValueError, match=message):
        Pointwise.of(target, {"x": found})
