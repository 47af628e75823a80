# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what they see, how they end stages, and that they change nothing else."""

from __future__ import annotations

import logging
import sys
import types
from collections import Counter

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, diagnose, fit, refine
from pyro_implicit.callbacks import Callback, LivePlot, TensorBoard
from pyro_implicit.fitting import BudgetPolicy, ChoicePolicy, FitPolicy, Schedule, train
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine_by_minibatches, teach
from pyro_implicit.runtime.progress import watching

#: Bounds of candidates are expensive, and their values do not matter here.
FEW = FitPolicy(choice=ChoicePolicy(num_weighed=100))


def model():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x.square().sum(-1), 1.0), obs=torch.tensor(2.0))


def gaussian():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=torch.tensor(2.0))


class Record(Callback):
    def __init__(self, last: int | None = None) -> None:
        self.steps, self.stages, self.last = [], [], last

    def on_step(self, step):
        torch.rand(3)  # must not change the result
        self.steps.append(step)
        if self.last is not None and step.number >= self.last:
            raise StopIteration

    def on_stage(self, stage):
        self.stages.append(stage)

    @property
    def counts(self):
        return Counter(step.stage for step in self.steps)


def train_normal(**options):
    pyro.clear_param_store()
    guide = AutoNormal(model)
    options = {"schedule": Schedule(num_steps=30), "progress": False} | options
    losses = train(model, guide, ImplicitELBO(4), **options)
    return losses, guide.median()["x"]


def test_fit_reports_its_steps_and_stages_and_does_not_change():
    record = Record()
    budget = BudgetPolicy(least_gradients=100, most_gradients=100, most_chains=32)
    options = {"seed": 0, "num_steps": 30, "refine": True, "policy": FitPolicy(budget=budget)}
    found = fit(gaussian, callbacks=[record], progress=False, **options)
    alone = fit(gaussian, progress=False, **options)
    assert record.stages == found.stages  # the same objects, finished
    assert all(stage.seconds > 0 and stage.outcome for stage in record.stages)
    assert {"search", "refine"} <= record.counts.keys()
    draws, expected = (one.refined.get_samples()["x"] for one in (found, alone))
    torch.testing.assert_close(draws, expected, rtol=0, atol=0)
    chains = [step for step in record.steps if step.stage == "refine"]
    assert chains[-1].number == min(found.refined.num_gradients, chains[-1].total)
    assert [step.values["sampling"] for step in chains] == sorted(
        step.values["sampling"] for step in chains
    )
    assert chains[-1].values["step_size"] > 0


def test_train_reports_every_loss_and_ends_at_a_step():
    torch.manual_seed(0)
    losses, _ = train_normal()
    torch.manual_seed(0)
    record = Record()
    seen, _ = train_normal(callbacks=[record], name="mine")
    assert [step.values["loss"] for step in record.steps] == losses == seen
    assert [step.number for step in record.steps] == list(range(1, 31))
    assert [stage.name for stage in record.stages] == ["mine"]
    assert record.stages[0].outcome == "30 steps"
    torch.manual_seed(0)
    ended, _ = train_normal(callbacks=[Record(last=7)])
    assert ended == losses[:7]


def test_the_search_ends_in_its_first_round():
    record = Record(last=2)
    options = {"callbacks": [record], "policy": FEW, "progress": False}
    found = fit(model, seed=0, num_steps=5, refine=False, **options)
    assert record.counts["search"] == 2 and found.num_modes >= 1


@pytest.mark.parametrize("last", [1, 2500])
def test_chains_end_with_a_result(last):
    record = Record(last)
    guide = AutoNormal(model)
    found = refine(
        model, guide, num_chains=32, max_gradients=100_000, seed=0, callbacks=[record],
        progress=False,
    )  # fmt: skip
    assert found.stopped in ("callback", "converged")
    assert found.stopped == "callback" or last > 1
    assert found.get_samples()["x"].isfinite().all()
    assert found.num_gradients < 1500 or last > 1
    assert record.stages[0].name == "refine" and "after" in record.stages[0].outcome


def test_minibatch_chains_and_teaching_report():
    def rows(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 20, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    record = Record(last=40)
    batches = list(torch.randn(20, generator=torch.Generator().manual_seed(0)).split(5))
    with pytest.warns(UserWarning, match="relaxation"):
        found = refine_by_minibatches(
            rows, AutoNormal(rows), batches=batches, max_epochs=50, callbacks=[record], seed=0,
            progress=False,
        )  # fmt: skip
    assert found.stopped == "callback" and record.steps[0].values["step_size"] > 0
    record = Record(last=7)
    guide = AutoImplicit(gaussian, AutoregressiveGenerator)
    with watching(False, [record]):
        taught = teach(guide, {"x": torch.randn(100, 2)})
    assert taught.num_steps == record.counts["teach"] == 7
    assert [stage.name for stage in record.stages] == ["teach"]


def test_a_failing_callback_is_dropped_with_a_warning():
    class Bad(Callback):
        calls = 0

        def on_step(self, step):
            self.calls += 1
            raise KeyError("loss_")

    bad, record = Bad(), Record()
    with pytest.warns(UserWarning, match=r"Bad\.on_step failed \(KeyError: 'loss_'\) and is not"):
        losses, _ = train_normal(callbacks=[bad, record])
    assert bad.calls == 1 and len(losses) == len(record.steps) == 30
    with pytest.warns(UserWarning, match="Bad"):  # another call tries it again
        train_normal(callbacks=[bad])


def test_a_callback_may_use_the_library():
    class Look(Callback):
        found = None

        def on_stage(self, stage):
            fit(model, seed=1, num_steps=2, refine=False, policy=FEW, progress=False)
            options = {"num_transitions": 0, "modes": None, "progress": False}
            self.found = diagnose(model, AutoNormal(model), num_samples=100, **options)

    look, record = Look(), Record()
    train_normal(callbacks=[look, record])
    assert look.found is not None and len(record.stages) == 1


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"instances of Callback, but got .*Cure: a subclass"):
        fit(model, callbacks=[print])
    with pytest.raises(TypeError, match="Cure: a subclass"):
        train_normal(callbacks=[Record])


def test_stages_are_logged(caplog):
    with caplog.at_level(logging.INFO, "pyro_implicit"):
        fit(gaussian, seed=0, refine=False, policy=FEW, progress=False)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("search: ") and "best ELBO" in lines[0]


def test_tensorboard_gets_scalars_and_outcomes():
    calls = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *args: calls.append(args),
        add_text=lambda *args: calls.append(args),
        flush=lambda: calls.append("flush"),
    )
    losses, _ = train_normal(callbacks=[TensorBoard(writer)], name="mine")
    assert calls[:30] == [("mine/loss", loss, step) for step, loss in enumerate(losses, 1)]
    assert calls[30][0] == "stages" and "30 steps" in calls[30][1] and calls[31] == "flush"


def test_a_live_plot_updates_one_display(monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=shown.append)
    notebook = types.ModuleType("IPython.display")
    notebook.Image = lambda content, format: content
    notebook.display = lambda image, display_id: shown.append(image) or handle
    package = types.ModuleType("IPython")
    package.version_info, package.get_ipython = (9, 0), lambda: None  # which matplotlib reads
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    plot = LivePlot(interval=1e-9)
    losses, _ = train_normal(callbacks=[plot], schedule=Schedule(num_steps=3))
    assert len(shown) == 4 and all(image.startswith(b"\x89PNG") for image in shown)
    (axes,) = plot.figure.axes
    assert axes.get_ylabel() == "loss" and list(axes.lines[0].get_ydata()) == losses
    with pytest.raises(ValueError, match="interval must be positive"):
        LivePlot(0.0)
