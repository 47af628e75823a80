# SPDX-License-Identifier: Apache-2.0
"""Subsampled LOO: the difference estimator against repeated samples, all data and minibatches."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import compare_models, fit
from pyro_implicit.decisions.pointwise import Pointwise
from pyro_implicit.decisions.subsampled import difference_estimate, subsample_observations
from pyro_implicit.density import SubsampledError, Target

QUIET = {"seed": 0, "progress": False}
generator = torch.Generator().manual_seed(3)
Y = 0.5 + torch.randn(600, generator=generator)
Y[7] = 6.0


def normal(y, scale=1.0):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(Y), subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x, scale), obs=y)


def of_all(y, scale=1.0):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, scale), obs=y)


def exact_elpd(y, scale):
    precision = 1 / 4 + (len(y) - 1) / scale**2
    mean = (y.sum() - y) / scale**2 / precision
    return dist.Normal(mean, (scale**2 + 1 / precision) ** 0.5).log_prob(y).double()


def test_the_estimate_is_unbiased_and_its_error_that_of_repeated_samples():
    exact = exact_elpd(Y, 1.0)
    surrogate = exact + 0.2 * torch.randn(len(Y), dtype=torch.float64) + 0.3
    found = []
    for _ in range(400):
        chosen = torch.randperm(len(Y))[:150]
        found.append(difference_estimate(surrogate, chosen, exact[chosen]))
    totals, errors, spreads = torch.tensor(found, dtype=torch.float64).T
    # 400 samples: the mean within four standard errors, the sd within 15 %.
    assert abs(totals.mean() - exact.sum()) < 4 * totals.std() / 20
    assert totals.std() == pytest.approx(errors.square().mean().sqrt().item(), rel=0.15)
    data = math.sqrt(len(Y)) * exact.std(correction=0).item()
    assert spreads.mean() == pytest.approx(data, rel=0.03)


def test_the_variance_of_the_data_is_unbiased():
    """Without the variance of the estimated mean, it would be five standard errors too small."""
    torch.manual_seed(0)
    exact = torch.randn(400, dtype=torch.float64)
    surrogate, found = exact + 0.7 * torch.randn(400, dtype=torch.float64), []
    for _ in range(8_000):
        chosen = torch.randperm(400)[:20]
        found.append(difference_estimate(surrogate, chosen, exact[chosen]).error ** 2 / 400)
    variances = torch.tensor(found)
    error = variances.std() / math.sqrt(len(found))
    assert abs(variances.mean() - exact.var(correction=0)) < 3 * error


def test_all_observations_leave_no_error_of_subsampling():
    values = torch.randn(20, dtype=torch.float64)
    found = difference_estimate(torch.zeros(20), torch.arange(20), values)
    assert found.total == pytest.approx(values.sum().item()) and found.subsampling_error == 0


def test_a_negative_variance_is_that_of_the_chosen_ones():
    """The unbiased estimate is 0.505 + (0.01 - 1) + 0, where both differences are equal."""
    surrogate = torch.tensor([1.0, -1.0, 0.1, -0.1]).double()
    found = difference_estimate(surrogate, torch.tensor([0, 1]), torch.tensor([0.1, -0.1]).double())
    assert found.error == pytest.approx(math.sqrt(4 * 0.02))


def test_chosen_observations_are_those_of_all():
    torch.manual_seed(0)
    draws = {"x": 0.5 + 0.04 * torch.randn(4, 50)}
    target = Target(of_all, Y)
    part = subsample_observations(target, draws, torch.randperm(len(Y)), 40)
    every = Pointwise.of(target, draws)
    places = part.found.places
    torch.testing.assert_close(part.found.log_likelihood, every.log_likelihood[..., places])
    assert part.found.labels == tuple(every.labels[place] for place in places)
    weights = part.found.weights_with(torch.tensor([1]), 0.0)["y"]
    assert weights.sum() == len(Y) - 1 and weights[places[1]] == 0


@pytest.fixture(scope="module")
def results():
    return {str(s): fit(of_all, "auto", Y, s, **QUIET) for s in (1.0, 1.5)}


def exact_totals():
    return {s: exact_elpd(Y, float(s)).sum().item() for s in ("1.0", "1.5")}


def test_all_data(results):
    found = compare_models(results, subsample=100, evidence=False, seed=1)
    for name, exact in exact_totals().items():
        row = found.table.loc[name]
        assert abs(row["elpd_loo"] - exact) < 3 * row["subsampling_se"] + 0.1
        assert row["subsampling_se"] < 0.1 * row["se"] and len(found.elpd[name]) == 100
    gap = exact_totals()["1.0"] - exact_totals()["1.5"]
    assert found.table["elpd_diff"].iloc[1] == pytest.approx(gap, abs=1.0)
    assert list(found.table.index) == ["1.0", "1.5"] and found.table["stacking"].iloc[0] > 0.9
    assert "subsampling se" in str(found)


class Batches(list):
    """Minibatches in a new order at each pass, of the sizes 100 and 50."""

    def __iter__(self):
        rows = Y[torch.randperm(len(Y))]
        return iter([(part,) for part in rows.split([100, 50] * 4)])

    def __len__(self):
        return 8


def test_minibatches(results):
    """Their surrogates and likelihoods are not scaled to all data."""
    by_batches = {
        s: fit(lambda y, s=float(s): normal(y, s), batches=Batches(), epochs=30, **QUIET)
        for s in ("1.0", "1.5")
    }
    found = compare_models(by_batches, subsample=100, batches=Batches(), evidence=False, seed=1)
    for name, exact in exact_totals().items():
        row = found.table.loc[name]
        assert abs(row["elpd_loo"] - exact) < 3 * row["subsampling_se"] + 2.0
        assert row["se"] == pytest.approx(
            math.sqrt(len(Y)) * exact_elpd(Y, float(name)).std(correction=0).item(), rel=0.1
        )
    assert not found.loo["1.0"].is_repaired.any() and len(set(found.labels)) == 100
    with pytest.raises(SubsampledError, match=r"model '1\.0' was fitted by minibatches.*Cure"):
        compare_models(by_batches, subsample=100)


def test_refused(results):
    for options, message in [
        ({"batches": [Y]}, "batches need subsample. Cure"),
        ({"subsample": 1}, "subsample must be at least 2"),
        ({"subsample": 50, "folds": 5}, "exclude each other. Cure"),
    ]:
        with pytest.raises(ValueError, match=message):
            compare_models(results, **options)
    pairs = [(Y, torch.zeros(3))]
    with pytest.raises(ValueError, match="600 observations, and its parts have .*Cure"):
        compare_models(
            {s: fit(lambda y, z: normal(y), batches=[(Y, torch.zeros(len(Y)))], epochs=2, **QUIET)
             for s in "ab"},
            subsample=50,
            batches=pairs,
        )  # fmt: skip
