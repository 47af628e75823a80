# SPDX-License-Identifier: Apache-2.0
"""``fit`` of networks: an ensemble, then a chain from each member."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import AutoEnsemble, fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import (
    BudgetPolicy,
    Fit,
    FitPolicy,
    NetworkPolicy,
    network_fit,
    training,
)
from pyro_implicit.fitting.network_fit import affordable_members, is_worse, split_rows
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.nn import classifier, evaluate, predict, regressor, to_bayesian_

ROWS, DIM, NOISE = 60, 110, 0.5
#: The cost of these networks is estimated, not measured: budgets give the same steps everywhere.
POLICY = NetworkPolicy(
    num_members=6,
    training_seconds=1.0,
    chain_seconds=1e3,
    most_gradients=2500,
    least_held_out=6,
    cost_ratio=1.0,
    compiled_seconds=math.inf,
)
#: The same with shorter chains.
SHORT = replace(POLICY, most_gradients=200)


@pytest.fixture(scope="module")
def linear():
    """A network without hidden layers: conjugate."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, DIM)
    y = x @ torch.randn(DIM) / DIM**0.5 + NOISE * torch.randn(ROWS)
    net = to_bayesian_(nn.Linear(DIM, 1, bias=False), dist.Normal(0.0, DIM**-0.5))
    return regressor(net, ROWS, noise=NOISE), x, y


@pytest.fixture(scope="module")
def fitted(linear):
    model, x, y = linear
    return fit(model, "auto", x, y, seed=0, progress=False, policy=FitPolicy(network=POLICY))


def test_predictions_of_a_conjugate_network(linear, fitted):
    _, x, y = linear
    new = torch.randn(20, DIM, generator=torch.Generator().manual_seed(1)).double()
    x, y = x.double(), y.double()
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + DIM * torch.eye(DIM, dtype=x.dtype))
    mean = new @ covariance @ x.T @ y / NOISE**2
    sd = (new @ covariance * new).sum(-1).sqrt()
    weights = fitted.refined.get_samples()["weight"].squeeze(-2).double()
    found = weights @ new.T
    # About two hundred effective draws, and the step size's two per cent.
    assert ((found.mean(0) - mean) / sd).abs().mean() < 0.15
    assert abs((found.std(0) / sd).mean() - 1) < 0.1
    assert isinstance(fitted.guide, AutoEnsemble) and fitted.refined.num_chains == 6
    assert "of the predictions: means may be off" in str(fitted)


@pytest.fixture(scope="module")
def interrupted(linear):
    """A fit with short chains, that Ctrl-C ends in its generators."""

    def generators_of(*args):
        raise KeyboardInterrupt

    model, x, y = linear
    options = {"seed": 0, "progress": False, "policy": FitPolicy(network=SHORT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_fit, "generators_of", generators_of)
        return fit(model, "auto", x, y, teach=True, **options)


def test_results_predict(linear, fitted):
    _, x, y = linear
    (found,) = predict(fitted, [x[:5]], 50)
    assert found.mean.shape == (5,)
    assert evaluate(fitted, [(x, y)]).rmse < 0.6


@pytest.mark.parametrize("refine", ["auto", True])
def test_a_small_budget_ends_with_the_ensemble(linear, refine):
    policy = FitPolicy(
        network=NetworkPolicy(2, training_seconds=0.1, chain_seconds=0.0, least_gradients=100)
    )
    model, x, y = linear
    options = {"seed": 0, "progress": False, "policy": policy, "refine": refine}
    result = fit(model, "auto", x, y, **options)
    names = [stage.name for stage in result.stages]
    assert names == (["ensemble"] if refine == "auto" else ["ensemble", "mclmc"])
    assert len(result.sample(4)["weight"]) == 4


@pytest.mark.parametrize(
    ("overhead", "each", "expected"),
    [(1.0, 0.05, 20), (1.0, 0.01, 30), (1.0, 0.5, 4), (1.0, 0.0, 4)],  # as much as the overhead
)
def test_cheap_members_are_many(linear, monkeypatch, overhead, each, expected):
    model, x, y = linear
    monkeypatch.setattr(Target, "seconds", lambda _, number: 4 * (overhead + each * number))
    policy = NetworkPolicy(least_members=4, most_members=30, cost_ratio=0.25)
    target = Target(model, x, y)
    assert abs(affordable_members(target, policy) - expected) <= (expected == 20)
    assert affordable_members(target, replace(policy, num_members=7)) == 7


@pytest.mark.parametrize(("chain_seconds", "training_seconds"), [(0.0, 5.0), (1e3, 1.0)])
def test_many_rows_train_by_minibatches(linear, monkeypatch, chain_seconds, training_seconds):
    """Steps have 20 rows, and the ensemble agrees with one of all rows."""
    model, x, y = linear
    seen, original = [], training._step

    def step(evaluate, optimiser, weight, clip_norm, args, kwargs):
        seen.append(len(args[0]))
        return original(evaluate, optimiser, weight, clip_norm, args, kwargs)

    monkeypatch.setattr(training, "_step", step)
    network = replace(POLICY, chain_seconds=chain_seconds, most_gradients=50)
    network = replace(network, training_seconds=training_seconds)
    means = {}
    for most_rows in (1000, 30):
        policy = FitPolicy(network=replace(network, most_rows=most_rows, batch_rows=20))
        result = fit(model, "auto", x, y, seed=0, progress=False, policy=policy)
        means[most_rows] = result.guide.get_samples()["weight"].mean(0).squeeze(0)
        assert len(result.held_out) == (2 if chain_seconds else 0)
        assert result.source[1][0] is x
        sizes, count = set(seen), len(seen)
        seen.clear()
        assert sizes == ({20} if most_rows == 30 else {54 if chain_seconds else 60})
        assert count == 100 if chain_seconds else count > 100  # 100 are the least
    if not chain_seconds:  # without early stopping
        first, second = (x @ mean for mean in means.values())
        assert (first - second).square().mean() < 0.02 * first.var()


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_long_chains_are_compiled(linear, monkeypatch, seconds):
    model, x, y = linear
    modes = []

    def refine_target(plan):
        modes.append(plan.compile)
        raise KeyboardInterrupt

    monkeypatch.setattr(network_fit, "refine_target", refine_target)
    monkeypatch.setattr(network_fit, "has_compiler", lambda: True)
    network = replace(SHORT, chain_seconds=seconds, most_gradients=10**6, compiled_seconds=10.0)
    options = {"seed": 0, "progress": False, "policy": FitPolicy(network=network)}
    fit(model, "auto", x, y, refine=True, **options)
    monkeypatch.setattr(network_fit, "has_compiler", lambda: False)
    fit(model, "auto", x, y, refine=True, **options)
    assert modes == [True if seconds > 10 else "auto", "auto"]


def test_small_networks_are_like_other_models(linear):
    _, x, y = linear
    model = regressor(to_bayesian_(nn.Linear(3, 1)), ROWS, noise=NOISE)
    result = fit(model, "auto", x[:, :3], y, seed=0, progress=False)
    assert result.stages[0].name == "search"


def test_held_out_rows_and_their_model(linear):
    model, x, y = linear
    rows = split_rows(model, (x,), {"y": y}, NetworkPolicy(least_held_out=6))
    held_x, held_y = rows.held[0]
    assert (len(rows.x), len(held_x), rows.model.num_data, model.num_data) == (54, 6, 54, 60)
    everything = torch.cat([rows.y, held_y]).sort().values
    assert torch.equal(everything, y.sort().values)
    ranks = torch.bucketize(held_y.sort().values, y.sort().values)
    assert (ranks // 10).tolist() == [*range(6)]  # one row of each tenth
    again = split_rows(model, (x, y), {}, NetworkPolicy(least_held_out=6))
    assert torch.equal(held_x, again.held[0][0])
    assert split_rows(model, (x, y), {}, NetworkPolicy(least_held_out=7)) is None


def test_a_class_with_one_row_is_not_held_out():
    model = classifier(to_bayesian_(nn.Linear(2, 4)), 40)
    y = torch.arange(40) % 2
    policy = NetworkPolicy(least_held_out=1)
    for place in range(40):
        labels = y.clone()
        labels[place] = 2  # the class 3 is missing
        rows = split_rows(model, (torch.zeros(40, 2), labels), {}, policy)
        assert (rows.y == 2).sum() == 1 and 3 <= len(rows.held[0][1]) <= 4


def noise_without_a_signal():
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 8, generator=random), torch.randn(120, generator=random)
    net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 2))
    torch.manual_seed(0)
    return regressor(to_bayesian_(net), 60, noise="heteroscedastic"), x, y


def test_the_ensemble_stops_where_it_predicts_held_out_rows_best():
    model, x, y = noise_without_a_signal()
    rows = [(x[60:90], y[60:90]), (x[90:], y[90:])]
    policy = FitPolicy(network=replace(POLICY, chain_seconds=0.0, score_interval=10))
    options = {"seed": 0, "progress": False, "lr": 0.05, "policy": policy, "num_steps": 200}
    result = fit(model, "auto", x[:60], y[:60], validation=rows, **options)
    found = re.search(r"best held-out score after (\d+) steps", result.stages[0].outcome)
    assert len(result.losses) == int(found[1]) + 50 < 200  # a quarter of the scores
    whole = fit(model, "auto", x[:60], y[:60], **options)
    scores = [evaluate(one, rows).log_likelihood for one in (result, whole)]
    assert len(whole.losses) > len(result.losses) and scores[0] > scores[1] + 0.2
    best = result.held_out["ensemble"].log_likelihood
    assert scores[0] == pytest.approx(best, rel=1e-5) and f"held-out NLL {-best:.3f}" in str(result)


def test_given_rows_for_validation_leave_all_others_to_the_chains():
    model, x, y = noise_without_a_signal()
    rows, policy = [(x[60:], y[60:])], FitPolicy(network=replace(SHORT, training_seconds=0.1))
    options = {"seed": 0, "progress": False, "policy": policy, "refine": True}
    result = fit(model, "auto", x[:60], y[:60], validation=rows, **options)
    assert [stage.name for stage in result.stages] == ["ensemble", "mclmc"]
    assert list(result.held_out) == ["ensemble", "mclmc"]
    assert all(one.num_rows == 60 for one in result.held_out.values())


@pytest.mark.parametrize(("width", "refine"), [(2, "auto"), (30, False)])
def test_validation_needs_an_ensemble_or_minibatches(width, refine):
    model = regressor(to_bayesian_(nn.Linear(width, 4)), 10, noise=1.0)
    x, y = torch.zeros(10, width), torch.zeros(10, 4)
    with pytest.raises(ValueError, match="more than 100 weights.*Cure: batches=loader"):
        fit(model, "auto", x, y, validation=[(x, y)], refine=refine, progress=False)


@pytest.mark.parametrize("width", [2, 30])
@pytest.mark.parametrize("by_batches", [False, True])
def test_a_network_needs_targets(width, by_batches):
    model = regressor(to_bayesian_(nn.Linear(width, 4)), 10, noise=1.0)
    x = torch.zeros(10, width)
    data = {"batches": [x]} if by_batches else {"model_kwargs": {"x": x}}
    with pytest.raises(
        ValueError, match=r"no targets y to learn from. Cure: fit\(model, 'auto', x"
    ):
        fit(model, **data, progress=False)


@pytest.mark.parametrize(
    ("rest", "message"),
    [({"labels": 0}, "'labels'.*Cure: leave it out"), ({"y": 0, "z": 0}, "'z'")],
)
def test_wrong_arguments_of_a_network_are_named_by_its_call(rest, message):
    model = regressor(to_bayesian_(nn.Linear(2, 1)), 10, noise=1.0)
    rest = {name: torch.zeros(10) for name in rest}
    with pytest.raises(TypeError, match=message):
        fit(model, "auto", torch.zeros(10, 2), **rest, progress=False)


def test_slow_gradients_of_a_recurrent_network_leave_the_time_to_the_ensemble(monkeypatch):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.RNN(1, 10, batch_first=True), nn.Linear(10, 1)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    # The counts promise hundreds of gradients, the clock none.
    monkeypatch.setattr(network_fit, "_measured_seconds", lambda target, members: 60.0)
    x, options = torch.randn(40, 5, 1), {"seed": 0, "progress": False, "max_seconds": 0.7}
    model = regressor(to_bayesian_(Last()), 40, noise=0.1)
    policy = FitPolicy(network=NetworkPolicy(num_members=4, least_gradients=50))
    with pytest.warns(UserWarning, match="one particle at a time|after .* steps"):
        result = fit(model, "auto", x, x.sum((1, 2)), policy=policy, **options)
    assert [stage.name for stage in result.stages] == ["ensemble"]
    assert "no chains, because the time left allows" in result.stages[0].outcome


@pytest.mark.parametrize("refine", ["auto", True])
def test_minibatches_train_an_ensemble(refine):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(240, 2, generator=random)
    y = (x[:, 0] * x[:, 1] > 0).long()
    torch.manual_seed(0)
    net = to_bayesian_(nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2)))
    policy = FitPolicy(network=NetworkPolicy(num_members=4))
    batches = list(zip(x[:200].split(50), y[:200].split(50), strict=True))
    result = fit(
        classifier(net, 200), "auto", batches=batches,
        validation=[(x[200:], y[200:])], epochs=40 if refine is True else 2, refine=refine,
        seed=0, progress=False, policy=policy,
    )  # fmt: skip
    members = result.guide.get_samples()["0.weight"]
    assert result.chosen == "ensemble" and len(members.flatten(1).unique(dim=0)) == 4
    assert list(result.held_out) == (["ensemble"] if refine == "auto" else ["ensemble", "refine"])
    first = result.stages[0].outcome
    assert re.search(r"at epoch \d+, the best of \d+.*; held-out NLL \d\.\d{3} \+- ", first)
    assert ("no chains, which need all data or refine=True" in first) == (refine == "auto")
    # The score that ends the training is that of all members.
    best = float(re.search(r"held-out NLL ([\d.]+) at epoch", first)[1])
    assert result.held_out["ensemble"].nll == pytest.approx(best, rel=1e-3)
    if refine is True:
        assert evaluate(result, [(x[200:], y[200:])]).accuracy > 0.9
        assert result.refined.num_chains == 4


def test_generators_learn_from_the_chains(linear, tmp_path):
    """Each has the mean of a window of its chain, and half of the covariance."""
    model, x, y = linear
    policy = FitPolicy(network=replace(SHORT, most_gradients=400))
    result = fit(model, "auto", x, y, teach=True, seed=0, progress=False, policy=policy)
    assert [stage.name for stage in result.stages][-1] == "teach" and result.chosen == "generators"
    chains = result.refined.get_samples(group_by_chain=True)["weight"].squeeze(-2)
    windows = [one for chain in chains for one in chain.tensor_split(max(1, len(chain) // 4))]
    within = torch.stack([window.T.cov() for window in windows]).mean(0)
    means = torch.stack([window.mean(0) for window in windows])
    expected = 0.7**2 * within + means.T.cov(correction=0)
    result.save(tmp_path / "fit.pt")
    guide = Fit.load(tmp_path / "fit.pt", model, x, y).guide
    draws = guide.sample_posterior(20_000)["weight"].squeeze(-2)
    assert len(guide.components) == len(windows) and len(draws.unique(dim=0)) == 20_000
    # 20,000 draws: errors of .7 % of the sd.
    assert ((draws.mean(0) - means.mean(0)) / expected.diag().sqrt()).abs().max() < 0.04
    assert (draws.T.cov() - expected).abs().max() < 0.06 * expected.diag().max()
    found = re.search(r"against the chains: (-?\d\.\d{4}) \+- (\d\.\d{4})", str(result))
    assert abs(float(found[1])) < 0.2  # six rows


def test_generators_need_chains(linear):
    model, x, y = linear
    small = regressor(to_bayesian_(nn.Linear(3, 1)), ROWS, noise=NOISE)
    wrong = [
        ((model, x, y), {"refine": False}), ((small, x[:, :3], y), {}),
        ((model,), {"batches": [(x, y)]}),
    ]  # fmt: skip
    for (net, *data), options in wrong:
        with pytest.raises(ValueError, match="teach=True makes generators from chains.*Cure"):
            fit(net, "auto", *data, teach=True, progress=False, **options)


def report(log_prob):
    return SimpleNamespace(log_prob=log_prob)


def test_significantly_worse_by_pairs_of_rows():
    policy = NetworkPolicy(num_errors=2.0, least_fall=0.01)
    # The mean falls by 0.1 with the standard error 0.05 (99 rows each way, sd 0.5).
    old = 10 * torch.randn(100)
    step = torch.cat([torch.full((50,), 0.5), torch.full((50,), -0.5)]) * (99 / 100) ** 0.5
    assert is_worse(report(old - 0.101 + step), report(old), policy)
    assert not is_worse(report(old - 0.099 + step), report(old), policy)
    assert not is_worse(report(old + 0.101 + step), report(old), policy)
    assert is_worse(report(torch.full((100,), -math.inf)), report(old), policy)
    assert not is_worse(report(old), report(torch.full((100,), -math.inf)), policy)
    some, more = old.clone(), old.clone()
    some[0], more[:2] = -math.inf, -math.inf
    assert is_worse(report(more), report(some), policy)
    assert not is_worse(report(some), report(more), policy)
    assert not is_worse(report(some), report(some), policy)


def test_differences_without_a_standard_error():
    """Rows of one target and one prediction have one score."""
    policy, old = NetworkPolicy(least_fall=0.01), torch.full((50,), 0.3)
    assert not is_worse(report(old - 1e-6), report(old), policy)  # rounding
    assert is_worse(report(old - 0.02), report(old), policy)
    assert not is_worse(report(old[:1] - 9), report(old[:1]), policy)  # one row has no error


@pytest.mark.parametrize(("activation", "value"), [(nn.ReLU, 0.0), (nn.Tanh, 0.1)])
def test_networks_with_constant_weights_learn(activation, value):
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(3, 25), activation(), nn.Linear(25, 1))
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    model = regressor(to_bayesian_(net), ROWS, noise=NOISE)
    policy = FitPolicy(network=replace(POLICY, chain_seconds=0.0))
    y = x[:, 0] * x[:, 1]
    result = fit(model, "auto", x, y, seed=0, progress=False, policy=policy)
    (found,) = predict(result, [x])
    assert (found.mean - y).square().mean() < 0.2 * y.square().mean()
    assert found.epistemic.mean() > 0


def test_held_out_rows_are_scored_and_then_given_back(linear, fitted):
    model, x, y = linear
    assert [stage.name for stage in fitted.stages] == ["ensemble", "mclmc, held out", "mclmc"]
    assert list(fitted.held_out) == ["ensemble", "mclmc, held out"]
    for stage in fitted.stages[:2]:
        assert re.search(r"held-out NLL \d\.\d{3} \+- \d\.\d{3}", stage.outcome)
    rows = split_rows(model, (x, y), {}, POLICY)
    means = rows.held[0][0] @ fitted.guide.get_samples()["weight"].squeeze(-2).T
    by_hand = dist.Normal(means, NOISE).log_prob(rows.held[0][1].unsqueeze(-1)).logsumexp(-1)
    found = fitted.held_out["ensemble"].log_prob
    assert torch.allclose(found, by_hand - math.log(POLICY.num_members), atol=1e-5)
    assert fitted.source[1][0] is x and fitted.refined.num_chains == 6
    assert f"held-out NLL {-found.mean():.3f}" in str(fitted)


def test_diagnose_judges_predictions_and_calibration(fitted):
    found = fitted.diagnose(progress=False, max_core_seconds=5.0)
    assert found.judged == "predictions at 30 of 60 inputs"
    assert found.mixing is not None and found.mixing.between >= 1
    assert found.held_out is fitted.held_out["mclmc, held out"]
    assert re.search(r"held-out rows +NLL \d\.\d{3} on 6 rows, coverage", str(found))


def test_chains_that_predict_worse_are_rejected(linear, monkeypatch):
    monkeypatch.setattr(network_fit, "is_worse", lambda *args: True)
    model, x, y = linear
    options = {"seed": 0, "progress": False, "policy": FitPolicy(network=SHORT)}
    result = fit(model, "auto", x, y, **options)
    assert result.refined is None and len(result.stages) == 2
    assert "significantly worse than the ensemble, which stays the result" in str(result)
    assert list(result.held_out)[-1] == "ensemble"
    assert fit(model, "auto", x, y, refine=True, **options).refined is not None


@pytest.mark.parametrize("has_rows", [True, False])
def test_chains_that_time_ends_early_are_rejected(linear, monkeypatch, has_rows):
    """The ensemble stays, whatever the plan promised."""
    original = network_fit.refine_target

    def refine_target(plan):
        return replace(original(replace(plan, max_gradients=40)), stopped="max_seconds")

    monkeypatch.setattr(network_fit, "refine_target", refine_target)
    model, x, y = linear
    network = replace(SHORT, least_gradients=2000, least_held_out=1 if has_rows else 10**6)
    options = {"policy": FitPolicy(network=network), "seed": 0, "progress": False}
    result = fit(model, "auto", x, y, max_seconds=20.0, **options)
    assert result.refined is None and result.chosen == "ensemble"
    assert f"fewer than {500 if has_rows else 2000} gradients: the ensemble stays" in str(result)


def test_hardly_any_training_is_named(linear, monkeypatch):
    original = Stages.train_alone

    def train_alone(self, name, guide, loss, time_share, num_steps, **options):
        return original(self, name, guide, loss, time_share, num_steps=3, **options)

    monkeypatch.setattr(Stages, "train_alone", train_alone)
    model, x, y = linear
    options = {"policy": FitPolicy(network=replace(SHORT, least_gradients=10**15))}
    with pytest.warns(UserWarning, match="after 3 steps.*Cure: a larger max_seconds"):
        fit(model, "auto", x, y, max_seconds=20.0, seed=0, progress=False, **options)


def test_fewer_rows_than_num_data_are_refused(linear):
    model, x, y = linear
    with pytest.raises(ValueError, match=r"num_data of the network is .*Cure: num_data=len\(x\)"):
        fit(model, "auto", x[:-1], y[:-1], progress=False)


@pytest.mark.parametrize(("least_gradients", "rows"), [(1, 1), (10**15, 1), (10**15, 1000)])
def test_without_time_for_chains_the_ensemble_sees_all_rows(
    linear, monkeypatch, least_gradients, rows
):
    """It may then train until the time limit, and does so by minibatches."""
    seen, original = [], Stages.train_alone

    def train_alone(self, name, guide, loss, time_share, num_steps, **options):
        seen.append((time_share, num_steps))
        return original(self, name, guide, loss, time_share, num_steps=10, **options)

    def refine_target(plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stages, "train_alone", train_alone)
    monkeypatch.setattr(network_fit, "refine_target", refine_target)
    model, x, y = linear
    network = replace(SHORT, least_gradients=least_gradients, most_rows=rows, batch_rows=20)
    policy = FitPolicy(network=network, budget=BudgetPolicy(fewest_steps=0))
    options = {"seed": 0, "progress": False, "policy": policy, "num_steps": 20}
    result = fit(model, "auto", x, y, max_seconds=60.0, **options)
    if least_gradients == 1:
        assert list(result.held_out) == ["ensemble"] and seen == [(SHORT.training_share, 20)]
    else:
        assert not result.held_out and "no chains, because the time left allows" in str(result)
        assert seen == [(1.0, 20 if rows == 1000 else sys.maxsize)]


@pytest.mark.parametrize("max_seconds", [None, 20.0])
def test_chains_take_their_measured_time(linear, monkeypatch, max_seconds):
    """By the budget and the ratio of costs, or by the clock alone if the user sets a limit."""
    model, x, y = linear
    calls = []

    def refine_target(plan):
        calls.append((plan.max_gradients, plan.limit.seconds()))
        raise KeyboardInterrupt

    monkeypatch.setattr(network_fit, "refine_target", refine_target)
    found = []
    for ratio in (1.0, 0.5):
        network = NetworkPolicy(2, cost_ratio=ratio, training_seconds=0.01, chain_seconds=5.0)
        options = {"max_seconds": max_seconds, "seed": 0, "progress": False, "num_steps": 20}
        result = fit(model, "auto", x, y, policy=FitPolicy(network=network), **options)
        assert result.interrupted
        found.append(calls.pop())
    (first, _), (second, left) = found
    if max_seconds is None:
        assert 1000 < first < second < network.most_gradients and second / first == pytest.approx(
            2, rel=1e-3
        )
    else:
        assert first == second > 10**15 and 0 < left < 20


def interrupt_at(monkeypatch, number, error=KeyboardInterrupt):
    """Press Ctrl-C in a call of ``refine_target``, the first is 1."""
    calls, original = [], network_fit.refine_target

    def refine_target(plan):
        calls.append(plan)
        if len(calls) == number:
            raise error
        return original(plan)

    monkeypatch.setattr(network_fit, "refine_target", refine_target)


@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_in_chains_returns_the_best_so_far(linear, monkeypatch, number):
    interrupt_at(monkeypatch, number)
    model, x, y = linear
    policy = FitPolicy(network=SHORT)
    result = fit(model, "auto", x, y, seed=0, progress=False, policy=policy)
    assert result.interrupted and (result.refined is None) == (number == 1)
    assert len(result.held_out) == number and len(result.sample(4)["weight"]) == 4


def test_ctrl_c_in_the_ensemble_returns_it(linear, monkeypatch):
    steps, original = [], training._step

    def step(*args):
        steps.append(args)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(training, "_step", step)
    model, x, y = linear
    policy = FitPolicy(network=SHORT)
    result = fit(model, "auto", x, y, seed=0, progress=False, policy=policy)
    assert result.interrupted and len(result.losses) == 4 and result.refined is None
    assert len(result.sample(6)["weight"]) == 6
    assert result.source[1][0] is x


def test_a_fit_that_is_killed_in_its_chains_goes_on(linear, interrupted, monkeypatch, tmp_path):
    model, x, y = linear
    options = {"seed": 0, "progress": False, "policy": FitPolicy(network=SHORT)}
    interrupt_at(monkeypatch, 2, SystemExit)
    with pytest.raises(SystemExit):
        fit(model, "auto", x, y, checkpoint=tmp_path, **options)
    resumed = fit(model, "auto", x, y, checkpoint=tmp_path, **options)
    whole = interrupted.refined.get_samples()["weight"]  # its chains have ended
    assert resumed.refined.get_samples()["weight"].equal(whole)


def test_ctrl_c_in_the_generators_returns_the_chains(interrupted):
    result = interrupted
    assert result.interrupted and result.chosen == "ensemble"
    assert result.refined.num_chains == 6 and len(result.sample(4)["weight"]) == 4


def test_an_ensemble_that_is_killed_goes_on(linear, monkeypatch, tmp_path):
    """By minibatches, whose order a checkpoint stores; the chains start from the best members."""
    steps, starts, original = [], [], training._step

    def step(*args):
        steps.append(args)
        if len(steps) == 60:
            raise SystemExit
        return original(*args)

    def refine_target(plan):
        starts.append(plan.sampler.guide["weight"])
        raise KeyboardInterrupt

    monkeypatch.setattr(network_fit, "refine_target", refine_target)
    model, x, y = linear
    policy = FitPolicy(network=replace(SHORT, most_rows=30, batch_rows=20, score_interval=10))
    options = {"seed": 0, "progress": False, "policy": policy, "lr": 0.05, "num_steps": 200}
    whole = fit(model, "auto", x, y, **options)
    monkeypatch.setattr(training, "_step", step)
    options |= {"checkpoint": tmp_path, "checkpoint_every": 25}
    with pytest.raises(SystemExit):
        fit(model, "auto", x, y, **options)
    resumed = [fit(model, "auto", x, y, **options) for _ in range(2)]  # the second one trained
    assert all(one.losses == whole.losses for one in resumed)
    best = whole.guide.get_samples()["weight"]
    assert all(one.guide.get_samples()["weight"].equal(best) for one in resumed)
    assert all(start.equal(best) for start in starts)
