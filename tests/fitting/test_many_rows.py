# SPDX-License-Identifier: Apache-2.0
"""``fit`` with few latent variables and many rows: a search of some of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit
from pyro_implicit.density.pass_target import WholeTarget
from pyro_implicit.density.target import Target
from pyro_implicit.fitting import BudgetPolicy, FitPolicy, many_rows_fit, passes, stages
from pyro_implicit.fitting.policy import ManyRowsPolicy
from pyro_implicit.fitting.refinement import ChainPlan, Plan
from pyro_implicit.guides import AutoImplicit, AutoMixture

QUIET = {"seed": 0, "progress": False}
NUM_ROWS, DIM = 1200, 4
POLICY = ManyRowsPolicy(num_starts=2, search_rounds=1, num_pilot=300)
QUICK = FitPolicy(many_rows=POLICY)
#: The same with few gradients of chains.
SHORT = replace(
    QUICK,
    budget=BudgetPolicy(most_gradients=50, least_gradients=50, patience=1, patient_seconds=0.0),
)


def data():
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(NUM_ROWS, 1, generator=generator)
    x = common + torch.randn(NUM_ROWS, DIM, generator=generator) * torch.logspace(-1.5, 0, DIM)
    return x, x.sum(-1) + torch.randn(NUM_ROWS, generator=generator)


def linear(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(DIM), 3.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)


@pytest.fixture(scope="module")
def found():
    return fit(linear, "auto", *data(), policy=QUICK, **QUIET)


def test_a_correlated_posterior(found):
    """Exact draws from a search of 300 rows, and what else a result of all data offers."""
    x, y = (part.double() for part in data())
    covariance = torch.linalg.inv(x.mT @ x + torch.eye(DIM).double() / 9)
    draws, sds = found.sample(8000)["weights"].double(), covariance.diagonal().sqrt()
    assert ((draws.mean(0) - covariance @ (x.mT @ y)) / sds).abs().max() < 0.05
    torch.testing.assert_close(draws.mT.cov() / sds.outer(sds), covariance / sds.outer(sds),
                               atol=0.06, rtol=0)  # fmt: skip
    assert isinstance(found.guide, AutoImplicit) and found.chosen == "gaussian"
    assert [stage.name for stage in found.stages] == ["search", "gaussian", "correct"]
    assert found.stages[0].outcome == "1 mode of 300 rows"
    assert re.fullmatch(r"\d evaluations of 1200 rows", found.stages[1].outcome)
    assert found.num_modes == 1 and not found.minibatches
    checked = found.diagnose(num_samples=500)
    assert checked.verdict == "trust" and checked.weighed == ""  # its draws are stored


def test_modes_of_different_weight():
    r"""The rows determine theta^2, and the prior how much of the mass has which sign."""
    generator = torch.Generator().manual_seed(1)
    y = 0.3 + torch.randn(NUM_ROWS, generator=generator)

    def square(y):
        theta = pyro.sample("theta", dist.Normal(0.5, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)

    policy = replace(QUICK, many_rows=replace(POLICY, num_starts=12))
    result = fit(square, "auto", y, policy=policy, **QUIET)
    assert isinstance(result.guide, AutoMixture) and len(result.stages) == 3
    grid = torch.linspace(-2, 2, 40_001).double()
    log_prob = -0.5 * (grid - 0.5) ** 2 - 0.5 * NUM_ROWS * (grid**2 - y.double().mean()) ** 2
    shares = log_prob.softmax(0)
    positive = shares[grid > 0].sum().item()
    assert result.guide.log_weights.exp().max().item() == pytest.approx(positive, abs=0.02)
    theta = result.sample(8000)["theta"].double()
    assert (theta > 0).double().mean().item() == pytest.approx(positive, abs=0.02)
    expected = (shares * grid)[grid > 0].sum() / positive
    assert theta[theta > 0].mean().item() == pytest.approx(expected.item(), abs=2e-3)


def test_rows_that_depend_on_each_other_are_searched_together():
    steps = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(2))

    def series(y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("steps", len(y) - 1):
            pyro.sample("y", dist.Normal(slope * y[:-1], 1.0), obs=y[1:])

    result = fit(series, "auto", steps, policy=QUICK, **QUIET)
    assert result.stages[0].name == "search" and "rows" not in result.stages[0].outcome
    before, after = steps[:-1].double(), steps[1:].double()
    precision = before.square().sum() + 1
    slope = result.sample(4000)["slope"].double()
    assert (slope.mean() - (before @ after) / precision).abs() < 0.1 * precision.rsqrt()


def test_uneven_weights_lead_to_chains():
    """The stages after the search begin at its modes, and search no more."""
    strict = replace(POLICY, near_normal=1.0, max_khat=-1e9)
    result = fit(linear, "auto", *data(), policy=replace(QUICK, many_rows=strict), **QUIET)
    names = [stage.name for stage in result.stages]
    assert names[:4] == ["search", "gaussian", "correct", "gaussian"] and names.count("search") == 1
    assert result.draws is None and result.modes is not None and result.num_modes == 1


@pytest.mark.filterwarnings("ignore:fit's chains stopped at")
def test_chains_that_are_asked_for_follow():
    result = fit(linear, "auto", *data(), refine=True, policy=SHORT, **QUIET)
    assert result.refined is not None and result.draws is None


def test_a_limit_that_ends_before_the_weights(monkeypatch):
    """The draws are those of the Gaussian; a warning and the verdict say so."""
    monkeypatch.setattr(passes, "is_late", lambda limit, like: like.ndim == 2)  # not in the climb
    with pytest.warns(UserWarning, match="max_seconds left no time for importance weights"):
        result = fit(linear, "auto", *data(), policy=QUICK, **QUIET)
    assert not result.draws.settled
    assert result.diagnose(num_samples=200, num_transitions=0).verdict != "trust"


def test_a_spike_is_left_to_the_other_stages():
    """Groups whose means are equal: the density rises without bound as their scale goes to 0."""
    generator = torch.Generator().manual_seed(4)
    group = torch.arange(NUM_ROWS) % 5
    y = torch.randn(NUM_ROWS // 5, 5, generator=generator)
    y = (y - y.mean(0)).flatten()

    def groups(group, y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("groups", 5):
            effects = pyro.sample("effects", dist.Normal(0.0, scale))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(effects[..., group], 1.0), obs=y)

    result = fit(groups, "auto", group, y, policy=QUICK, **QUIET)
    assert result.stages[1].outcome.endswith("not converged") and result.draws is None
    assert result.refined is not None


def test_hopeless_weights_are_few(monkeypatch):
    """Chains follow without the weights of more draws."""
    hopeless = replace(POLICY, near_normal=1.0, least_promising=1e9)
    result = fit(linear, "auto", *data(), policy=replace(QUICK, many_rows=hopeless), **QUIET)
    assert result.stages[2].outcome.startswith("32 weights") and result.draws is None


def test_heights_that_single_precision_rounds_are_computed_in_double():
    """Sums of 1e6 nats are rounded by a tenth; the climb of a narrow posterior would stop there."""

    def tall(x, y):
        linear(x, y)
        pyro.factor("height", torch.tensor(1e6, dtype=x.dtype))

    def mixed(x, y):  # its coefficients stay in single precision
        linear(x, y)
        pyro.factor("height", 1e6 * (x.new_ones(1, DIM) @ torch.ones(DIM)).sum())

    point = torch.zeros(1, DIM)
    for model, dtype in ((linear, torch.float32), (tall, torch.float64), (mixed, torch.float32)):
        target = many_rows_fit._precise(Target(model, *data()), point, POLICY)
        assert target.init_loc.dtype == dtype
    whole = WholeTarget(many_rows_fit._precise(Target(tall, *data()), point, POLICY), NUM_ROWS)
    near = torch.tensor([[1e-4] * DIM])
    rise = whole.sums(near) - whole.sums(torch.zeros(1, DIM))
    exact = Target(linear, *data()).in_double()
    exact = exact.log_prob(near.double()) - exact.log_prob(point.double())
    torch.testing.assert_close(rise, exact, atol=1e-4, rtol=0)


def test_all_rows_are_widened_at_draws_of_their_gaussian(monkeypatch):
    """``widen_if_rounded`` gets the posterior of all rows, not that of the search."""
    x, y = (part[:300] for part in data())
    looked_at = []

    def widen(target, draw):
        looked_at.append((target, draw(4000)))
        return "widened"

    monkeypatch.setattr(stages, "widen_if_rounded", widen)
    few = replace(POLICY, least_rows=300, num_pilot=100, pilot_per_dim=10, num_starts=1)
    result = fit(linear, "auto", x, y, policy=replace(QUICK, many_rows=few), **QUIET)
    assert result.stages[1].outcome.endswith(" evaluations of 300 rows; widened")
    ((whole, draws),) = looked_at
    assert isinstance(whole, WholeTarget)
    covariance = torch.linalg.inv(x.mT @ x + torch.eye(DIM) / 9)
    sds = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - covariance @ (x.mT @ y)) / sds).abs().max() < 0.1
    torch.testing.assert_close(draws.std(0), sds, rtol=0.1, atol=0)


def test_modes_whose_gap_only_all_rows_would_show():
    """Each row of the search counts for many, so that its modes are as separate as those of all."""
    noise = torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(5))
    y = 0.4 + 3.0 * (noise - noise.mean())

    def square(y):
        theta = pyro.sample("theta", dist.Normal(0.1, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(theta**2, 3.0), obs=y)

    few = replace(POLICY, num_starts=12, num_pilot=60)
    result = fit(square, "auto", y, policy=replace(QUICK, many_rows=few), **QUIET)
    assert result.stages[0].outcome == "2 modes of 60 rows" and len(result.stages) == 3
    grid = torch.linspace(-2, 2, 40_001).double()
    log_prob = -0.5 * (grid - 0.1) ** 2 - NUM_ROWS / 18 * (grid**2 - 0.4) ** 2
    positive = log_prob.softmax(0)[grid > 0].sum().item()
    theta = result.sample(8000)["theta"]
    assert (theta > 0).double().mean().item() == pytest.approx(positive, abs=0.03)


def test_rows_that_cannot_stand_for_all_lead_to_a_search_of_all(monkeypatch):
    """One row, which is not in the search, holds all that is known of the second weight.

    If a search of all rows is too expensive, the mode of all rows is used.
    """
    x, y = data()
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 0.0
    x[order[-1], 1] = 200.0
    result = fit(linear, "auto", x, y, policy=QUICK, **QUIET)
    outcomes = [stage.outcome for stage in result.stages]
    assert "few rows hold the information" in outcomes[1] and outcomes[2].startswith("1 mode, best")
    assert result.draws is None
    monkeypatch.setattr(
        many_rows_fit, "_is_too_slow", lambda _, target: len(target.args[0]) == NUM_ROWS
    )
    result = fit(linear, "auto", x, y, policy=QUICK, **QUIET)
    assert result.stages[1].outcome.endswith("; a search of all is too expensive")
    x, y = x.double(), y.double()
    covariance = torch.linalg.inv(x.mT @ x + torch.eye(DIM).double() / 9)
    draws, sds = result.draws.samples["weights"].double(), covariance.diagonal().sqrt()
    assert ((draws.mean(0) - covariance @ (x.mT @ y)) / sds).abs().max() < 0.05
    torch.testing.assert_close(draws.std(0), sds, rtol=0.05, atol=0)


def test_what_the_shortcut_leaves_to_other_stages(monkeypatch):
    """Parameters, symmetric modes, and searches that take too long."""
    x, y = data()

    def with_parameter(x, y):
        pyro.param("shift", torch.tensor(0.0))
        linear(x, y)

    def mirrored(x, y):
        weights = pyro.sample("weights", dist.Normal(torch.zeros(DIM), 3.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal((x @ weights).abs(), 1.0), obs=y.abs())

    assert fit(mirrored, "auto", x, y, policy=QUICK, **QUIET).symmetries
    too_slow = Plan(0, ChainPlan(64, 100))
    monkeypatch.setattr(many_rows_fit, "make_plan", lambda *args: too_slow)
    searched = fit(linear, "auto", x, y, policy=QUICK, **QUIET)
    assert searched.stages[0].outcome.startswith("1 mode, best")
    monkeypatch.undo()
    options = {"num_steps": 20, "policy": QUICK, **QUIET}
    learnt = fit(with_parameter, "auto", x, y, **options)
    assert "parameters" in [stage.name for stage in learnt.stages]


def test_draws_of_the_shortcut_are_in_random_order(found):
    """Evenly spaced points share their digits: the mean of each sixteenth would be exact."""
    draws = found.draws.samples["weights"]
    means = draws.unflatten(0, (16, -1)).mean(1)
    spread = means.std(0) / draws.std(0) * (len(draws) / 16) ** 0.5
    assert spread.min() > 0.4


def test_arguments_may_be_distributions():
    def model(prior, y):
        mean = pyro.sample("mean", prior)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.ones(NUM_ROWS)
    result = fit(model, "auto", dist.Normal(0.0, 1.0), y, policy=QUICK, **QUIET)
    assert result.sample(2000)["mean"].mean().item() == pytest.approx(1.0, abs=0.01)
