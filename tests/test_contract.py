# SPDX-License-Identifier: Apache-2.0
"""What every guide must do under every ELBO. A new method joins by a line in ELBOS or GUIDES."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_implicit import (
    AISIVI_ELBO,
    AVB_ELBO,
    GPVI_ELBO,
    HSIVI_ELBO,
    KIVI_ELBO,
    KPG_ELBO,
    KSIVI_ELBO,
    LIVI_ELBO,
    MLP,
    MMNN,
    SIVI_ELBO,
    UIVI_ELBO,
    AmortizedKSD_ELBO,
    AmortizedSVGD_ELBO,
    AutoImplicit,
    AutoMixture,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    GatedResidualGenerator,
    Implicit,
    ImplicitRenyiELBO,
    InjectiveELBO,
    ResidualGenerator,
    ScoreELBO,
    SemiImplicit,
)
from pyro_implicit.guides import Frame, auto_implicit
from pyro_implicit.guides.affine_frame import find_frame
from pyro_implicit.infer import ImplicitELBO

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
NUM_PARTICLES = 4


class Model:
    """A regression with a global vector, a positive scale, local latents and a nested plate."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, 5, 2, generator=generator).to(device, dtype)
        self.y = torch.randn(3, 5, generator=generator).to(device, dtype)
        self.num_groups, self.rows = 3, None

    def plate(self) -> pyro.plate:
        return pyro.plate("groups", self.num_groups, subsample=self.rows, dim=-2)

    def __call__(self) -> None:
        scale = pyro.sample("scale", dist.LogNormal(self.x.new_zeros(()), 0.5))
        weight = pyro.sample("weight", dist.Normal(self.x.new_zeros(2), 1.0).to_event(1))
        with self.plate():
            offset = pyro.sample("offset", dist.Normal(0.0 * scale, scale))
            with pyro.plate("rows", 5, dim=-1):
                mean = (self.x * weight).sum(-1) + offset
                pyro.sample("y", dist.Normal(mean, 1.0), obs=self.y)


class HandWritten(nn.Module):
    """An amortised semi-implicit guide of the local latents beside explicit and implicit ones."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.data = model.y
        self.weight_generator = MLP(3, 2)
        self.encoder = MLP(2, 1, context_dim=5)
        self.scale_loc = nn.Parameter(torch.zeros(()))
        self.to(dtype=model.y.dtype, device=model.y.device)

    def forward(self) -> None:
        pyro.module("guide", self, update_module_params=True)
        pyro.sample("scale", dist.LogNormal(self.scale_loc, 0.1))
        pyro.sample("weight", SemiImplicit(self.weight_generator, 3, 0.1))
        with pyro.plate("groups", 3, dim=-2):
            context = self.data.unsqueeze(-2)  # (3, 1, 5)
            pyro.sample("offset", SemiImplicit(self.encode, 2, 0.1, context))

    def encode(self, noise: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.encoder(noise, context).squeeze(-1)


def guide_list(model: Model) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoSemiImplicit(poutine.block(model, expose=["weight", "offset"])))
    guide.append(AutoNormal(poutine.block(model, expose=["scale"])))
    return guide


def of_rows(make: Callable[..., AutoImplicit], **options: Any) -> Callable[[Model], Callable]:
    """A guide with parameters of each of ten groups, three of which are the minibatch."""

    def guide(model: Model) -> Callable:
        model.num_groups, model.rows = 10, torch.tensor([1, 4, 8], device=model.x.device)
        return make(model, create_plates=model.plate, **options)

    return guide


GUIDES: dict[str, Callable[[Model], Callable]] = {
    "AutoImplicit": lambda m: AutoImplicit(m, frame=None),
    "AutoImplicit-residual": lambda m: AutoImplicit(
        m, lambda size: ResidualGenerator(size, 3), frame=None
    ),
    "AutoImplicit-gated-residual": lambda m: AutoImplicit(
        m, lambda size: GatedResidualGenerator(size, 2), frame=None
    ),
    "AutoImplicit-autoregressive": lambda m: AutoImplicit(m, AutoregressiveGenerator),
    # Of wide parts: of two far from each other, one gets no weight and no gradient.
    "AutoMixture": lambda m: AutoMixture(
        m, [AutoImplicit(m, AutoregressiveGenerator, frame=None, init_scale=1.0) for _ in range(2)]
    ),
    "AutoSemiImplicit": AutoSemiImplicit,
    "AutoSemiImplicit-learn": lambda m: AutoSemiImplicit(m, frame=None, noise_scale="learn"),
    "AutoSemiImplicit-frame": lambda m: AutoSemiImplicit(m, frame=AutoMultivariateNormal(m)),
    "AutoSemiImplicit-MMNN": lambda m: AutoSemiImplicit(
        m, lambda size: MMNN((2, 2), ((4, 3),), (3, 3), output_dim=size), frame=None
    ),
    "AutoImplicit-rows": of_rows(
        AutoImplicit, generator=lambda size: ResidualGenerator(size, 3), init_scale=0.1
    ),
    "AutoSemiImplicit-rows": of_rows(AutoSemiImplicit, noise_scale="learn"),
    "AutoGuideList": guide_list,
    "HandWritten": HandWritten,
}
ELBOS: dict[str, Callable] = {
    "AISIVI": lambda k: AISIVI_ELBO(k, 10),
    "AmortizedKSD": AmortizedKSD_ELBO,
    "AmortizedSVGD": AmortizedSVGD_ELBO,
    "AVB": lambda k: AVB_ELBO(k, 20),
    "AVB-prior": lambda k: AVB_ELBO(k, 20, contrast="prior"),
    "GPVI": GPVI_ELBO,
    "GPVI-helper": lambda k: GPVI_ELBO(k, jacobian="helper"),
    "HSIVI": HSIVI_ELBO,
    "Injective": InjectiveELBO,
    "KIVI": KIVI_ELBO,
    "KIVI-diagonal-reverse-imq": lambda k: KIVI_ELBO(
        k, 20, 30, kernel="imq", direction="reverse", covariance="diagonal"
    ),
    "KIVI-prior": lambda k: KIVI_ELBO(k, 20, contrast="prior"),
    "KPG": KPG_ELBO,
    "KPG-IS-imq": lambda k: KPG_ELBO(k, 2 if k > 1 else 0, "imq"),
    "KSIVI": KSIVI_ELBO,
    "KSIVI-two-batch-imq": lambda k: KSIVI_ELBO(k, "imq", "two-batch"),
    "LIVI-exact": lambda k: LIVI_ELBO(k, log_det="exact"),
    "LIVI-quadratic": lambda k: LIVI_ELBO(k, entropy="quadratic"),
    "LIVI-smallest": lambda k: LIVI_ELBO(k, log_det="smallest"),
    "LIVI-stochastic": lambda k: LIVI_ELBO(k, log_det="stochastic"),
    "Renyi": lambda k: ImplicitRenyiELBO(0.5, k),
    "SIVI": SIVI_ELBO,
    "SIVI-chunks": lambda k: SIVI_ELBO(k, 10, chunk_size=4),
    "Score-spectral": ScoreELBO,
    "Score-stein": lambda k: ScoreELBO(k, "stein", 20, covariance=None),
    "UIVI": lambda k: UIVI_ELBO(k, num_burnin=2, num_samples=2),
}
COMPARING_PARTICLES = {
    "AmortizedKSD",
    "AmortizedSVGD",
    "GPVI",
    "GPVI-helper",
    "KPG",
    "KPG-IS-imq",
    "KSIVI",
    "KSIVI-two-batch-imq",
}
#: Combinations that no setting makes sensible, with a word of the error that says so.
REFUSED = {
    ("HandWritten", "LIVI-smallest"): "noise_dim",
    ("AutoImplicit", "Renyi"): "knows no density.*Cure",  # its generator may fold
    ("AutoImplicit-rows", "Renyi"): "needs all data.*Cure",
    ("AutoSemiImplicit-rows", "Renyi"): "needs all data.*Cure",
    # the scale of the offsets' prior is a latent of another site
    ("HandWritten", "AVB-prior"): "'offset'.*Cure",
    ("AutoGuideList", "AVB-prior"): "latent.*Cure",
}


#: Those whose sites are semi-implicit; the mixture has a density, the others' are implicit.
SEMI_IMPLICIT = ("AutoSemiImplicit", "AutoGuideList", "HandWritten")


def refusal(guide_name: str, elbo_name: str) -> str | None:
    """What the error says of a pair that cannot be trained, None where it can."""
    kind = SemiImplicit if guide_name.startswith(SEMI_IMPLICIT) else Implicit
    if guide_name != "AutoMixture" and kind not in ELBOS[elbo_name](NUM_PARTICLES).site_types:
        return f"cannot train site '.+'.*{kind.__name__}.*Cure"
    return REFUSED.get((guide_name, elbo_name))


PAIRS = {(guide, elbo): refusal(guide, elbo) for elbo in ELBOS for guide in GUIDES}
NAMES = ("guide_name", "elbo_name")
_ALLOWED = [pair for pair, why in PAIRS.items() if why is None]
#: One of each guide and of each ELBO, for what no pair has to itself.
_SOME = {guide: (guide, elbo) for guide, elbo in _ALLOWED} | {
    elbo: (guide, elbo) for guide, elbo in reversed(_ALLOWED)
}
#: Guides that only an ELBO which reads the generator's Jacobian tells from another guide above: all
#: others take draws and densities. The mixture's density is Pyro's; "HandWritten" has one, too.
_VARIANTS = {"AutoImplicit-gated-residual", "AutoSemiImplicit-frame", "AutoSemiImplicit-MMNN"}
_JACOBIAN = ("GPVI", "Injective", "LIVI")
_COVERED = {
    (guide, elbo)
    for guide, elbo in set(_ALLOWED) - set(_SOME.values())
    if guide == "AutoMixture" or (guide in _VARIANTS and not elbo.startswith(_JACOBIAN))
}
pairs = pytest.mark.parametrize(NAMES, [pair for pair in _ALLOWED if pair not in _COVERED])
some_pairs = pytest.mark.parametrize(NAMES, sorted(set(_SOME.values())))
_REFUSED = [pair for pair, why in PAIRS.items() if why and pair not in REFUSED]
#: One check of the kind of their sites rules these out: one pair of each guide and each ELBO.
_BY_KIND = {pair[0]: pair for pair in _REFUSED} | {pair[1]: pair for pair in reversed(_REFUSED)}
#: Whose steps cannot be recorded, and a word of the reason.
UNRECORDED = {"LIVI-smallest": "reads the value"}  # it iterates until it has converged
refused = pytest.mark.parametrize(NAMES, [*sorted(set(_BY_KIND.values())), *REFUSED])
guides = pytest.mark.parametrize("guide_name", GUIDES)


@pytest.fixture(scope="module")
def found_frames() -> dict[torch.dtype, Frame]:
    return {}


@pytest.fixture(autouse=True)
def _one_search(found_frames, monkeypatch) -> None:
    """All guides with frame="auto" get the same frame of the same model: search for it once."""

    def search(model: Callable, init_loc_fn: Callable, device: torch.device, *args) -> Frame | None:
        own = getattr(model, "args", [model])[-1]  # the guide has put a handler around it
        if not isinstance(own, Model) or device.type != "cpu":
            return find_frame(model, init_loc_fn, device, *args)
        dtype = own.y.dtype
        if dtype not in found_frames:
            found_frames[dtype] = find_frame(model, init_loc_fn, device, *args)
        return found_frames[dtype]

    monkeypatch.setattr(auto_implicit, "find_frame", search)


def make(
    guide_name: str, elbo_name: str, num_particles: int = NUM_PARTICLES, **model_args
) -> tuple[Model, Callable, ImplicitELBO]:
    """A model, a guide that has been called once, and an ELBO."""
    model = Model(**model_args)
    guide, elbo = GUIDES[guide_name](model), ELBOS[elbo_name](num_particles)
    guide()
    return model, guide, elbo


@refused
def test_refuses_what_it_cannot_train(guide_name, elbo_name):
    model, guide, elbo = make(guide_name, elbo_name)
    with pytest.raises(ValueError, match=PAIRS[guide_name, elbo_name]):
        elbo.loss_and_grads(model, guide)


@pairs
@pytest.mark.parametrize("device", DEVICES)
def test_svi_trains_every_parameter(guide_name, elbo_name, device):
    model, guide, elbo = make(guide_name, elbo_name, device=device)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    assert math.isfinite(svi.evaluate_loss())
    assert all(p.grad is None for _, p in pyro.get_param_store().named_parameters())
    params = dict(pyro.get_param_store().named_parameters())
    # a base guide, what it gave, and the networks that an ELBO trains itself
    fixed = ("AutoMultivariateNormal", "frame_", "log_weights", "_ELBO-")
    params = {name: p for name, p in params.items() if not any(word in name for word in fixed)}
    assert all(param.device.type == device for param in params.values())
    before = {name: param.detach().clone() for name, param in params.items()}
    assert isinstance(svi.step(), float)
    for name, param in params.items():  # Adam moves each entry whose gradient is not 0
        assert (param != before[name]).any(), f"no gradient for {name}"


@some_pairs
def test_single_particle(guide_name, elbo_name):
    if elbo_name in COMPARING_PARTICLES:
        with pytest.raises(ValueError, match="num_particles must be at least 2"):
            ELBOS[elbo_name](1)
        return
    model, guide, elbo = make(guide_name, elbo_name, num_particles=1)
    assert SVI(model, guide, pyro.optim.Adam({}), elbo).step() != 0


@pytest.mark.parametrize(NAMES, sorted({_SOME[name] for name in (*GUIDES, *UNRECORDED)}))
def test_seeds_give_equal_runs(guide_name, elbo_name):
    """``test_recorded_steps_are_plain_ones`` has equal seeds for the other ELBOs."""

    def losses() -> list[float]:
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        model, guide, elbo = make(guide_name, elbo_name)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        return [svi.step() for _ in range(2)]

    assert losses() == losses()


@some_pairs
def test_losses_without_a_step_leave_nothing_behind(guide_name, elbo_name):
    """Where the cost of a step is counted, say: a hook that knew its tensor would keep it."""
    model, guide, elbo = make(guide_name, elbo_name)

    def alive() -> int:
        elbo.differentiable_loss(model, guide)
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        return sum(one.grad_fn is not None for one in found)

    gc.freeze()  # the objects of all earlier tests, which would be searched each time
    first = alive()
    assert [alive() for _ in range(2)] == [first, first]


ELBOS_TO_COPY = {
    **ELBOS,
    "Injective-coverage": lambda k: InjectiveELBO(k, coverage=1.0),
    "Injective-path": lambda k: InjectiveELBO(k, path_derivative=True),
}


@pytest.mark.parametrize("elbo_name", ELBOS_TO_COPY)
def test_copies_and_pickles_after_a_step(elbo_name):
    pyro.set_rng_seed(3)
    model, elbo = Model(dtype=torch.float64), ELBOS_TO_COPY[elbo_name](NUM_PARTICLES)
    is_semi_implicit = SemiImplicit in elbo.site_types
    guide = GUIDES["AutoSemiImplicit-learn" if is_semi_implicit else "AutoImplicit-residual"](model)

    def step(which: ImplicitELBO) -> tuple[float, list[torch.Tensor]]:
        pyro.set_rng_seed(4)
        guide.zero_grad()
        loss = which.loss_and_grads(model, guide)
        return loss, [p.grad.clone() for p in guide.parameters() if p.grad is not None]

    elbo.loss_and_grads(model, guide)
    copied, loaded = copy.deepcopy(elbo), pickle.loads(pickle.dumps(elbo))
    torch.testing.assert_close(step(copied), step(elbo))
    assert math.isfinite(step(loaded)[0])
    # The copies train networks of their own.
    reference = copy.deepcopy(elbo)
    step(copied), step(loaded)
    torch.testing.assert_close(step(reference), step(elbo), rtol=0, atol=0)


@pytest.mark.parametrize("elbo_name", ELBOS)
def test_recorded_steps_are_plain_ones(elbo_name):
    elbo_type = ELBOS[elbo_name](NUM_PARTICLES)
    guide_name = "AutoSemiImplicit-learn"
    if SemiImplicit not in elbo_type.site_types:
        guide_name = "AutoImplicit-residual"

    def steps(compile) -> tuple[list[float], list[torch.Tensor], object]:
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        model, guide, elbo = make(guide_name, elbo_name, dtype=torch.float64)
        elbo.compile = compile
        losses = []
        for _ in range(5):  # the first plain, one recorded, three compared or run
            guide.zero_grad()
            losses.append(elbo.loss_and_grads(model, guide))
        return losses, [p.grad for p in guide.parameters() if p.grad is not None], elbo

    losses, gradients, _ = steps(False)
    if elbo_name in UNRECORDED:
        with pytest.warns(UserWarning, match=UNRECORDED[elbo_name]):
            steps("trace")
        return
    others, other_gradients, elbo = steps("trace")
    assert elbo.state.traced.programs.num_run == 3
    torch.testing.assert_close(others, losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-8, atol=1e-10)


@some_pairs
def test_float64_comes_from_the_model(guide_name, elbo_name):
    model, guide, elbo = make(guide_name, elbo_name, dtype=torch.float64)
    loss = elbo.differentiable_loss(model, guide)
    assert loss.dtype == torch.float64
    for name, param in pyro.get_param_store().named_parameters():
        assert param.dtype == torch.float64, name


@some_pairs
def test_elbo_module_with_torch_optimiser(guide_name, elbo_name):
    """Each guide and each ELBO once: all pairs have the losses of ``SVI``, tested above."""
    with pyro.settings.context(module_local_params=True):
        model, guide, elbo = make(guide_name, elbo_name)
        pair = elbo(model, guide)
        params = dict(pair.named_parameters())
        optimiser = torch.optim.Adam(params.values(), lr=1e-3)
        fixed = ("frame_", "log_weights")
        params = {n: p for n, p in params.items() if not any(word in n for word in fixed)}
        before = {name: param.detach().clone() for name, param in params.items()}
        pair().backward()
        optimiser.step()
        assert all((param != before[name]).any() for name, param in params.items())
        if guide_name != "HandWritten":  # pyro.module() is global by nature
            assert len(pyro.get_param_store()) == 0


@guides
def test_predictive_and_shapes(guide_name):
    model = Model()
    guide = GUIDES[guide_name](model)
    draws = Predictive(model, guide=guide, num_samples=6)()
    assert draws["y"].shape[-2:] == (3, 5) and draws["y"].shape[0] == 6
    trace = poutine.trace(guide).get_trace()
    assert trace.nodes["weight"]["value"].shape == (2,)
    assert trace.nodes["offset"]["value"].shape == (3, 1)
    assert trace.nodes["scale"]["value"] > 0


def draw(guide: Callable) -> list[torch.Tensor]:
    pyro.set_rng_seed(7)
    nodes = poutine.trace(guide).get_trace().nodes
    return [nodes[name]["value"].detach() for name in ("scale", "weight", "offset")]


def trained(guide_name: str) -> tuple[Model, Callable, list[torch.Tensor]]:
    """A model, its guide after some training, and a draw from it."""
    model, guide = Model(), GUIDES[guide_name]
    guide = guide(model)
    guide()
    for param in guide.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return model, guide, draw(guide)


@guides
def test_param_store_restores_a_fresh_guide(guide_name, tmp_path):
    model, guide, expected = trained(guide_name)
    pyro.get_param_store().save(tmp_path / "params.pt")
    pyro.clear_param_store()
    fresh = GUIDES[guide_name](model)
    assert draw(fresh)[1].ne(expected[1]).all()
    for restored in (fresh, GUIDES[guide_name](model)):  # one already in use, one not
        pyro.clear_param_store()
        pyro.get_param_store().load(tmp_path / "params.pt")
        draw(restored)
        assert all(a.equal(b) for a, b in zip(draw(restored), expected, strict=True))


@guides
def test_state_dict_restores_a_fresh_guide(guide_name):
    model, guide, expected = trained(guide_name)
    state = {name: value.clone() for name, value in guide.state_dict().items()}
    pyro.clear_param_store()
    fresh = GUIDES[guide_name](model)
    assert draw(fresh)[1].ne(expected[1]).all()
    fresh.load_state_dict(state)
    assert all(a.equal(b) for a, b in zip(draw(fresh), expected, strict=True))
