# SPDX-License-Identifier: Apache-2.0
"""A training that was killed and resumed, against one that was not."""

from __future__ import annotations

import os
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit
from pyro_implicit.fitting import FitPolicy
from pyro_implicit.fitting.checkpoint import TrainingCheckpoint, same_start
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.generators import GatedMLP, ResidualGenerator
from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.infer import (
    AVB_ELBO,
    GPVI_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    UIVI_ELBO,
    AmortizedKSD_ELBO,
    ImplicitELBO,
    InjectiveELBO,
)

# Short windows: the decay begins in the midst of it, at a step that a resumed run must know.
SCHEDULE = Schedule(num_steps=24, window=2, decay=0.25, max_gap=0.0)


class Model:
    """Two latents and a learnt parameter; dies like a killed process after so many runs."""

    def __init__(self, dies_after=None, subsample_size=None):
        self.num_runs, self.dies_after, self.subsample_size = 0, dies_after, subsample_size

    def __call__(self):
        self.num_runs += 1
        if self.num_runs == self.dies_after:
            raise KeyboardInterrupt
        x = pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(0.5)), 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        y = torch.linspace(-1.0, 3.0, 10)
        with pyro.plate("rows", 10, self.subsample_size) as rows:
            pyro.sample("y", dist.Normal(x, scale), obs=y[rows])


KINDS = {
    "semi-implicit": lambda model: (
        AutoSemiImplicit(model, lambda size: GatedMLP(size, size, hidden=(4,)), frame=None),
        LIVI_ELBO(4),
    ),
    "injective": lambda model: (
        AutoImplicit(model, lambda size: AutoregressiveGenerator(size, hidden=(4,)), frame=None),
        InjectiveELBO(4, coverage=float(model.subsample_size is None), nonfinite="skip"),
    ),
    "normal": lambda model: (AutoNormal(model), ImplicitELBO(2)),
    # These remember things between steps: step sizes of a sampler, draws of the prior.
    "uivi": lambda model: (
        AutoSemiImplicit(
            model, lambda size: GatedMLP(size, size, hidden=(4,)), noise_scale=0.5, frame=None
        ),
        UIVI_ELBO(4, num_burnin=2, num_samples=2),
    ),
    "kivi": lambda model: (
        AutoImplicit(model, lambda size: GatedMLP(size, size, hidden=(4,)), frame=None),
        KIVI_ELBO(4, num_entropy_particles=20, contrast="prior"),
    ),
    # These train networks of their own.
    "avb": lambda model: (
        AutoImplicit(model, lambda size: GatedMLP(size, size, hidden=(4,)), frame=None),
        AVB_ELBO(4, num_entropy_particles=8),
    ),
    "ksd": lambda model: (
        AutoImplicit(model, lambda size: GatedMLP(size, size, hidden=(4,)), frame=None),
        AmortizedKSD_ELBO(4),
    ),
    "gpvi": lambda model: (
        AutoImplicit(model, lambda size: ResidualGenerator(size, 1, hidden=(4,)), frame=None),
        GPVI_ELBO(8),
    ),
}


def run(kind, folder, seed=0, dies_after=None, subsample_size=None, every=5, schedule=SCHEDULE):
    """As in a process of its own: the losses, all parameters, and the model."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = Model(dies_after, subsample_size)
    guide, loss = KINDS[kind](model)
    files = {"checkpoint": folder, "checkpoint_every": every, "progress": False}
    losses = train(model, guide, loss, schedule=schedule, **files)
    parameters = {
        re.sub("_ELBO-[0-9a-f]{8}", "_ELBO", name): p.detach().clone()
        for name, p in pyro.get_param_store().named_parameters()
    }
    return losses, parameters, model


def assert_same(left, right):
    assert left[0] == right[0]
    assert left[1].keys() == right[1].keys()
    for name, value in left[1].items():
        assert torch.equal(value, right[1][name]), name


def check_resumed(kind, folder, stops, **kwargs):
    expected = run(kind, None, **kwargs)
    assert len(expected[0]) >= 12 and len(expected[1]) > 2
    for number, stop in enumerate(stops):
        with pytest.raises(KeyboardInterrupt):
            run(kind, folder, seed=number, dies_after=stop, **kwargs)
    # Another seed: all that was random comes from the file.
    assert_same(run(kind, folder, seed=99, **kwargs), expected)


@pytest.mark.parametrize(
    ("kind", "subsample_size"),
    [*((kind, None) for kind in KINDS), *((kind, 3) for kind in ("injective", "uivi", "avb"))],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, subsample_size, tmp_path):
    stop = 25 if kind == "kivi" else 16  # whose prior is a run of its own
    check_resumed(kind, tmp_path, [stop], subsample_size=subsample_size)


@pytest.mark.parametrize("stops", [[15], [13, 8, 3], [9, 5, 3, 11]])
def test_killed_at_many_moments(stops, tmp_path):
    """Right after a writing, before one, and while it starts again."""
    check_resumed("injective", tmp_path, stops, every=3)


class Remembering(ImplicitELBO):
    """An ELBO whose loss depends on how often it was asked, and on what it drew then."""

    def __init__(self):
        super().__init__(2)
        self.memory = torch.zeros(2)

    def differentiable_loss(self, *args, **kwargs):
        self.memory = self.memory + torch.rand(2)
        return super().differentiable_loss(*args, **kwargs) * (1 + self.memory.sum())

    def get_state(self):
        return {"memory": self.memory}

    def set_state(self, state):
        self.memory = state["memory"]


def test_what_an_elbo_remembers(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "remembering", lambda model: (AutoNormal(model), Remembering()))
    check_resumed("remembering", tmp_path, [13])


def test_files_are_read_on_the_device_of_the_parameters(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run("normal", tmp_path, dies_after=12)
    asked = []
    load = torch.load

    def spy(path, **kwargs):
        asked.append(kwargs["map_location"])
        return load(path, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    run("normal", tmp_path)
    assert asked == [torch.device("cpu")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
def test_a_file_written_on_another_device(tmp_path):
    """A guide on the CPU goes on from one that was on a GPU."""
    path = tmp_path / "fit.pt"
    parameters = {"loc": torch.ones(3, device="cuda", requires_grad=True)}
    optimiser = torch.optim.Adam(parameters.values())
    parameters["loc"].sum().backward()
    optimiser.step()
    TrainingCheckpoint(State(), parameters, {"": optimiser}).save(path)
    here = {"loc": torch.zeros(3, requires_grad=True)}
    optimiser = torch.optim.Adam(here.values())
    TrainingCheckpoint(State(), here, {"": optimiser}).load(path)
    assert torch.equal(here["loc"], parameters["loc"].cpu())
    assert optimiser.state[here["loc"]]["exp_avg"].device.type == "cpu"


class State:
    """No attributes."""


def test_killed_before_the_first_writing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("normal", tmp_path, dies_after=6)
    assert not list(tmp_path.iterdir())
    assert_same(run("normal", tmp_path), run("normal", None))


def test_a_finished_run_returns_at_once(tmp_path):
    finished = run("normal", tmp_path)
    again = run("normal", tmp_path, seed=5)
    assert_same(finished, again)
    assert again[2].num_runs < 6 < finished[2].num_runs  # one evaluation, to know the parameters


def test_files_by_name_in_folders_yet_to_be_made(tmp_path):
    model = Model()
    folder = tmp_path / "deep" / "folder"
    arguments = {"schedule": Schedule(num_steps=3), "checkpoint": str(folder), "progress": False}
    for name in ("one", "two"):
        train(model, AutoNormal(model), ImplicitELBO(), name=name, **arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["one.pt", "two.pt"]


def test_the_guide_may_have_another_name(tmp_path):
    """``fit`` counts its guides, and a new process begins to count anew."""

    def once(name, dies_after=None):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = Model(dies_after)
        guide = AutoNormal(model)
        guide._pyro_set_supermodule(name, guide._pyro_context)
        train(model, guide, ImplicitELBO(), schedule=SCHEDULE, checkpoint=tmp_path)
        return guide.locs.x.detach().clone()

    train_all = SCHEDULE.num_steps + 2
    with pytest.raises(KeyboardInterrupt):
        arguments = {"checkpoint_every": 5, "checkpoint": tmp_path, "schedule": SCHEDULE}
        pyro.set_rng_seed(0)
        model = Model(dies_after=min(train_all, 12))
        guide = AutoNormal(model)
        guide._pyro_set_supermodule("fit0", guide._pyro_context)
        train(model, guide, ImplicitELBO(), **arguments)
    resumed = once("fit7")
    (tmp_path / "fit.pt").unlink()
    assert torch.equal(resumed, once("fit0"))


def test_another_guide_is_refused(tmp_path):
    run("normal", tmp_path)
    message = r"the checkpoint .*fit\.pt has parameters .*but model and guide have .*Cure: resume"
    with pytest.raises(ValueError, match=message):
        run("injective", tmp_path)
    (tmp_path / "fit.pt").unlink()
    model = Model()
    wide = AutoSemiImplicit(model, lambda size: GatedMLP(size, size, hidden=(5,)), frame=None)
    train(model, wide, LIVI_ELBO(2), schedule=Schedule(num_steps=2), checkpoint=tmp_path)
    with pytest.raises(ValueError, match=message):
        run("semi-implicit", tmp_path)


def break_replace(monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)


def break_save(monkeypatch):
    save = torch.save

    def half(content, file):
        save(content, file)
        file.truncate(file.tell() // 2)
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)


@pytest.mark.parametrize("breaks", [break_replace, break_save])
def test_a_partial_file_never_replaces_a_good_one(breaks, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run("normal", tmp_path, dies_after=12)
    good = (tmp_path / "fit.pt").read_bytes()
    with monkeypatch.context() as patch:
        breaks(patch)
        with pytest.raises(OSError, match="no space"):
            run("normal", tmp_path)
    assert (tmp_path / "fit.pt").read_bytes() == good
    assert_same(run("normal", tmp_path, seed=3), run("normal", None))
    assert [path.name for path in tmp_path.iterdir()] == ["fit.pt"]


def test_the_same_start(tmp_path):
    """The first call keeps the random streams, the next ones put them back."""
    draws = []
    for seed in (1, 2):
        pyro.set_rng_seed(seed)
        same_start(tmp_path / "start.pt", {"seed": 1})
        draws.append(torch.randn(3))
    assert torch.equal(*draws)
    pyro.set_rng_seed(1)
    assert torch.equal(draws[0], torch.randn(3))


def test_the_start_of_other_settings_is_refused(tmp_path):
    same_start(tmp_path / "start.pt", {"seed": 1})
    with pytest.raises(ValueError, match=r"run with seed=1, but this run has seed=2.*another fold"):
        same_start(tmp_path / "start.pt", {"seed": 2})


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"loss": ImplicitELBO(4)}, {}, "another loss, but this run has another loss"),
        ({}, {"policy": FitPolicy(schedule=Schedule(clip_norm=1e-6))}, "another policy.*another"),
        ({"refine": False}, {"refine": True}, "refine=False, but this run has refine=True"),
    ],
)
def test_another_objective_or_policy_is_refused(first, then, message, tmp_path):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    options = {"num_steps": 3, "seed": 0, "checkpoint": tmp_path, "progress": False}
    options |= {"loss": ImplicitELBO(4, inverse_temperature=0.5), "refine": False}
    fit(model, AutoNormal(model), **(options | first))
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=message):
        fit(model, AutoNormal(model), **(options | then))


def test_a_frame_of_another_process_is_put_back(tmp_path):
    """A guide's frame is no parameter, and a search elsewhere may end elsewhere."""
    guide, loss = KINDS["injective"](Model())
    options = {"checkpoint": tmp_path, "progress": False, "schedule": SCHEDULE}
    train(guide.model, guide, loss, **options)
    frame = {name: value.clone() for name, value in guide.named_buffers()}
    assert frame
    with torch.no_grad():
        for value in guide.buffers():
            value.add_(1.0)
    train(guide.model, guide, loss, **options)
    for name, value in guide.named_buffers():
        assert torch.equal(value, frame[name]), name
