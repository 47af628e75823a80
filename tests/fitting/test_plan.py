# SPDX-License-Identifier: Apache-2.0
"""What ``fit`` plans by cost and by the clock, and what is left after Ctrl-C."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit
from pyro_implicit.density import Modes, Target, find_modes
from pyro_implicit.density.cost import estimated_seconds, nearby, seconds_near
from pyro_implicit.diagnostics.checkup import plan_effort
from pyro_implicit.fitting import (
    BudgetPolicy,
    ChoicePolicy,
    FitPolicy,
    Schedule,
    auto,
    candidates,
    refinement,
    train,
)
from pyro_implicit.fitting.candidates import mixture_weights
from pyro_implicit.fitting.marginal_fit import _within_budget
from pyro_implicit.fitting.refinement import (
    _score_of_chains,
    affordable_chains,
    chains_within,
    make_plan,
)
from pyro_implicit.fitting.stages import Stages, train_exact
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.runtime.clock import TimeLimit

QUIET = {"seed": 0, "progress": False}
#: Bounds of candidates are expensive, and their values do not matter here.
FEW = ChoicePolicy(num_weighed=100)
BUDGET = BudgetPolicy()


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    with pyro.plate("two", 2):
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))


def many():
    pyro.sample("x", dist.Normal(torch.zeros(101), 1.0).to_event(1))


def long_loop():
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    for _ in range(4000):
        x = 0.9 * x + 0.1
    pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=torch.zeros(3))


def test_plans():
    cheap = make_plan(Target(funnel))
    assert cheap.search_iterations > 500 and cheap.chains == (
        BUDGET.most_chains,
        BUDGET.most_gradients,
    )
    assert make_plan(Target(many))[:2] == (0, (BUDGET.usual_chains, BUDGET.most_gradients))
    dear = make_plan(Target(long_loop))
    assert dear.search_iterations < 100
    # A loop costs fewer chains the same.
    assert dear.chains.num_chains == BUDGET.most_chains
    assert BUDGET.least_gradients <= dear.chains.max_gradients < BUDGET.most_gradients


@pytest.mark.parametrize(
    ("climb", "expected"), [(1.0, (20, 50)), (4.0, (20, 12)), (100.0, (0, 50))]
)
def test_expensive_densities_are_searched_with_fewer_paths(climb, expected, monkeypatch):
    """Of all paths, a step takes 20 s at most if ten are to be made."""
    monkeypatch.setattr(refinement, "seconds_of_climb", lambda target: climb)
    plan = make_plan(Target(funnel))
    assert (plan.search_iterations, plan.num_starts) == expected


def read_number():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("bend", torch.zeros(()) if x.item() > 100 else -(x**2))


@pytest.mark.filterwarnings("ignore:Target runs the model one particle at a time")
def test_a_model_that_reads_a_number_has_the_plan_of_single_runs():
    """At points that are all the same the number is known, and the model runs in one go."""
    density = Target(read_number)
    plan = make_plan(density)
    assert not density.is_vectorized
    assert plan.chains.num_chains < BUDGET.most_chains and plan.search_iterations < 50
    effort = plan_effort(density, 2000, 100, 20, True, 500, 10.0)
    assert effort.num_samples < 2000 and effort.seconds < 30


@pytest.mark.parametrize("size, chains", [(2, BUDGET.usual_chains), (300, BUDGET.least_chains)])
def test_fewer_chains_where_a_gradient_is_dear(size, chains):
    def score(points):
        return torch.ones(len(points), 3, size) @ torch.ones(size, 400 * size)

    found, gradients = affordable_chains(score, torch.zeros(1))
    assert found == chains and gradients >= BUDGET.least_gradients


@pytest.mark.parametrize(
    "fixed, each, chains, gradients",
    [
        (1e-3, 1e-7, 256, 4000),
        (1e-3, 1e-5, 128, 4000),
        (0.0, 1e-5, 64, 4000),
        (0.0, 1e-3, 32, 2500),
    ],
)
def test_fewer_chains_until_a_gradient_gets_no_cheaper_or_chains_are_few(
    fixed, each, chains, gradients
):
    """From 64 on only if 1,200 gradients cost more than 40 s; 2,500 are twice those of 40 s."""
    assert chains_within(lambda n: fixed + each * n, BUDGET) == (chains, gradients)


def wide_funnel():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", dist.Normal(torch.zeros(100), scale).to_event(1))
    pyro.sample("y", dist.Normal(torch.ones(2000, 100) @ x, 1.0).to_event(1), obs=torch.zeros(2000))


def test_the_cost_of_chains_is_not_that_of_a_recording():
    """Counted with it, many points seemed to cost no more than a few, so that chains were eight
    times too many."""
    target = Target(wide_funnel)
    stages = SimpleNamespace(result=SimpleNamespace(target=target, guide=None), noise=None)
    score = _score_of_chains(stages)
    counted = seconds_near(score, target.init_loc)(256)
    points = nearby(target.init_loc, 256)
    assert counted == pytest.approx(estimated_seconds(lambda: score(points)), rel=0.3)


def test_a_model_that_fails_at_its_start_gets_a_plan(monkeypatch):
    density = Target(funnel)

    def fails(*args):
        raise RuntimeError("at the start")

    monkeypatch.setattr(density, "score", fails)
    assert make_plan(density).chains.max_gradients == BUDGET.most_gradients


def test_time_limits():
    assert TimeLimit(None).left() == math.inf
    limit = TimeLimit(100.0)
    assert 49 < limit.left(0.5) <= 50 and not limit.is_over()
    assert 0 < TimeLimit(-1.0).left() < 1e-6 and TimeLimit(-1.0).is_over()


def test_a_training_ends_in_time_with_a_rate_that_has_fallen():
    guide = AutoNormal(funnel)
    # The first step of a process is slow.
    train(funnel, guide, ImplicitELBO(2), schedule=Schedule(num_steps=1), progress=False)
    began = time.perf_counter()
    losses = train(
        funnel,
        guide,
        ImplicitELBO(2),
        schedule=Schedule(num_steps=10**6),
        max_seconds=1.0,
        progress=False,
    )
    assert 0.9 < time.perf_counter() - began < 20 and 5 < len(losses) < 10**5
    schedule = Schedule(lr=0.4)
    assert [schedule.rate_by_clock(share) for share in (0.0, 0.5, 1.0, 2.0)] == [0.4, 0.4, 0.0, 0.0]
    assert schedule.rate_by_clock(0.75) == pytest.approx(0.2)


def test_a_search_ends_in_time():
    density = Target(funnel)
    runs = 0
    derivatives = density.derivatives

    def count(points):
        nonlocal runs
        runs += 1
        return derivatives(points)

    density.derivatives = count
    assert find_modes(density, max_seconds=1e-9).loc.shape == (1, 3)
    assert runs == 1


def test_max_seconds_of_all():
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the chains have not settled
        result = fit(funnel, "auto", max_seconds=2.0, refine=True, **QUIET)
    assert time.perf_counter() - began < 60
    assert result.refined is not None
    assert "max_seconds" in str(result) or result.refined.stopped == "converged"


class Interrupting:
    """A model during whose run the user presses Ctrl-C."""

    def __init__(self, model, after):
        self.model, self.left = model, after

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.model(*args)


def runs_of(model, **options):
    counted = Interrupting(model, -1)
    options = {"num_steps": 20, "num_particles": 8, "policy": FitPolicy(choice=FEW)} | options
    result = fit(counted, "auto", refine=False, **options, **QUIET)
    return -1 - counted.left, result


def test_interrupted_in_training_keeps_the_best():
    total, _ = runs_of(funnel)
    model = Interrupting(funnel, int(0.8 * total))
    options = {"num_steps": 20, "num_particles": 8, "policy": FitPolicy(choice=FEW)}
    result = fit(model, "auto", refine=False, **options, **QUIET)
    assert result.interrupted and result.chosen in result.bounds
    assert result.sample(5)["x"].shape == (5, 2)


def test_interrupted_at_its_end_it_says_so(monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(auto, "_known_points", stop)
    model = partial(pyro.sample, "x", dist.Normal(0.0, 1.0))
    result = fit(model, "auto", refine=False, **QUIET)
    assert result.interrupted and result.known is None and "interrupted by Ctrl-C" in str(result)


def test_interrupted_before_there_is_anything():
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupting(funnel, 40), "auto", **QUIET)


def test_a_given_guide_is_kept_as_it_is():
    guide = AutoNormal(funnel)
    result = fit(Interrupting(funnel, 20), guide, num_steps=1000, **QUIET)
    assert result.interrupted and result.guide is guide
    assert result.sample(5)["v"].shape == (5,)


def test_without_chains_an_expensive_model_is_still_searched():
    options = {**QUIET, "policy": FitPolicy(budget=BudgetPolicy(search_seconds=0.0), choice=FEW)}
    result = fit(funnel, "auto", refine=False, num_steps=2, num_particles=4, **options)
    assert result.stages[0].name == "search" and result.correction is None
    assert not any(stage.name == "correct" for stage in result.stages)
    # With them it is left out.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rough = fit(funnel, "auto", num_steps=2, max_seconds=1.0, **options)
    assert rough.stages[0].name == "mean-field" and rough.refined is not None


def test_parameters_settle_in_the_last_sixth_of_their_steps(monkeypatch):
    """Of a guide, whose training may be the longer, it is the last half."""
    schedules = {}

    def trained(*args, schedule, name, **kwargs):
        schedules[name] = schedule
        return train(*args, schedule=schedule, name=name, **kwargs)

    def model():
        loc = pyro.param("loc", torch.tensor(0.0))
        x = pyro.sample("x", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.StudentT(2.0, x, 0.3), obs=torch.tensor(2.0))

    monkeypatch.setattr("pyro_implicit.fitting.stages.train", trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few steps
        fit(model, refine=False, num_steps=12, policy=FitPolicy(choice=FEW), **QUIET)
    assert schedules["parameters"].decay == pytest.approx(1 / 6)
    assert schedules["injective"].decay == Schedule.decay == 0.5


def test_weights_of_many_modes_obey_max_seconds(monkeypatch):
    """Weights by ELBOs need no density of one component at the draws of all others."""

    def never(*args, **kwargs):
        raise AssertionError("too expensive")

    centres = 8.0 * torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)) - 16.0
    log_weights = torch.linspace(0.0, 2.0, 25)

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 20.0).to_event(1))
        squares = (x - centres).square().sum(-1)
        pyro.factor("modes", (log_weights - 0.5 * squares).logsumexp(0))

    target = Target(model)
    elbo = target.log_prob(centres) + math.log(2 * math.pi)
    modes = Modes(centres, torch.eye(2).expand(25, 2, 2), elbo)
    state = Stages(model, (), {}, 100, lr=0.01, num_particles=8, limit=TimeLimit(0.05))
    weights = mixture_weights(target, state.exact_guide(modes).get_posterior().components)
    monkeypatch.setattr(candidates, "mixture_weights", never)
    with state.kept_apart():
        found = train_exact(state, target, modes, math.inf)
        state.choose(target, modes)
    assert "by the ELBOs" in state.result.stages[0].outcome
    assert "max_seconds is too short" in state.result.stages[1].outcome
    torch.testing.assert_close(found.guide.log_weights, weights, rtol=0, atol=0.03)


def test_expensive_marginal_densities_have_no_training_and_few_draws():
    policy = FitPolicy()
    expensive, few = _within_budget(policy, dim=3, value=0.01, score=0.03)
    cheap, many = _within_budget(policy, dim=3, value=1e-5, score=3e-5)
    assert expensive.schedule.max_gap == math.inf and cheap.schedule == policy.schedule
    rounds = expensive.correction.num_rounds
    assert rounds > 0 and cheap.correction == replace(policy.correction, num_rounds=rounds)
    assert few.num_starts < many.num_starts and expensive.correction.num_weighed == 1000
