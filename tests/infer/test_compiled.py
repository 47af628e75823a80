# SPDX-License-Identifier: Apache-2.0
"""Recorded steps are plain steps: same numbers, same draws, same parameters; or plain steps run."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_implicit import KIVI_ELBO, LIVI_ELBO, UIVI_ELBO, AutoSemiImplicit, ScoreELBO, compiled
from pyro_implicit.compiled import RECORDINGS, CompilerError, program
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.infer.engine import recording
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.ops import imq_kernel, stein_score

DATA = torch.tensor([1.0, 0.5, -0.3, 2.0, 0.1, -1.0])


def model(y=DATA):
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", 6, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(loc, scale + 0.1), obs=y)


class Run:
    """Some steps of SVI: losses, parameters, where the random stream stands, and the ELBO."""

    def __init__(
        self, model, elbo, steps=6, args=lambda i: (), change=lambda i, run: None, guide=None
    ) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(5)
        self.elbo, self.guide = elbo, guide or AutoSemiImplicit(model, frame=None)
        self.svi = SVI(model, self.guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        self.losses = []
        for i in range(steps):
            change(i, self)
            self.losses.append(self.svi.step(*args(i)))
        store = pyro.get_param_store().named_parameters()
        self.params = {name: param.detach().clone() for name, param in store}
        self.random = torch.get_rng_state()
        self.traced = elbo.state.traced.programs

    def is_as(self, other):
        return (
            self.losses == other.losses
            and all(value.equal(other.params[name]) for name, value in self.params.items())
            and self.random.equal(other.random)
        )


def assert_same(model, make=LIVI_ELBO, **options):
    plain = Run(model, make(4), **options)
    traced = Run(model, make(4, compile="trace"), **options)
    assert traced.traced.refusal is None and traced.traced.num_run > 0
    assert traced.is_as(plain)
    return traced


@pytest.mark.parametrize("validates", [True, False])
def test_runs_are_plain_ones_to_the_last_bit(validates):
    with pyro.validation_enabled(validates):
        run = assert_same(model)
    assert run.traced.num_recorded == 1
    assert len(set(run.losses)) == run.elbo.num_steps_taken == 6


@pytest.mark.parametrize("num_particles", [1, 2])
def test_priors_made_while_validation_was_on(num_particles):
    prior = dist.Normal(torch.zeros(2), 1.0, validate_args=True).to_event(1)

    def lasting():
        pyro.sample("y", dist.Normal(pyro.sample("x", prior).sum(-1), 1.0), obs=DATA[0])

    runs = [
        Run(lasting, ImplicitELBO(num_particles, compile=mode), guide=AutoNormal(lasting))
        for mode in (False, "trace")
    ]
    assert runs[1].traced.refusal is None and runs[1].traced.num_run > 0
    assert runs[1].is_as(runs[0])


def test_minibatches_of_one_shape_share_a_recording():
    batches = [DATA[torch.randperm(6)[:n]] for n in (4, 4, 4, 4, 3, 4, 3, 3)]
    run = assert_same(model, steps=8, args=lambda i: (batches[i],))
    assert run.traced.num_recorded == 2


def test_subsampled_indices_are_drawn_at_each_step():
    def subsampling():
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
        with pyro.plate("data", 6, subsample_size=2) as indices:
            pyro.sample("y", dist.Normal(loc, 1.0), obs=DATA[indices])

    assert_same(subsampling)


def test_weights_may_change_without_another_recording():
    def anneal(i, run):
        run.elbo.inverse_temperature = 0.2 + 0.1 * i

    run = assert_same(model, change=anneal)
    assert run.traced.num_recorded == 1


@pytest.mark.parametrize(
    "make, setting, other",
    [(KIVI_ELBO, "kernel", imq_kernel), (ScoreELBO, "estimator", stein_score)],
)
def test_a_changed_function_among_the_settings_is_recorded_anew(make, setting, other):
    def change(i, run):
        if i == 4:
            setattr(run.elbo, setting, other)

    run = assert_same(model, make, steps=8, change=change)
    assert run.traced.num_recorded == 2


def test_a_replaced_submodule_is_recorded_anew():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Identity()

        def forward(self):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(self.shift(x), 1.0), obs=torch.tensor(1.0))

    def change(i, run):
        if i == 4:
            run.svi.model.shift = nn.Tanh()

    plain, traced = (
        Run(Net(), LIVI_ELBO(4, compile=c), steps=8, change=change) for c in (False, "trace")
    )
    assert traced.is_as(plain) and traced.traced.num_recorded == 2


def test_a_method_carries_its_state():
    run = assert_same(model, UIVI_ELBO, steps=5)
    (size,) = run.elbo.step_sizes.values()
    assert size != ELBOS.initial_step_size


def test_data_in_place_and_parameters_of_another_run_are_seen():
    given = DATA.clone()

    def change(i, run):
        if i in (0, 3):
            DATA.copy_(given + i)
        if i == 5:
            state = pyro.get_param_store().get_state()
            state["params"] = {n: p.detach() * 0.9 for n, p in state["params"].items()}
            pyro.get_param_store().set_state(state)

    try:
        run = assert_same(model, steps=8, change=change)
    finally:
        DATA.copy_(given)
    assert run.traced.num_recorded == 3


def test_a_loaded_state_dict_is_seen():
    def change(i, run):
        if i == 3:
            state = {name: 0.9 * value for name, value in run.guide.state_dict().items()}
            run.guide.load_state_dict(state)

    assert_same(model, change=change)


def test_elbo_module_and_differentiable_loss():
    def losses(compile):
        pyro.set_rng_seed(5)
        with pyro.settings.context(module_local_params=True):
            guide = AutoSemiImplicit(model, frame=None)
            guide()
            pair = LIVI_ELBO(4, compile=compile)(model, guide)
            optimiser = torch.optim.Adam(pair.parameters(), lr=0.01)
            values = []
            for _ in range(5):
                optimiser.zero_grad()
                loss = pair()
                (2 * loss).backward()
                optimiser.step()
                values.append(loss.item())
            assert len(pyro.get_param_store()) == 0
        return values, [param.detach() for param in guide.parameters()], pair.elbo

    (plain, params, _), (traced, others, elbo) = losses(False), losses("trace")
    assert elbo.state.traced.programs.num_run == 3
    assert plain == traced
    assert all(one.equal(other) for one, other in zip(params, others, strict=True))


def test_gradients_reach_arguments():
    elbo = LIVI_ELBO(4, compile="trace")
    guide = AutoSemiImplicit(model, frame=None)
    elbo.loss(model, guide)
    gradients = []
    for _ in range(5):
        y = DATA.clone().requires_grad_()
        pyro.set_rng_seed(1)
        elbo.differentiable_loss(model, guide, 2 * y).backward()
        gradients.append(y.grad)
    assert elbo.state.traced.programs.num_run == 3
    assert all(gradient.equal(gradients[0]) and gradient.any() for gradient in gradients)


def test_impossible_particles_are_left_out_by_a_plain_step():
    def narrow():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("inside", torch.where(x < 0.1, 0.0, -math.inf))

    with pytest.warns(UserWarning, match="left out"):
        plain = Run(narrow, LIVI_ELBO(8), steps=8)
    with pytest.warns(UserWarning, match="left out"):
        traced = Run(narrow, LIVI_ELBO(8, compile="trace"), steps=8)
    assert traced.is_as(plain)
    assert traced.elbo.num_left_out == plain.elbo.num_left_out > 0


def test_a_compiled_elbo_can_be_pickled():
    run = Run(model, LIVI_ELBO(4, compile="trace"), steps=3)
    assert pickle.loads(pickle.dumps(run.elbo)).state.traced.programs.num_run == 0


# What cannot be recorded runs by Pyro, with one warning.


def branches():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    scale = 1.0
    if x > 0:
        scale = 2.0
    pyro.sample("y", dist.Normal(x, scale), obs=torch.ones(()))


def reads_a_parameter():
    scale = pyro.param("scale", torch.ones(()))
    pyro.sample("x", dist.Normal(0.0, 1.0 + float(scale.detach())))
    pyro.sample("y", dist.Normal(scale, 1.0), obs=torch.ones(()))


def leaves_torch():
    scale = pyro.param("scale", torch.ones(()))
    pyro.sample("x", dist.Normal(0.0, torch.as_tensor(np.exp(scale.detach().numpy()))))
    pyro.sample("y", dist.Normal(scale, 1.0), obs=torch.ones(()))


def selects():
    scale = pyro.param("scale", torch.ones(3))
    pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("y", scale[scale > 0.5].sum())


def has_own_generator():
    noise = torch.randn(2, generator=torch.Generator().manual_seed(1))
    pyro.sample("x", dist.Normal(noise, 1.0).to_event(1))


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (branches, "reads the value of a tensor.*if x > 0:"),
        (reads_a_parameter, r"reads the value of a tensor.*float\(scale.detach\(\)\)"),
        (leaves_torch, r"reads the values of a tensor \(.numpy\(\)\)"),
        (selects, r"size depends on values.*scale\[scale > 0.5\]"),
        (has_own_generator, "generator of its own"),
    ],
)
def test_what_cannot_be_recorded_runs_by_pyro(model, cause):
    with pytest.warns(UserWarning, match=f"LIVI_ELBO .step 2. runs without.*{cause}") as warned:
        traced = Run(model, LIVI_ELBO(4, compile="trace"))
    assert len(warned) == 1 and warned[0].filename == __file__
    assert traced.is_as(Run(model, LIVI_ELBO(4)))


def test_a_recording_that_has_become_wrong_is_told():
    settings = {"mean": 0.0}

    def model():
        pyro.sample("x", dist.Normal(settings["mean"], 1.0))

    def change(i, run):
        settings["mean"] = float(i > 3)

    with pytest.warns(UserWarning, match="disagrees with a plain one: its value is"):
        run = Run(model, LIVI_ELBO(4, compile="trace"), change=change)
    assert run.traced.num_run == 4


def test_auto_records_after_some_steps_and_says_nothing(monkeypatch):
    monkeypatch.setattr(recording, "RECORDINGS", replace(RECORDINGS, auto_steps=3))
    assert Run(model, LIVI_ELBO(4, compile="auto")).traced.num_run == 2
    run = Run(branches, LIVI_ELBO(4, compile="auto"))
    assert "if x > 0" in run.traced.refusal


@pytest.mark.parametrize("outcome", ["right", "wrong", "failed", "fails later"])
def test_auto_compiles_once_that_would_have_paid(monkeypatch, outcome):
    def compile_graph(graph, constants, inputs):
        graphs.append(graph)
        if outcome == "failed":
            raise CompilerError("no g++")
        right = program.as_function(graph, constants)

        def run(inputs):
            if outcome == "fails later":
                raise RuntimeError("under a dispatch mode")
            return right(inputs) if outcome == "right" else [one + 1 for one in right(inputs)]

        return run

    graphs = []
    plain = Run(model, LIVI_ELBO(4), steps=14)
    monkeypatch.setattr(recording, "RECORDINGS", replace(RECORDINGS, auto_steps=3))
    monkeypatch.setattr(program, "compile_graph", compile_graph)
    monkeypatch.setattr(program, "_calls_until_break_even", lambda graph: 5)
    run = Run(model, LIVI_ELBO(4, compile="auto"), steps=14)
    (recorded,) = run.traced._programs.values()
    assert run.is_as(plain) and run.traced.refusal is None and len(graphs) == 1
    assert recorded.function.is_compiled == (outcome == "right")


def test_a_wrong_recording_is_noticed_when_its_compilation_is_undone(monkeypatch):
    def change(i, run):
        settings["mean"] = float(i >= 8)  # when it is compiled, and compared

    def target():
        pyro.sample("x", dist.Normal(settings["mean"], 1.0))

    settings = {}
    monkeypatch.setattr(recording, "RECORDINGS", replace(RECORDINGS, auto_steps=3))
    monkeypatch.setattr(
        program, "compile_graph", lambda graph, held, inputs: program.as_function(graph, held)
    )
    monkeypatch.setattr(program, "_calls_until_break_even", lambda graph: 4)
    with pytest.warns(UserWarning, match=r"\(step 10\).*disagrees with a plain one: its value is"):
        Run(target, LIVI_ELBO(4, compile="auto"), steps=11, change=change)


@pytest.mark.filterwarnings("ignore:ImplicitELBO. SVI does not train")  # they are not registered
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_parameter_that_is_frozen_or_unfrozen_later(is_frozen):
    loc = nn.Parameter(torch.zeros(2), requires_grad=not is_frozen)
    other = nn.Parameter(torch.zeros(2))

    def target():
        pyro.sample("x", dist.Normal(5.0, 1.0).expand([2]).to_event(1))

    def guide():
        pyro.param("other", other)
        pyro.sample("x", dist.Normal(loc + other, 1.0).to_event(1))

    elbo = ImplicitELBO(4, compile="trace")
    for is_known, steps in ((not is_frozen, 20), (is_frozen, 3)):  # the next comparison is later
        loc.requires_grad_(is_known)
        for _ in range(steps):
            loc.grad = other.grad = None
            elbo.loss_and_grads(target, guide)
        assert (loc.grad is not None) == is_known
        assert other.grad is not None


def test_a_parameter_that_comes_later_is_trained():
    grown = []

    def target():
        pyro.sample("x", dist.Normal(5.0, 1.0))

    def guide():
        loc = pyro.param("loc", torch.zeros(()))
        if grown:
            loc = loc + pyro.param("late", torch.ones(()))
        pyro.sample("x", dist.Normal(loc, 1.0))

    run = Run(target, ImplicitELBO(4, compile="trace"), steps=3, guide=guide)
    grown.append(True)
    for _ in range(4):
        run.svi.step()
    late = pyro.param("late").item()
    run.svi.step()
    assert pyro.param("late").item() > late > 1.0


def test_arguments_that_change_by_value_or_cannot_be_known_are_told(monkeypatch):
    monkeypatch.setattr(compiled, "RECORDINGS", replace(RECORDINGS, max_recordings=2))

    def scaled(number):
        pyro.sample("x", dist.Normal(0.0, 1.0 + np.asarray(number).item()))

    elbo = LIVI_ELBO(4, compile="trace")
    with pytest.warns(UserWarning, match="recorded 2 times.*Cure: pass what changes as a tensor"):
        Run(scaled, elbo, steps=4, args=lambda i: (float(i),))
    elbo = LIVI_ELBO(4, compile="trace")
    with pytest.warns(UserWarning, match="an argument is a ndarray. Cure: pass a tensor"):
        Run(scaled, elbo, steps=3, args=lambda i: (np.ones(()),))


def test_a_guide_without_parameters():
    def guide():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    def target():
        pyro.sample("x", dist.Normal(1.0, 1.0))

    elbo = ImplicitELBO(3, compile="trace")
    assert all(math.isfinite(elbo.loss_and_grads(target, guide)) for _ in range(4))


def test_modules_in_training_mode_and_in_evaluation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self):
            pyro.module("net", self)
            pyro.sample("x", dist.Normal(0.0, 1.0 if self.training else 2.0))
            pyro.sample("y", dist.Normal(0.0, self.scale.exp()), obs=torch.ones(()))

    def change(i, run):
        if i == 4:
            run.svi.model.eval()

    plain, traced = (Run(Net(), LIVI_ELBO(4, compile=c), change=change) for c in (False, "trace"))
    assert traced.is_as(plain) and traced.traced.num_recorded == 2


def test_without_a_compiler_steps_run_recorded(monkeypatch):
    def fails(*args):
        raise CompilerError("no g++")

    monkeypatch.setattr("pyro_implicit.compiled.program.compile_graph", fails)
    with pytest.warns(UserWarning, match="recorded, but not compiled: no g") as warned:
        run = Run(model, LIVI_ELBO(4, compile=True))
    assert len(warned) == 1 and warned[0].filename == __file__
    assert run.traced.num_run == 4


def test_the_number_of_kernels_has_not_grown():
    run = Run(model, LIVI_ELBO(4, compile="trace"), steps=3)
    (program,) = run.traced._programs.values()
    assert sum(node.op == "call_function" for node in program.function.graph.nodes) <= 392


def test_refuses_another_mode():
    with pytest.raises(ValueError, match="compile must be"):
        LIVI_ELBO(4, compile="jit")
