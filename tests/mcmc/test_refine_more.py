# SPDX-License-Identifier: Apache-2.0
"""Chains that continue, and chains that adapt their number."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import Fit
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc import ChainPolicy, chain_number, refine, teach
from pyro_implicit.mcmc import chains as chains_module
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.kernels.hmc import ChEES
from pyro_implicit.mcmc.policy import StoppingPolicy
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.mcmc.spaces.space import Space

#: Chains that never count as converged.
STRICT = ChainPolicy(stopping=StoppingPolicy(max_error=1e-9))
OPTIONS = {"num_chains": 32, "max_leapfrogs": 8, "seed": 0, "progress": False, "policy": STRICT}


def model(y):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 3.0))
    scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


Y = torch.tensor([1.0, -2.0, 3.0, 0.5])


def run(max_gradients):
    pyro.clear_param_store()
    return refine(model, AutoNormal(model), Y, max_gradients=max_gradients, **OPTIONS)


def test_continued_chains_are_those_of_one_run():
    short, whole = run(400), run(800)
    assert short.stopped == "max_gradients" and short.warmup_gradients < 250
    state = torch.random.get_rng_state()
    more = short.refine_more(max_gradients=800 - short.num_gradients, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert more.num_gradients == whole.num_gradients > 1.9 * short.num_gradients
    for name, value in whole.samples.items():
        assert torch.equal(more.samples[name], value)
    assert more.drift == whole.drift and more.warmup_gradients == short.warmup_gradients
    # The first result stays as it was, and can go on again.
    again = short.refine_more(max_gradients=800 - short.num_gradients, progress=False)
    assert torch.equal(again.samples["mean"], more.samples["mean"])
    assert short.refine_more(progress=False).num_gradients >= 2 * short.num_gradients


def test_a_result_of_fit_continues_after_load(tmp_path):
    options = {"num_steps": 20, "progress": False, "seed": 0, "refine": True}
    result = fit(model, AutoNormal(model), Y, **options)
    assert result.refined.stopped == "converged"
    result.save(tmp_path / "result.pt")
    loaded = Fit.load(tmp_path / "result.pt", model, Y)
    budget = {"max_gradients": 300, "progress": False}
    more, again = result.refine_more(**budget), loaded.refine_more(**budget)
    assert torch.equal(more.refined.samples["mean"], again.refined.samples["mean"])
    assert [stage.name for stage in more.stages] == ["guide", "refine", "refine_more"]
    assert len(result.stages) == 2 and more.diagnose(modes=None).verdict == "trust"
    # Converged chains spend the whole budget, so that draws become more.
    assert more.refined.num_gradients >= result.refined.num_gradients + 300
    assert more.refined.drift.r_hat < result.refined.drift.r_hat


def test_a_limit_of_time(monkeypatch):
    short = run(400)
    more = short.refine_more(max_seconds=0.05, progress=False)
    assert more.stopped == "max_seconds" and more.num_gradients > short.num_gradients
    assert more.seconds >= short.seconds + 0.05
    with pytest.raises(ValueError, match="max_seconds must be positive"):
        short.refine_more(max_seconds=0)
    with pytest.raises(ValueError, match="max_gradients"):
        short.refine_more(max_gradients=0)


def ridge():
    pyro.sample("x", dist.MultivariateNormal(torch.tensor([0.0, 0.01]), RIDGE))


def two_ridges():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 50.0).to_event(1))
    ends = [
        dist.MultivariateNormal(torch.full((2,), end), RIDGE).log_prob(x) for end in (0.5, -40.0)
    ]
    pyro.factor("ends", torch.stack(ends).logsumexp(0))


RIDGE = torch.tensor([[1.0, 0.999], [0.999, 1.0]])


def time_scores(monkeypatch, seconds):
    """Replace the measured seconds of a score of some chains by a function of their number."""
    for module in (chain_number, chains_module):
        monkeypatch.setattr(module, "seconds_of", lambda score, white: seconds(len(white)))


def counted(calls, name, function):
    """Return a function that appends its name to the calls."""
    return lambda *args: calls.append(name) or function(*args)


def walk(*args, **options):
    return refine_target(ChainSetup(*args, **options))


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_long_memory_leads_to_fewer_longer_chains(monkeypatch, patience):
    """A diagonal frame and short trajectories on a ridge: chains diffuse."""
    timed = []
    time_scores(monkeypatch, lambda number: timed.append(number) or float(number))
    sampler = Sampler(Target(ridge), {"x": 0.03 * torch.randn(256, 2) + 0.5})
    torch.manual_seed(0)
    found = walk(sampler, 256, 300, frame="diagonal", max_leapfrogs=2, patience=patience)
    if not patience:
        assert (found.num_chains, found.stopped, timed) == (256, "max_gradients", [])
        assert found.drift.r_hat > 1.65
        return
    assert (found.num_chains, timed) == (64, [256, 256, 128, 64])
    assert found.settled or found.drift.is_usable()
    draws = found.get_samples()["x"]
    assert draws.mean(0).abs().max() < 0.25 and (draws.std(0) - 1).abs().max() < 0.25


@pytest.mark.parametrize("needed", [1.9, 2.1])
def test_a_budget_far_too_short_buys_more_gradients_of_fewer_chains(monkeypatch, needed):
    """The gradients needed, in units of those left; a chain costs as much in 256 as in 64."""
    sampler = Sampler(Target(ridge), {"x": torch.randn(256, 2)})
    chains = walk(sampler, 256, 200, policy=STRICT).chains
    spent = chains.gradients - chains.warmup_gradients
    drift = chains.convergence.drift._replace(r_hat=math.sqrt(1 + 3 * (1.1**2 - 1)))
    chains.convergence.drift = drift
    left, chains.patience = round(3 * spent / needed), 1.0
    chains.max_gradients = before = chains.gradients + left
    thinned = []
    time_scores(monkeypatch, float)
    monkeypatch.setattr(
        WindowedChains, "_warm_up_again", lambda self: thinned.append(len(self.state.position))
    )
    chains._adapt_number()
    assert thinned == ([64] if needed > 2 else [])
    assert chains.max_gradients == before + (3 * left if needed > 2 else 0)


@pytest.mark.parametrize("is_apart", [True, False])
def test_chains_that_stay_apart_get_a_new_space(monkeypatch, is_apart):
    """Chains of two modes never meet; those of one mode with long memory keep their space."""
    time_scores(monkeypatch, lambda number: 1.0)
    asked = []

    def refitted(self, latent, anew=False):
        asked.append(anew)
        return copy.copy(self) if anew else None

    monkeypatch.setattr(Space, "refitted", refitted)
    torch.manual_seed(0)
    start = torch.randn(64, 1) + 0.03 * torch.randn(64, 2)
    if is_apart:
        start[::2] -= 40.0
    sampler = Sampler(Target(two_ridges if is_apart else ridge), {"x": start})
    options = {"frame": "diagonal", "max_leapfrogs": 8, "patience": 1.0}
    found = walk(sampler, 64, 300, **options)
    assert any(asked) == is_apart and asked.count(True) <= 1
    assert found.chains.gradients > found.chains.warmup_gradients > 120


def test_a_new_space_and_fewer_chains_take_one_warm_up(monkeypatch):
    """The frame in which the number is chosen is that of the warm-up."""
    time_scores(monkeypatch, float)
    monkeypatch.setattr(Space, "refitted", lambda self, _, anew=False: copy.copy(self))
    start = torch.randn(256, 1) + 0.03 * torch.randn(256, 2)
    start[::2] -= 40.0
    chains = walk(Sampler(Target(two_ridges), {"x": start}), 256, 200, policy=STRICT).chains
    calls = []
    for owner, name in ((chains_module, "frame_at"), (WindowedChains, "start")):
        monkeypatch.setattr(owner, name, counted(calls, name, getattr(owner, name)))
    chains.patience = 1.0
    chains._adapt_number()
    assert (len(chains.state.position), calls) == (64, ["frame_at", "start"])
    assert chains.state.log_density.isfinite().all() and chains.phase == "warm-up"


@pytest.mark.parametrize("left", [0.0, 1.0])
@pytest.mark.parametrize("step", ["_adapt_number", "_extend_budget"])
def test_draws_stay_if_time_is_too_short_for_another_warm_up(monkeypatch, step, left):
    """It would replace them by the last positions of a warm-up."""
    time_scores(monkeypatch, float)
    monkeypatch.setattr(Space, "refitted", lambda self, _, anew=False: copy.copy(self))
    sampler = Sampler(Target(ridge), {"x": torch.randn(256, 2)})
    chains = walk(sampler, 256, 200, policy=STRICT).chains
    chains.convergence.drift = chains.convergence.drift._replace(r_hat=2.0)
    chains.patience, chains.cpu_seconds, chains.seconds = math.inf, 1.0, 1.0
    chains.max_gradients, chains.max_seconds = chains.gradients, 1.0 + left
    before = chains.history
    getattr(chains, step)()
    assert (chains.history is before) == (left == 0.0)
    assert (chains.convergence.drift is None) == (left > 0.0)
    assert (chains.phase == "sampling") == (left == 0.0)


@pytest.mark.parametrize("is_at_limit", [True, False])
def test_long_memory_leads_to_longer_trajectories(monkeypatch, is_at_limit):
    """If fewer chains would cost as much, and trajectories are as long as they may be. Each
    transition counts as a second."""
    monkeypatch.setattr(time, "process_time", itertools.count().__next__)
    time_scores(monkeypatch, lambda number: 1.0)
    if not is_at_limit:
        monkeypatch.setattr(ChEES, "is_at_limit", False)
    sampler = Sampler(Target(ridge), {"x": 0.03 * torch.randn(64, 2) + 0.5})
    torch.manual_seed(0)
    options = {"frame": "diagonal", "max_leapfrogs": 2, "patience": 1000.0}
    found = walk(sampler, 64, 500, **options)
    assert found.num_chains == 64
    assert found.chains.adaptation.max_gradients == (512 if is_at_limit else 2)
    assert (found.settled or found.drift.is_usable()) == is_at_limit


@pytest.mark.parametrize("has_alternative", [None, lambda: False, lambda: True])
def test_patience_ends(monkeypatch, has_alternative):
    """Chains that stay unusable double their gradients until the seconds are spent, or until
    something else may follow."""
    spent = []
    monkeypatch.setattr(time, "process_time", lambda: spent.append(0) or 0.01 * len(spent))
    time_scores(monkeypatch, lambda number: 1.0)
    usable = StoppingPolicy(max_usable_error=1e-9, max_error=1e-9)
    sampler = Sampler(Target(ridge), {"x": torch.randn(64, 2)})
    options = {"patience": 2.0, "has_alternative": has_alternative}
    found = walk(sampler, 64, 200, policy=ChainPolicy(stopping=usable), **options)
    assert found.stopped == "max_gradients" and found.num_chains == 64
    if has_alternative is not None and has_alternative():
        assert found.num_gradients < 300
    else:
        assert 1.5 < found.chains.cpu_seconds < 2.6


def test_an_extended_budget_ends_once_errors_are_usable(monkeypatch):
    monkeypatch.setattr(time, "process_time", itertools.count().__next__)
    time_scores(monkeypatch, lambda number: 1.0)
    limits = StoppingPolicy(max_usable_error=0.06, max_error=1e-9)
    sampler = Sampler(Target(ridge), {"x": torch.randn(64, 2)})
    torch.manual_seed(0)
    found = walk(sampler, 64, 200, patience=1e6, policy=ChainPolicy(stopping=limits))
    assert found.stopped == "max_gradients" and found.drift.is_usable(limits)
    assert 200 < found.num_gradients < 0.9 * found.chains.max_gradients
    more = found.refine_more(max_gradients=100, progress=False)
    assert more.num_gradients >= found.num_gradients + 100


def test_a_clock_that_stands_still(monkeypatch):
    """Under a limit of CPU seconds, Linux advances ``process_time`` by ticks of milliseconds."""
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    torch.manual_seed(0)
    sampler = Sampler(Target(ridge), {"x": 0.03 * torch.randn(64, 2) + 0.5})
    found = walk(sampler, 64, 200, frame="diagonal", max_leapfrogs=2, patience=2.0)
    assert found.stopped == "max_gradients" and found.num_chains <= 64


def test_chains_that_cannot_go_on():
    loaded = pickle.loads(pickle.dumps(run(200)))
    with pytest.raises(ValueError, match=r"cannot continue.*Cure: .*fit\(...\)\.refine_more"):
        loaded.refine_more()
    pyro.clear_param_store()
    with pytest.raises(ValueError, match="no chains of all data"):
        fit(model, AutoNormal(model), Y, num_steps=5, progress=False).refine_more()


def test_chains_on_the_noise_of_a_guide_that_has_learnt():
    pyro.clear_param_store()
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    guide(Y)
    options = {**OPTIONS, "policy": None}
    result = refine(model, guide, Y, frame="noise", max_gradients=100, **options)
    assert result.space == "noise"
    more = result.refine_more(max_gradients=20, progress=False)
    assert more.num_gradients > result.num_gradients
    teach(guide, result.get_samples(), Y, num_steps=20, progress=False)
    with pytest.raises(ValueError, match=r"has changed since. Cure: refine\(model"):
        result.refine_more(progress=False)
