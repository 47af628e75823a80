# SPDX-License-Identifier: Apache-2.0
"""Comparison of models: elpd, weights and log evidence against closed forms; refused input."""

from __future__ import annotations

import importlib
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch.distributions import constraints

from pyro_implicit import compare_models, fit, refine
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.fitting import Fit, log_evidence, model_comparison
from pyro_implicit.fitting.parameters import learnt_parameters, own_parameters
from pyro_implicit.fitting.updating import log_prob_of
from pyro_implicit.guides import StoredDraws

log_evidence_module = importlib.import_module("pyro_implicit.fitting.log_evidence")

QUIET = {"seed": 0, "progress": False}
Y = torch.tensor([0.3, -0.8, 1.1, 0.2, -0.4, 1.6, 0.7, -0.1])


def normal(y, scale):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, scale), obs=y)


def exact_evidence(y, scale):
    covariance = 4 * torch.ones(len(y), len(y)) + scale**2 * torch.eye(len(y))
    return dist.MultivariateNormal(torch.zeros(len(y)), covariance).log_prob(y).item()


def exact_elpd(y, left_out, scale):
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[left_out] = False
    variance = 1 / (1 / 4 + keep.sum() / scale**2)
    mean = variance * y[keep].sum() / scale**2
    return dist.Normal(mean, (scale**2 + variance).sqrt()).log_prob(y[left_out])


@pytest.fixture(scope="module")
def results():
    return {f"scale {s:g}": fit(normal, "auto", Y, s, **QUIET) for s in (0.8, 3.0)}


@pytest.fixture(scope="module")
def comparison(results):
    return compare_models(results, seed=0)


def test_leave_one_out_and_evidence(results, comparison):
    for name, scale in (("scale 0.8", 0.8), ("scale 3", 3.0)):
        exact = torch.stack([exact_elpd(Y, i, scale) for i in range(len(Y))]).double()
        torch.testing.assert_close(comparison.elpd[name], exact, rtol=0, atol=0.03)
        row = comparison.table.loc[name]
        assert row["elpd_loo"] == pytest.approx(exact.sum().item(), abs=0.05)
        assert row["se"] == pytest.approx(math.sqrt(8) * exact.std(correction=0).item(), rel=0.05)
        found = comparison.evidence[name]
        assert found.value == pytest.approx(exact_evidence(Y, scale), abs=0.01)
        assert found.standard_error < 0.01
        bound = comparison.bounds[name]
        assert found.value > bound.value - 4 * bound.standard_error - 1e-3
    assert comparison.table["stacking"].sum() == pytest.approx(1.0)
    assert list(comparison.table.index) == ["scale 0.8", "scale 3"] and not comparison.bad
    text = str(comparison)
    assert "log evidence" in text and "scale 0.8" in text and "pseudo-BMA" in text


@pytest.fixture
def few_draws(monkeypatch):
    """Compute log-likelihoods and evidence from few draws."""
    few = replace(DECISIONS, num_draws=400, most_draws=400, evidence_chains=32)
    for module in (model_comparison, log_evidence_module):
        monkeypatch.setattr(module, "DECISIONS", few)


@pytest.mark.usefixtures("few_draws")
def test_the_same_seed_gives_the_same_table(results):
    first = compare_models(results, seed=0)
    torch.manual_seed(99)
    outside = torch.get_rng_state()
    again = compare_models(results, seed=0)
    assert torch.equal(torch.get_rng_state(), outside)
    assert str(again) == str(first)


def test_k_fold_in_parallel(results, monkeypatch):
    few = replace(DECISIONS, most_draws=DECISIONS.num_draws)
    monkeypatch.setattr(model_comparison, "DECISIONS", few)
    with ThreadPoolExecutor(1) as executor:
        found = compare_models(results, folds=2, executor=executor, evidence=False, seed=0)
    torch.manual_seed(0)
    serial = compare_models(results, folds=2, evidence=False, seed=0)
    for name, scale in (("scale 0.8", 0.8), ("scale 3", 3.0)):
        assert torch.equal(found.elpd[name], serial.elpd[name])
        # One of the 35 partitions into halves gives all eight densities.
        halves = torch.tensor([[0, *rest] for rest in combinations(range(1, 8), 3)])
        exact = torch.empty(len(halves), 8)
        for row, half in zip(exact, halves, strict=True):
            others = torch.tensor([i for i in range(8) if i not in half])
            row[half], row[others] = (exact_elpd(Y, out, scale) for out in (half, others))
        assert (exact - found.elpd[name]).abs().amax(-1).min() < 0.03
    assert "K-fold" in str(found) and "bad" not in str(found)
    found.plot()
    plt.close("all")


def test_k_fold_names_observations_that_few_draws_explain():
    """Where draws are few, the mean of their densities is far below the exact one."""
    y = torch.tensor([0.1, -0.3, 0.2, 4.0])

    def mean(y, prior_sd):
        m = pyro.sample("m", dist.Normal(0.0, prior_sd))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(m, 0.2), obs=y)

    results = {str(sd): fit(mean, "auto", y, sd, seed=0, progress=False) for sd in (5.0, 10.0)}
    message = r"is unreliable at . of 4 observations \(.*y\[3\];.*Cure: leave-one"
    with pytest.warns(UserWarning, match=message):
        found = compare_models(results, folds=2, evidence=False, seed=0)
    assert found.elpd["5.0"].isfinite().all()


def test_plot_of_leave_one_out(comparison):
    figure = comparison.plot()
    assert len(figure.axes) == 2 and len(figure.axes[1].lines) == 3
    plt.close("all")


def two_modes():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    normals = dist.Normal(torch.stack([x, -x], -1), 0.5)
    half = dist.Categorical(torch.tensor([0.3, 0.7]).expand(2, 2))
    pyro.sample(
        "y", dist.MixtureSameFamily(half, normals).to_event(1), obs=torch.tensor([3.0, 2.0])
    )


def test_evidence_of_four_modes(monkeypatch):
    # Chains that stay in separate modes do not end before their budget.
    monkeypatch.setattr(log_evidence_module, "refine", partial(refine, max_gradients=400))
    # by symmetry of the prior, each component has the same marginal density
    exact = dist.Normal(0.0, math.sqrt(25.25)).log_prob(torch.tensor([3.0, 2.0])).sum().item()
    found = log_evidence(fit(two_modes, "auto", **QUIET))
    assert found.value == pytest.approx(exact, abs=0.03)
    assert found.standard_error < 0.02


def flat(y, scale):
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, scale), obs=y)


@pytest.mark.usefixtures("few_draws")
def test_flat_priors_have_no_evidence_but_leave_one_out(results):
    stored = StoredDraws(results["scale 0.8"].sample(2_000))
    proper = replace(results["scale 0.8"], guide=stored, correction=None)
    found = compare_models({"flat": fit(flat, "auto", Y, 0.8, **QUIET), "proper": proper}, seed=0)
    assert found.evidence["flat"] is None and "site 'x' is flat" in found.notes["flat"]
    assert "flat has no log evidence: the prior" in str(found)
    assert found.bounds["proper"] is None and found.notes["proper"].startswith("no bound: ")


def poisson(y, scale):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def other_site(y, scale):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("z", dist.Normal(x, scale), obs=y)


def raw(model, y):
    """A result without a fit: its guide draws the prior."""
    return Fit(
        guide=lambda *args: {"x": pyro.sample("x", dist.Normal(0.0, 1.0))},
        source=(model, (y, 1.0), {}),
    )


def test_refused_input(results, monkeypatch):
    few = replace(DECISIONS, num_draws=40, most_draws=40)
    monkeypatch.setattr(model_comparison, "DECISIONS", few)
    first = results["scale 0.8"]
    with pytest.raises(ValueError, match="at least two results"):
        compare_models({"a": first})
    with pytest.raises(TypeError, match="model 'b': .*results of fit, but got dict"):
        compare_models({"a": first, "b": {}})
    with pytest.raises(ValueError, match="model 'b': the result has no posterior draws"):
        compare_models({"a": first, "b": Fit(source=(normal, (Y, 1.0), {}))})
    with pytest.raises(ValueError, match="model 'b': .* point guide"):
        point = fit(normal, AutoDelta(normal), Y, 1.0, num_steps=2, **QUIET)
        compare_models({"a": first, "b": point})
    with pytest.raises(ValueError, match="data of site 'y' differ between model 'a' and model 'b'"):
        compare_models({"a": first, "b": raw(normal, Y + 1)})
    with pytest.raises(ValueError, match="model 'b' observes \\['z'\\].*Cure"):
        compare_models({"a": first, "b": raw(other_site, Y)})
    with pytest.raises(ValueError, match="continuous in model 'a' and discrete in model 'b'"):
        count = Y.round().abs()
        compare_models({"a": raw(normal, count), "b": raw(poisson, count)})
    with pytest.raises(SubsampledError, match="model 'b': the model was fitted by minibatches"):
        compare_models({"a": first, "b": Fit(minibatches=True, source=(normal, (Y, 1.0), {}))})
    with pytest.raises(ValueError, match="folds must be from 2 to the number of observations, 8"):
        compare_models(results, folds=9)
    with pytest.raises(ValueError, match="max_seconds must be positive"):
        compare_models(results, max_seconds=0.0)


def test_results_and_weighted_models_can_be_sent_to_processes(comparison):
    again = pickle.loads(pickle.dumps(comparison))
    assert str(again) == str(comparison)


def test_results_keep_their_own_parameters(results):
    """Another fit that changes the parameter in Pyro's store changes none of these numbers."""

    def model(y):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        normal(y, scale)

    scale = pyro.param("scale", torch.tensor(0.8), constraint=constraints.positive).detach().clone()
    learnt = learnt_parameters(model, Y)
    one = replace(results["scale 0.8"], source=(model, (Y,), {}), parameters=learnt)
    pyro.get_param_store()["scale"] = torch.tensor(9.0)
    found = compare_models({"one": one, "two": one}, seed=0, evidence=True)
    exact = sum(exact_elpd(Y, row, scale) for row in range(len(Y))).item()
    assert found.elpd["one"].sum().item() == pytest.approx(exact, abs=0.1)
    evidence = exact_evidence(Y, scale)
    assert found.evidence["one"].value == pytest.approx(evidence, abs=0.05)
    assert found.bounds["one"].value == pytest.approx(evidence, abs=0.1)
    few = compare_models({"one": one, "two": one}, seed=0, subsample=6, evidence=False)
    assert few.table.elpd_loo["one"] == pytest.approx(exact, abs=0.5)
    log_prob = log_prob_of(one, ["x"])({"x": torch.tensor([0.0, 2.0])}).diff().item()
    density = dist.Normal(torch.tensor([0.0, 2.0]).unsqueeze(-1), scale).log_prob(Y).sum(-1)
    assert log_prob == pytest.approx((density.diff() - 0.5).item(), abs=1e-3)
    pytest.importorskip("arviz")
    drawn = one.to_datatree(500, posterior_predictive=True).posterior_predictive["y"]
    assert drawn.std().item() < 3 * scale
    assert pyro.param("scale").item() == 9.0


def test_minibatches_have_the_parameters_of_each_result():
    one = SimpleNamespace(parameters={"scale": 1}, model=lambda: pyro.param("scale").item())
    one.own_parameters = lambda: own_parameters(first, one.model)
    pyro.param("scale", torch.tensor(1.0))
    first = learnt_parameters(one.model)
    pyro.param("scale").data.fill_(9.0)
    assert model_comparison._with_own_parameters(one)() == 1.0
    assert one.model() == 9.0
