# SPDX-License-Identifier: Apache-2.0
"""Rows of a score that are divided between processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit
from pyro_implicit.density import Target, cost, workers
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.fitting import BudgetPolicy, FitPolicy
from pyro_implicit.mcmc import refine

PARENT = os.getpid()
X = torch.linspace(-1, 1, 6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def small_scores_are_divided(monkeypatch):
    policy = dataclasses.replace(cost.COST, least_divided=0.0)
    monkeypatch.setattr(cost, "COST", policy)
    yield
    assert not multiprocessing.active_children()


def make_model():
    lock = threading.Lock()  # cannot be pickled

    def model():
        with lock:
            slope = pyro.sample("slope", dist.Normal(torch.zeros(()).double(), 1.0))
            scale = pyro.sample("scale", dist.LogNormal(torch.zeros(()).double(), 1.0))
            with pyro.plate("rows", len(X)):
                pyro.sample("y", dist.Normal(slope * X, scale), obs=X.sin())

    return model


def exact_score(latent):
    """Slope and logarithm of the scale."""
    slope, log_scale = latent.T
    rest = (X.sin() - slope[:, None] * X) / log_scale.exp()[:, None]
    log_prob = (
        -0.5 * (slope**2 + log_scale**2 + rest.square().sum(-1))
        - len(X) * log_scale
        - 0.5 * (2 + len(X)) * torch.log(torch.tensor(2 * torch.pi))
    )
    by_slope = -slope + (rest * X).sum(-1) / log_scale.exp()
    by_scale = -log_scale - len(X) + rest.square().sum(-1)
    return log_prob, torch.stack([by_slope, by_scale], -1)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("compile", ["auto", False])
def test_parts_are_those_of_the_score(number, compile):
    score = TracedScore(Target(make_model()).score, compile=compile)
    with workers.workers(number):
        for size in (7, 7, 7, 20, 20, 20, 5, 5):  # larger ones need other processes
            latent = torch.randn(size, 2, dtype=torch.float64)
            for found, expected in zip(score(latent), exact_score(latent), strict=True):
                torch.testing.assert_close(found, expected)
        assert len(multiprocessing.active_children()) == number - 1
    assert not multiprocessing.active_children()
    torch.testing.assert_close(score(latent)[0], exact_score(latent)[0])


def test_results_of_other_shapes_are_divided():
    # Spaces trace the map to latents, and the terms of a log-density, as they trace scores.
    target = Target(make_model())
    score = TracedScore(lambda latent: (target.score(latent)[1], latent[:, :0]))
    with workers.workers(2):
        for _ in range(4):
            latent = torch.randn(7, 2, dtype=torch.float64)
            found, nothing = score(latent)
            torch.testing.assert_close(found, exact_score(latent)[1])
            assert nothing.shape == (7, 0)
        assert len(multiprocessing.active_children()) == 1


def test_processes_end_with_their_score():
    with workers.workers(2):
        score = TracedScore(Target(make_model()).score)
        for _ in range(3):
            score(torch.zeros(4, 2, dtype=torch.float64))
        assert multiprocessing.active_children()
        del score
        assert not multiprocessing.active_children()


def fails():
    raise RuntimeError("only here")


@pytest.mark.parametrize(
    "fault, cause",
    [(fails, "processes: RuntimeError: a process raised RuntimeError: only here. C"),
     (lambda: os._exit(1), "processes: EOFError. C")],
)  # fmt: skip
def test_a_process_that_fails_is_given_up(fault, cause):
    target = Target(make_model())

    def plain(latent):
        if os.getpid() != PARENT:
            fault()
        return target.score(latent)

    score = TracedScore(plain, compile=False)
    latent = torch.randn(4, 2, dtype=torch.float64)
    with workers.workers(2):
        score(latent)
        with pytest.warns(UserWarning, match=f"no longer divided.*{cause}ure: num_workers=1"):
            found = score(latent)
        torch.testing.assert_close(found[1], exact_score(latent)[1])
        assert workers.current_workers().number == 1
        torch.testing.assert_close(score(latent)[1], exact_score(latent)[1])


def test_an_interrupted_call_leaves_no_answer_behind():
    target, interrupts = Target(make_model()), []

    def plain(latent):
        if interrupts and os.getpid() == PARENT:
            interrupts.clear()
            raise KeyboardInterrupt
        return target.score(latent)

    score = TracedScore(plain, compile=False)
    first, second = torch.randn(2, 4, 2, dtype=torch.float64)
    with workers.workers(2):
        score(first)
        score(first)
        interrupts.append(True)
        with pytest.raises(KeyboardInterrupt):
            score(first)
        torch.testing.assert_close(score(second)[1], exact_score(second)[1])
        assert workers.current_workers().number == 2


def test_where_processes_are_not_forked(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert workers.Workers(2).number == 1
    monkeypatch.undo()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert workers.Workers(2).number == 1


def test_chains_repeat_for_equal_numbers_of_processes_and_can_go_on():
    guide = {name: torch.rand(32, dtype=torch.float64) + 0.5 for name in ("slope", "scale")}

    def run(max_gradients, num_workers=2):
        return refine(
            make_model(), guide, num_chains=32, max_gradients=max_gradients, seed=0,
            num_workers=num_workers, progress=False,
        )  # fmt: skip

    first, again, other = run(300), run(300), run(300, num_workers=1)
    for name in guide:
        one, two, alone = (result.get_samples()[name] for result in (first, again, other))
        assert one.equal(two)
        error = (one.var() / 32).sqrt()  # of as many draws as chains
        assert (one.mean() - alone.mean()).abs() < 4 * error
    assert first.chains.num_workers == 2
    more = first.refine_more(max_gradients=100, progress=False)
    assert more.num_gradients > first.num_gradients


def test_fit_divides_its_chains_and_restores_threads():
    before = torch.get_num_threads()
    budget = BudgetPolicy(most_gradients=60, least_gradients=60, patient_seconds=0.0)
    none = replace(FitPolicy().marginal, most_remaining=0)  # integrated, which would replace chains
    policy = FitPolicy(budget=budget, marginal=none)
    options = {"policy": policy, "seed": 0, "progress": False}
    with pytest.warns(UserWarning, match="stopped at max_gradients"):
        result = fit(make_model(), "auto", refine=True, num_workers=2, **options)
    assert result.refined.chains.num_workers == 2 and torch.get_num_threads() == before
    assert not multiprocessing.active_children()


def test_numbers_that_are_refused():
    with pytest.raises(ValueError, match="num_workers must be at least 1, but got 0"):
        fit(make_model(), num_workers=0, progress=False)
