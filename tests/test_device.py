# SPDX-License-Identifier: Apache-2.0
"""The contract on a device other than the CPU: on CUDA, and on one that is not there."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
from dataclasses import replace
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import (
    KIVI_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    InjectiveELBO,
    compare,
    compare_models,
    diagnose,
    evidence_bound,
    fit,
    refine,
)
from pyro_implicit.compiled import RecordedFunction
from pyro_implicit.compiled.replay import _Replay
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.marginal_normal import find_normal_marginal
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.target import Target
from pyro_implicit.fitting import log_evidence
from pyro_implicit.fitting.parameters import Learnt, put_back
from pyro_implicit.guides import auto_implicit
from pyro_implicit.mcmc import AutoConditional
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.trees import map_tree
from tests import test_contract as contract
from tests.devices import ELSEWHERE, Elsewhere
from tests.test_contract import ELBOS, GUIDES, Model

DEVICES = [ELSEWHERE] + ["cuda"] * torch.cuda.is_available()


@pytest.fixture(params=DEVICES)
def device(request):
    with Elsewhere() if request.param == ELSEWHERE else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def elsewhere():
    with Elsewhere():
        yield torch.arange(3.0).to(ELSEWHERE)


# The device that is not there.

FAULTS = {
    "add": lambda x: x + torch.zeros(3),
    "add_": lambda x: torch.zeros(3).add_(x),
    "cat": lambda x: torch.cat([x, torch.zeros(1)]),
    "stack a number": lambda x: torch.stack([x[0], torch.tensor(1.0)]),
    "two numbers": lambda x: torch.clamp(x, torch.tensor(0.0), torch.tensor(1.0)),
    "Linear": lambda x: torch.nn.Linear(3, 2)(x),
    "eye": lambda x: torch.eye(3) @ x,
    "linspace": lambda x: torch.linspace(0, 1, 3) * x,
    "index_put values": lambda x: x.index_put_((torch.tensor([0, 1]),), torch.zeros(2)),
    "numpy": lambda x: x.numpy(),
    "vmap": lambda x: torch.func.vmap(lambda row: row + torch.zeros(3))(x.expand(2, 3)),
    "jvp": lambda x: torch.func.jvp(lambda y: y * torch.ones(3), (x,), (x,)),
    "grad": lambda x: torch.func.grad(lambda y: (y * torch.ones(3)).sum())(x),
    "generator": lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # the first jvp of a process
@pytest.mark.parametrize("fault", FAULTS)
def test_elsewhere_refuses_to_meet_the_cpu(fault, elsewhere):
    with pytest.raises((RuntimeError, TypeError), match="device|subclass"):
        FAULTS[fault](elsewhere)


STAYS = {
    "number": lambda x: 2.0 * x + 1,
    "tensor number": lambda x: x + torch.tensor(2.0),
    "new_zeros": lambda x: x + x.new_zeros(3),
    "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0, 3.0]),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "eye": lambda x: torch.eye(3, device=x.device) @ x,
    "tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "to": lambda x: x + torch.ones(3).to(x),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(1.0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, torch.tensor(5.0)),
    "list": lambda x: x[[2, 0]],
    "mask": lambda x: x[x > 0],
    "setitem": lambda x: x.clone().__setitem__(0, 3.0) or x,
    "vmap": lambda x: torch.func.vmap(lambda row: row + row.new_ones(3))(x.expand(2, 3)),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x),
    "hessian": lambda x: torch.func.hessian(lambda y: y.pow(3).sum())(x),
    "linalg": lambda x: torch.linalg.cholesky(x.diag() + torch.eye(3, device=x.device)),
    "cov": lambda x: x.diag().cov(),
    "deepcopy": copy.deepcopy,
    "squeeze_": lambda x: x.clone().unsqueeze_(0).squeeze_(0),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", STAYS)
def test_elsewhere_computes_what_the_cpu_does(name, elsewhere):
    result = STAYS[name](elsewhere)
    assert result.device.type == ELSEWHERE
    assert result.cpu().equal(STAYS[name](torch.arange(3.0)))


def test_a_module_elsewhere_is_trained_saved_and_loaded(elsewhere):
    net = torch.nn.Linear(3, 2).to(ELSEWHERE)
    optimiser = torch.optim.Adam(net.parameters())
    before = net.weight.cpu()
    net(elsewhere).sum().backward()
    assert net.weight.grad.device == net.weight.device
    optimiser.step()
    assert net.weight.cpu().ne(before)[:, 1:].all()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.weight.device.type == ELSEWHERE and loaded.weight.equal(net.weight)


# What the library does on a device.


def guide_of(elbo_name: str) -> str:
    if elbo_name in ("Injective", "Renyi"):
        return "AutoImplicit-autoregressive"
    names = "LIVI", "SIVI", "UIVI", "KSIVI", "AISIVI", "HSIVI", "KPG"
    semi_implicit = elbo_name.startswith(names)
    return "AutoSemiImplicit-frame" if semi_implicit else "AutoImplicit"


def pairs() -> list[tuple[str, str]]:
    """Every ELBO and every guide: all pairs take a minute."""
    result = [(guide_of(elbo), elbo) for elbo in ELBOS]
    return result + [(guide, "KIVI") for guide in GUIDES if (guide, "KIVI") not in result]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("guide_name", "elbo_name"), pairs())
def test_contract(guide_name, elbo_name, device, monkeypatch):
    # The search for a frame takes most of the time: test_draws has it.
    monkeypatch.setattr(auto_implicit, "find_frame", lambda *args: None)
    contract.test_svi_trains_every_parameter(guide_name, elbo_name, device)


class Small:
    """Two latents, of proper or flat priors."""

    def __init__(self, device: str, flat: bool) -> None:
        self.y = torch.tensor([0.3, -1.0, 2.0, 0.7]).to(device)
        self.flat = flat

    def __call__(self) -> None:
        if self.flat:
            scale = pyro.sample("scale", flat_prior(dist.constraints.positive))
            mean = pyro.sample("mean", flat_prior(dist.constraints.real))
        else:
            scale = pyro.sample("scale", dist.LogNormal(self.y.new_zeros(()), 0.5))
            mean = pyro.sample("mean", dist.Normal(self.y.new_zeros(()), 2.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(mean, scale), obs=self.y)


def flat_prior(support: dist.constraints.Constraint) -> dist.ImproperUniform:
    return dist.ImproperUniform(support, (), ())


flat_or_not = pytest.mark.parametrize("flat", [False, True])


@flat_or_not
def test_density_and_modes(flat, device):
    density = Target(Small(device, flat))
    points = density.sample_prior(3)
    assert points.device.type == density.init_loc.device.type == device
    assert density.log_prob(points).device.type == device
    assert density.derivatives(points)[2].device.type == device
    assert density.unconstrain(density.constrain(points)).device.type == device
    modes = find_modes(density, num_starts=5, max_rounds=2, max_iterations=10)
    assert all(part.device.type == device for part in modes)


@flat_or_not
def test_training_and_bound(flat, device):
    model = Small(device, flat)
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    for elbo in (InjectiveELBO(8, coverage=1.0), KIVI_ELBO(8)):
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        assert isinstance(svi.step(), float)
    bound = evidence_bound(model, guide, num_samples=60)
    assert bound.value < 100
    bound = evidence_bound(model, AutoSemiImplicit(model, frame=None), num_samples=60, num_steps=3)
    assert bound.value < 100


@pytest.mark.parametrize("guide_name", ["AutoImplicit-autoregressive", "AutoSemiImplicit"])
def test_draws(guide_name, device, monkeypatch):
    if guide_name == "AutoSemiImplicit":  # the other guide searches for a frame
        monkeypatch.setattr(auto_implicit, "find_frame", lambda *args: None)
    model = Model(device=device)
    guide = GUIDES[guide_name](model)
    draws = guide.sample_posterior(120)
    assert all(value.device.type == device for value in draws.values())
    quantiles = guide.quantiles([0.1, 0.5])["weight"]
    assert quantiles.device.type == guide.median()["weight"].device.type == device
    assert Predictive(model, guide=guide, num_samples=3)()["y"].device.type == device
    assert compare(model, guide, draws).floor_ratio < 10
    assert (
        compare(model, guide, {name: value.cpu() for name, value in draws.items()}).floor_ratio < 10
    )


def test_diagnosis(device):
    model = Small(device, flat=False)
    guide = AutoNormal(model)
    guide()
    diagnosis = diagnose(model, guide, num_samples=100, num_transitions=2, modes=None)
    assert diagnosis.verdict in str(diagnosis)


def test_fit(device, tmp_path):
    y = torch.tensor([0.3, -1.0, 2.0, 0.7]).to(device)

    def model() -> None:  # Gaussian: the first candidate is right from its start
        mean = pyro.sample("mean", flat_prior(dist.constraints.real))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    settings = {"num_steps": 2, "num_particles": 8, "seed": 0, "progress": False}
    result = fit(model, "auto", **settings)
    assert result.guide.median()["mean"].device.type == device
    num_runs = 1 if device == "meta" else 2  # no file can be loaded to where nothing is
    for _ in range(num_runs):  # the second goes on from the first
        given = fit(model, AutoSemiImplicit(model, frame=None), checkpoint=tmp_path, **settings)
        assert len(given.losses) == 2


def test_all_of_a_result_on_the_default_device(device, monkeypatch):
    """The caller's default device also applies to tensors that the library must keep on the CPU."""
    few = replace(DECISIONS, num_draws=200, most_draws=200, evidence_chains=16)
    comparison, evidence = (
        importlib.import_module(f"pyro_implicit.fitting.{name}")
        for name in ("model_comparison", "log_evidence")
    )
    monkeypatch.setattr(comparison, "DECISIONS", few)
    monkeypatch.setattr(evidence, "DECISIONS", few)
    left_out = importlib.import_module("pyro_implicit.decisions.leave_one_out")
    for module in (evidence, left_out):
        monkeypatch.setattr(module, "refine", partial(refine, max_gradients=40))
    with torch.device(device):
        y = torch.linspace(-1, 1, 5)

        def model() -> None:
            mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
            with pyro.plate("rows", 5):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

        result = fit(model, "auto", seed=0, progress=False)
        assert result.sample(3)["mean"].device.type == device
        assert result.diagnose(num_samples=500, num_transitions=2).verdict == "trust"
        assert result.sensitivity().prior.device.type == "cpu"
        check = result.check_posterior_predictive(num_samples=100)
        assert check.sites["y"].pit.device.type == "cpu"
        compared = compare_models({"one": result, "other": result}, evidence=False, seed=0)
        assert compared.elpd["one"].isfinite().all()
        assert math.isfinite(log_evidence(result).value)
        store = DrawStore()
        store.append(torch.eye(3))
        assert store.take(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_marginal_density_on_the_default_device(device):
    with torch.device(device):
        y = torch.linspace(-2, 2, 101)

        def model() -> None:
            scale = pyro.sample("scale", dist.HalfNormal(1.0))
            with pyro.plate("rows", len(y)):
                x = pyro.sample("x", dist.Normal(0.0, scale))
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)

        found = find_normal_marginal(Target(model))
        assert found is not None and found.names == ["x"]


def test_a_checkpoint_that_was_read_to_a_device_continues(device):
    stream = BatchStream([torch.zeros(2), torch.ones(2)])
    stream.next()
    states = map_tree(
        lambda part: part.to(device) if isinstance(part, torch.Tensor) else part, stream.state()
    )
    stream.next()
    stream.restore(states)
    assert stream.next()[0].sum() == 2


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("elbo_name", ["LIVI-exact", "SIVI", "AmortizedKSD"])
def test_recorded_steps_on_cuda_are_plain_ones(elbo_name):
    """With random numbers of the GPU, and with a critic that is trained in the backward pass."""
    losses = []
    for mode in (False, "trace"):
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        model = Model(device="cuda")
        guide, elbo = GUIDES[guide_of(elbo_name)](model), ELBOS[elbo_name](8)
        elbo.compile = mode
        svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01}), elbo)
        losses.append([svi.step() for _ in range(8)])
    assert elbo.state.traced.programs.refusal is None
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@needs_cuda
@pytest.mark.parametrize("compiles", [False, True])
def test_a_recording_is_one_launch(compiles):
    x = torch.linspace(-1, 1, 5, device="cuda", dtype=torch.float64)
    recorded = RecordedFunction(lambda: [x.exp(), x + torch.randn_like(x)], [x])
    if compiles:
        recorded.compile([x])
    assert isinstance(recorded._run, _Replay)
    for shift in (1.0, 2.0):
        pyro.set_rng_seed(3)
        found = recorded([x + shift])
        pyro.set_rng_seed(3)
        expected = [(x + shift).exp(), x + shift + torch.randn_like(x)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@needs_cuda
@pytest.mark.parametrize("waits", [lambda x: x[torch.tensor([2, 0, 1])], torch.linalg.eigvalsh])
def test_what_waits_for_the_gpu_is_no_graph(waits):
    """Its kernels are launched one by one, and the generator is unchanged."""
    x = torch.eye(3, device="cuda")
    pyro.set_rng_seed(3)
    recorded = RecordedFunction(lambda: [waits(x) + torch.randn_like(x)], [x])
    assert not isinstance(recorded._run, _Replay)
    pyro.set_rng_seed(3)
    found = recorded([2 * x])[0]
    pyro.set_rng_seed(3)
    torch.testing.assert_close(found, waits(2 * x) + torch.randn_like(x))


def test_noise_that_parents_and_data_leave(device):
    """Of a centred and of a non-centred effect, and the guide that is made of it."""
    y = torch.tensor([0.3, -1.0, 2.0, 0.7]).to(device)
    zero = y.new_zeros(())

    def model():
        tau = pyro.sample("tau", dist.LogNormal(zero, 1.0))
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Normal(zero, 1.0))
            x = pyro.sample("x", dist.Normal(zero, tau))
            pyro.sample("y", dist.Normal(tau * z, 0.5), obs=y)
            pyro.sample("other", dist.Normal(x, 0.5), obs=y)

    density = Target(model)
    walked = ConditionalNoise(density, density.init_loc + 0.1)
    assert set(walked.reparams) == {"x", "z"}
    points = torch.linspace(-1, 1, 18).reshape(2, 9).to(device)
    log_prob, score = walked.score(points)
    assert log_prob.device.type == score.device.type == device
    draws = density.constrain(walked.to_latent(points.repeat(10, 1)))
    guide = AutoConditional(model, walked.reparams)
    guide.take_moments(draws)
    assert guide()["z"].device.type == device


def test_parameters_are_put_back_where_the_model_has_them(device):
    def model(data):
        scale = pyro.param(
            "scale", torch.ones(2).double().to(device), constraint=dist.constraints.positive
        )
        pyro.sample("x", dist.Normal(data, scale).to_event(1))

    data = torch.zeros(2).double().to(device)
    model(data)
    learnt = Learnt(torch.tensor([1.0, 2.0]), dist.constraints.positive)  # as read from a file
    put_back({"scale": learnt, "new": learnt}, model)
    scale = pyro.param("scale")
    assert scale.device.type == device and scale.dtype == torch.double
    assert scale.tolist() == pytest.approx([2.71828, 7.38906], rel=1e-4)
    assert pyro.get_param_store().get_state()["params"]["scale"].is_leaf and scale.requires_grad
    model(data)
    assert pyro.param("new").dtype == torch.float
