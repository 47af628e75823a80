# SPDX-License-Identifier: Apache-2.0
"""Random streams that leave the caller's as they were; GPUs are simulated."""

from __future__ import annotations

import importlib
import random
import threading
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import diagnose, fit, refine
from pyro_implicit.density import Target, cost
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.runtime.global_state import (
    random_streams,
    restore_random_streams,
    same_streams,
    seeded,
    single_thread,
)


@pytest.fixture
def gpus(monkeypatch):
    """The generators of two."""
    found = tuple(torch.Generator().manual_seed(seed) for seed in (5, 6))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_generators", found)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: found[index].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, i: found[i].set_state(state))
    return found


def drawn(gpus):
    return torch.stack([torch.rand(()), *(torch.rand((), generator=gpu) for gpu in gpus)])


def test_seeds_are_integers_of_numpy_too():
    with seeded(np.int64(3)):
        found = torch.randn(3)
    with seeded(3):
        assert torch.equal(torch.randn(3), found)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_numpy_refuses(seed):
    with pytest.raises(ValueError, match="at least 0 and less than"), seeded(seed):
        pass


def test_all_of_them_have_a_stream_of_their_own(gpus):
    torch.manual_seed(4)
    states = [torch.get_rng_state(), *(gpu.get_state() for gpu in gpus)]
    with seeded(3):
        first = drawn(gpus)
    with seeded(3):
        assert torch.equal(drawn(gpus), first)
    with same_streams():
        assert not (drawn(gpus) == first).any()
    after = [torch.get_rng_state(), *(gpu.get_state() for gpu in gpus)]
    assert all(map(torch.equal, after, states))


def test_of_a_known_device_no_other_is_touched(gpus):
    before = gpus[0].get_state()
    with seeded(3, torch.device("cuda:1")):
        inside = torch.rand((), generator=gpus[1])
        assert torch.equal(gpus[0].get_state(), before)
    with seeded(3):
        assert torch.rand((), generator=gpus[1]) == inside


def test_restored_streams_are_those_of_the_device(gpus):
    streams = random_streams()
    expected = drawn(gpus)
    restore_random_streams(streams, torch.device("cuda:1"))
    first, zero, one = drawn(gpus)
    assert first == expected[0] and zero != expected[1] and one == expected[2]
    restore_random_streams(streams, torch.device("cpu"))
    first, zero, one = drawn(gpus)
    assert first == expected[0] and zero != expected[1] and one != expected[2]
    restore_random_streams(streams)
    assert torch.equal(drawn(gpus), expected)


def everywhere():
    """A number of each global stream."""
    return torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


def test_a_seed_governs_all_streams_and_leaves_them_as_they_were():
    pyro.set_rng_seed(0)
    expected = everywhere()
    pyro.set_rng_seed(0)
    inside = []
    for _ in range(2):
        with pytest.raises(ValueError, match="after drawing"), seeded(7):
            inside.append(everywhere())
            raise ValueError("after drawing")
    assert inside[0] == inside[1]
    pyro.set_rng_seed(7)
    assert everywhere() == inside[0]  # the numbers of Pyro's own seeding
    pyro.set_rng_seed(0)
    with seeded(7):
        everywhere()
    assert everywhere() == expected


def test_without_a_seed_the_streams_advance():
    pyro.set_rng_seed(0)
    expected = [everywhere(), everywhere()]
    pyro.set_rng_seed(0)
    with seeded(None):
        assert everywhere() == expected[0]
    assert everywhere() == expected[1]


def test_gpus_that_are_woken_inside_are_seeded_and_then_the_callers(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(4)
    seeds.clear()
    with seeded(3):
        assert seeds == [3]
    assert seeds == [3, 4]


def model(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 8, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


Y = torch.linspace(-1.0, 2.0, 8)


def mixture():
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(loc.sum(-1), 1.0), obs=torch.tensor(1.0))


def test_a_search_on_the_cpu_seeds_no_gpu(gpus, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(1)
    assert seeds == [1]  # torch's own function seeds all of them
    assert len(find_symmetries(Target(mixture)).groups) == 1
    assert seeds == [1]


SEEDED = {
    "fit": lambda seed: fit(model, "auto", Y, seed=seed, progress=False).bounds,
    "fit by minibatches": lambda seed: fit(
        model, batches=Y.split(4), epochs=3, seed=seed, progress=False
    ).losses,
    "refine": lambda seed: refine(
        model, AutoNormal(model), Y, num_chains=8, max_gradients=100, seed=seed, progress=False
    ).samples,
    "refine by minibatches": lambda seed: refine_by_minibatches(
        model, AutoNormal(model), batches=Y.split(4), num_chains=2, max_epochs=20, seed=seed,
        progress=False,
    ).get_samples(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the chains ran for only")
@pytest.mark.filterwarnings("ignore:the velocities' temperature")
@pytest.mark.parametrize("name", SEEDED)
def test_seeded_functions_leave_the_callers_streams(name):
    pyro.set_rng_seed(0)
    expected = everywhere()
    found = []
    for caller in (0, 1):
        pyro.set_rng_seed(caller)
        pyro.clear_param_store()
        found.append(SEEDED[name](5))
        assert (everywhere() == expected) == (caller == 0)
    assert_same(*found)


def assert_same(one, other):
    if isinstance(one, dict) and isinstance(one.get("x"), torch.Tensor):
        assert all(torch.equal(one[site], other[site]) for site in one)
    else:
        assert one == other


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_restored(three_threads):
    with single_thread(False):
        assert torch.get_num_threads() == 3
    with pytest.raises(RuntimeError, match="wrong"), single_thread():
        assert torch.get_num_threads() == 1
        with single_thread():
            pass
        assert torch.get_num_threads() == 1
        raise RuntimeError("wrong")
    assert torch.get_num_threads() == 3


def test_another_thread_waits_for_the_number(three_threads):
    seen, inside, done = [], threading.Event(), threading.Event()

    def other():
        inside.wait()
        with single_thread():
            seen.append(done.is_set())

    worker = threading.Thread(target=other)
    worker.start()
    with single_thread():
        inside.set()
        worker.join(0.05)
        done.set()
    worker.join()
    assert seen == [True] and torch.get_num_threads() == 3


QUIET = {"seed": 0, "progress": False}


@pytest.mark.parametrize("num_rows, is_small", [(5, True), (20_000, False)])
def test_large_operations_are_divided(three_threads, num_rows, is_small):
    rows = torch.zeros(num_rows)
    assert cost.suits_one_thread(lambda x: (x - rows).square(), torch.zeros(1)) is is_small


def let_small_models_have_threads(monkeypatch):
    # Large ones would divide their operations between more threads than there are free cores.
    monkeypatch.setattr(cost, "COST", replace(cost.COST, least_threaded=0.0))


@pytest.mark.parametrize("num_workers, expected", [(3, 1), (1, 3)])
def test_processes_replace_threads(three_threads, monkeypatch, num_workers, expected):
    let_small_models_have_threads(monkeypatch)
    y, seen = torch.zeros(5), []

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    def note(module, name):
        function = getattr(module, name)
        noted = lambda *args: seen.append(torch.get_num_threads()) or function(*args)  # noqa: E731
        monkeypatch.setattr(module, name, noted)

    note(importlib.import_module("pyro_implicit.fitting.auto"), "_fit_target")
    for name in ("_run_chains", "_anneal"):
        note(importlib.import_module("pyro_implicit.mcmc.refine"), name)
    options = {"num_workers": num_workers, **QUIET}
    refine(model, AutoNormal(model), max_gradients=40, num_chains=8, **options)
    assert seen == [expected]
    fit(model, refine=False, num_steps=1, **options)
    assert seen == [expected, 3]  # without chains, nothing is divided
    fit(model, num_steps=1, **options)
    assert seen[2] == expected and torch.get_num_threads() == 3
    seen.clear()
    refine(model, AutoNormal(model), temper=True, max_gradients=40, **options)
    assert seen == [expected]


@pytest.mark.parametrize("is_small, expected", [(True, 1), (False, 3)])
def test_small_models_run_with_one_thread(three_threads, monkeypatch, is_small, expected):
    if not is_small:
        let_small_models_have_threads(monkeypatch)
    y, seen = torch.zeros(5), set()

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            seen.add(torch.get_num_threads())
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoNormal(model)
    for call in (
        lambda: fit(model, refine=False, num_steps=1, **QUIET),
        lambda: refine(model, guide, max_gradients=40, num_chains=8, num_workers=1, **QUIET),
        lambda: diagnose(model, guide, num_samples=100, num_transitions=1, progress=False),
    ):
        seen.clear()
        call()
        # The number is chosen after the first runs of the model.
        assert (1 in seen) == (expected == 1) and torch.get_num_threads() == 3
