# SPDX-License-Identifier: Apache-2.0
"""What users of Pyro's autoguides rely on, asked of Pyro's guides and of ours alike."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from pyro.infer.reparam import LocScaleReparam, ProjectedNormalReparam
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import nn
from torch.testing import assert_close

from pyro_implicit import (
    GPVI_ELBO,
    LIVI_ELBO,
    AutoAmortized,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
)
from pyro_implicit.fitting import default_loss
from pyro_implicit.guides import AutoMixture, auto_implicit
from pyro_implicit.guides.affine_frame import find_frame


def mixture(model, create_plates=None, **kwargs):
    kwargs = {"frame": None, **kwargs}  # the search for a frame is that of AutoImplicit
    parts = [AutoImplicit(model, AutoregressiveGenerator, **kwargs) for _ in range(2)]
    return AutoMixture(model, parts, create_plates=create_plates)


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoImplicit": AutoImplicit,
    "AutoSemiImplicit": AutoSemiImplicit,
    "AutoMixture": mixture,
}
OURS = ("AutoImplicit", "AutoSemiImplicit", "AutoMixture")
guides = pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)


@pytest.fixture(scope="module")
def found_frames():
    return {}


@pytest.fixture(autouse=True)
def _one_search(found_frames, monkeypatch):
    """Search once for the frame of the same model with the same arguments.

    ``tests/guides/test_affine_frame_search.py`` checks that a search repeats its result.
    """

    def search(model, init_loc_fn, device, args, kwargs):
        own = getattr(model, "args", [model])[-1]  # the guide has put a handler around it
        given = [own, init_loc_fn, *args, *kwargs.values()]
        key = (tuple(map(id, given)), tuple(kwargs), device)
        if key not in found_frames:  # which stores the objects so that their ids stay unique
            found_frames[key] = (find_frame(model, init_loc_fn, device, args, kwargs), given)
        return found_frames[key][0]

    monkeypatch.setattr(auto_implicit, "find_frame", search)


def elbo_for(guide):
    """One that trains, or of a mixture evaluates, the guide."""
    kinds = {type(module) for module in guide.modules()}
    if AutoSemiImplicit in kinds:
        return LIVI_ELBO(3)
    if AutoImplicit in kinds and AutoMixture not in kinds:
        return GPVI_ELBO(3)
    return Trace_ELBO(3)


def model(y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 4, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, scale))
        return pyro.sample("y", dist.Normal(z + mix.sum(-1), 1.0), obs=y)


Y = torch.zeros(2, 4)
SHAPES = {"scale": (), "mix": (3,), "z": (2, 4)}

ordered = dist.TransformedDistribution(
    dist.Normal(0.0, 1.0).expand([3]).to_event(1), [dist.transforms.OrderedTransform()]
)
PRIORS = {
    "real": dist.Normal(0.0, 1.0),
    "positive": dist.Gamma(2.0, 1.0),
    "unit interval": dist.Beta(2.0, 2.0),
    "interval": dist.Uniform(-1.0, 3.0),
    "greater than": dist.Pareto(1.0, 2.0),
    "simplex": dist.Dirichlet(torch.ones(3)),
    "ordered": ordered,
    "corr_cholesky": dist.LKJCholesky(3, 1.0),
    "circle": dist.VonMises(0.0, 1.0),
    "half line": dist.HalfCauchy(1.0),
    "independent": dist.LogNormal(0.0, 1.0).expand([2, 3]).to_event(2),
    "multivariate": dist.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    "relaxed": dist.RelaxedOneHotCategorical(torch.tensor(1.0), probs=torch.ones(3) / 3),
}
FLAT = {  # a flat prior has no draws: Pyro's guides refuse these, ours start at 0
    "ordered": (constraints.ordered_vector, (3,)),
    "positive ordered": (constraints.positive_ordered_vector, (3,)),
    "less than": (constraints.less_than(2.0), ()),
    "stacked": (constraints.stack([constraints.positive, constraints.real], dim=-1), (2,)),
    "independent": (constraints.independent(constraints.unit_interval, 1), (2,)),
    "independent less than": (constraints.independent(constraints.less_than(2.0), 1), (2,)),
    "corr_cholesky": (constraints.corr_cholesky, (3, 3)),
}


@guides
def test_median_and_quantiles_of_every_support(make):
    check_summaries(make, PRIORS)


@pytest.mark.parametrize("name", OURS)
def test_median_and_quantiles_of_flat_priors(name):
    flat = {key: dist.ImproperUniform(s, (), shape) for key, (s, shape) in FLAT.items()}
    check_summaries(GUIDES[name], flat)


def check_summaries(make, priors):
    def model():
        for name, prior in priors.items():
            pyro.sample(name, prior)

    guide = make(model, init_scale=0.5)
    draw = guide()
    levels, medians = guide.quantiles([0.1, 0.5, 0.9]), guide.median()
    assert list(levels) == list(medians) == list(priors)
    for name, prior in priors.items():
        assert levels[name].shape == (3, *draw[name].shape), name
        assert prior.support.check(levels[name]).all(), name
        assert_close(medians[name], levels[name][1])
        assert not medians[name].requires_grad
        if medians[name].dim() == 0 or name.startswith("independent"):
            assert (levels[name].diff(dim=0) > 0).all(), name


@guides
def test_summaries_take_no_arguments_and_no_randomness(make):
    guide = make(model)
    guide(Y)
    first, levels = guide.median(), guide.quantiles([0.3, 0.7])
    pyro.set_rng_seed(7)  # another place in the random stream
    state = torch.get_rng_state()
    again = guide.median(Y)
    assert all(torch.equal(first[name], again[name]) for name in SHAPES)
    for name, value in guide.quantiles([0.3, 0.7]).items():
        assert torch.equal(value, levels[name])
    assert torch.equal(torch.get_rng_state(), state)
    with poutine.trace() as seen:
        guide.median()
        guide.quantiles([0.5])
    assert not [site for site in seen.trace.nodes.values() if site["type"] == "sample"]


@pytest.mark.parametrize("name", OURS)
def test_quantiles_are_numbers_between_0_and_1(name):
    guide = GUIDES[name](model)
    assert guide.quantiles(torch.tensor([0.1, 0.9]), Y)["z"].shape == (2, 2, 4)
    for wrong in ([1.5], [-0.1], [math.nan]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            guide.quantiles(wrong)


@pytest.mark.parametrize(
    "init_loc_fn",
    [
        init_to_feasible,
        init_to_mean,
        init_to_median,
        init_to_sample,
        init_to_uniform,
        init_to_median(num_samples=3),
        init_to_value(values={"a": torch.tensor(1.0)}, fallback=init_to_sample),
    ],
)
@guides
def test_init_loc_fn_of_pyro(make, init_loc_fn):
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("plate", 3):
            pyro.sample("b", dist.Normal(torch.zeros(3), 1.0))
        pyro.sample("c", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
        pyro.sample("d", dist.Normal(0, 1).expand((2,)).mask(torch.arange(2) > 0).to_event(1))

    guide = make(model, init_loc_fn=init_loc_fn)
    guide()
    assert math.isfinite(elbo_for(guide).loss(model, guide))


@guides
def test_a_guide_starts_at_init_loc(make):
    start = {"x": torch.randn(()), "y": torch.randn(5)}

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5)))

    guide = make(model, init_loc_fn=lambda site: start[site["name"]])
    guide()
    for name, value in guide.median().items():
        assert_close(value, start[name], atol=0.02, rtol=0)


@pytest.mark.parametrize("init_scale", [1e-1, 1e-4, 1e-8])
@guides
def test_init_scale(make, init_scale):
    def model():
        pyro.sample("x", dist.Normal(torch.zeros(20), 1.0).to_event(1))

    guide = make(model, init_scale=init_scale, init_loc_fn=init_to_feasible)
    guide()
    low, high = guide.quantiles([0.159, 0.841])["x"]
    assert_close((high - low).mean() / 2, torch.tensor(init_scale), rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="init_scale"):
        make(model, init_scale=-1.0)


@guides
def test_draws_in_plates_and_from_the_predictive(make):
    guide = make(model)
    assert {name: tuple(value.shape) for name, value in guide(Y).items()} == SHAPES
    with pyro.plate("particles", 5, dim=-3):
        shapes = {name: tuple(value.shape) for name, value in guide().items()}
    assert shapes == {"scale": (5, 1, 1), "mix": (5, 1, 1, 3), "z": (5, 2, 4)}
    for parallel in (False, True):
        draws = Predictive(model, guide=guide, num_samples=7, parallel=parallel)()
        assert draws["y"].shape == draws["z"].shape == (7, 2, 4)
        assert draws["z"].unique().numel() == 56


@guides
def test_an_event_without_a_plate(make):
    """A batch that the model declares no plate for."""

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5)))

    guide = AutoGuideList(model)
    guide.append(make(poutine.block(model, expose=["x"])))
    guide.append(make(poutine.block(model, expose=["y"])))
    assert {name: tuple(value.shape) for name, value in guide().items()} == {"x": (2,), "y": (5,)}
    assert guide.quantiles([0.1, 0.9])["x"].shape == (2, 2)
    assert guide.median()["x"].shape == (2,)


@guides
def test_log_factors_move_the_loss_by_their_sum(make):
    def model(factor):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("f", factor)
        with pyro.plate("plate", 3):
            pyro.factor("g", factor)

    guide = make(model)
    guide(torch.tensor(0.0))
    elbo, losses = elbo_for(guide), []
    for factor in (0.0, 5.0, 4.0):  # the first loss makes the networks and tries vmap
        pyro.set_rng_seed(1)
        losses.append(elbo.loss(model, guide, torch.tensor(factor)))
    assert losses[1] - losses[2] == pytest.approx(-4.0, abs=1e-4)


@guides
def test_subsampled_observations(make):
    def model(x, y, size=None):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        scale = pyro.param("scale", lambda: torch.ones(()), constraint=constraints.positive)
        with pyro.plate("rows", len(x), subsample_size=size):
            rows = pyro.subsample(x, event_dim=0)
            pyro.sample("y", dist.Normal(loc + rows, scale), obs=pyro.subsample(y, event_dim=0))

    x = torch.randn(50)
    guide = make(model)
    guide(x, x + 1, size=20)
    svi = SVI(model, guide, Adam({"lr": 0.02}), elbo_for(guide))
    for size in (20, 20, 10, None):
        assert math.isfinite(svi.step(x, x + 1, size=size))


@pytest.mark.parametrize("name", [name for name in GUIDES if name != "AutoMultivariateNormal"])
def test_create_plates_chooses_the_subsample(name):
    sizes = []

    def model(data):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("from", 10, dim=-2), pyro.plate("to", 10, dim=-1):
            batch = pyro.subsample(data, event_dim=0)
            sizes.append(tuple(batch.shape))
            pyro.sample("y", dist.Normal(loc, 1.0), obs=batch)

    def create_plates(data):
        rows = pyro.plate("from", 10, subsample_size=5, dim=-2)
        with rows as subsample:
            pass
        return rows, pyro.plate("to", 10, subsample=subsample, dim=-1)

    guide = GUIDES[name](model, create_plates=create_plates)
    data = torch.randn(10, 10)
    guide(data)
    sizes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elbo_for(guide).loss(model, guide, data)
    assert set(sizes) == {(5, 5)}


@guides
def test_a_model_that_is_a_module(make):
    class Linear(nn.Linear, PyroModule):
        def __init__(self):
            super().__init__(2, 1)
            self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
            self.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    class Regression(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = Linear()
            self.rate = PyroParam(torch.tensor(1.0), constraints.positive)

        def forward(self, x, *, y=None):
            mean = self.linear(x).squeeze(-1)
            sigma = pyro.sample("sigma", dist.Exponential(self.rate))
            with pyro.plate("rows", len(x)):
                return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    x, y = torch.randn(4, 2), torch.randn(4)
    model = Regression()
    guide = make(model)
    guide(x, y=y)
    assert set(guide.median()) == {"linear.weight", "linear.bias", "sigma"}
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo_for(guide))
    assert math.isfinite(svi.step(x, y=y))
    assert Predictive(model, guide=guide, num_samples=5)(x)["y"].shape == (5, 4)


@guides
def test_guides_in_lists_in_lists(make):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("plate", 2):
            pyro.sample("y", dist.Normal(2.0, 0.1))

    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["x"])))
    guide.append(inner := AutoGuideList(poutine.block(model, expose=["y"])))
    inner.part = make(poutine.block(model, expose=["y"]))
    guide()
    assert inner.part.master() is guide
    assert set(guide.median()) == {"x", "y"}
    assert math.isfinite(SVI(model, guide, Adam({"lr": 0.01}), elbo_for(guide)).step())
    trace = poutine.trace(guide).get_trace()
    assert all(
        name.startswith(("AutoGuideList.0", "AutoGuideList.1.part")) for name in trace.param_nodes
    )


@guides
def test_a_hand_written_part(make):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), torch.eye(5)))

    def part():
        pyro.sample("x", dist.Delta(pyro.param("where", torch.tensor(0.0))))

    guide = AutoGuideList(model)
    guide.append(part)
    guide.append(make(poutine.block(model, expose=["y"])))
    assert set(guide()) == {"y"}
    assert math.isfinite(elbo_for(guide).loss(model, guide))


@guides
def test_reparametrised_models(make):
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("plate", 4):
            pyro.sample("effect", dist.Normal(0.0, scale))
        direction = pyro.sample("direction", dist.ProjectedNormal(torch.ones(3)))
        where = torch.tensor([1.0, 0.0, 0.0])
        pyro.sample("y", dist.Normal(direction, 1.0).to_event(1), obs=where)

    with pytest.raises(ValueError, match="ProjectedNormalReparam"):
        make(model)()
    config = {"effect": LocScaleReparam(), "direction": ProjectedNormalReparam()}
    flat = poutine.reparam(model, config)
    guide = make(flat)
    guide()
    assert set(guide.median()) == {"scale", "effect_decentered", "direction_normal"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pyro's reparametrisation writes in place: no vmap
        assert math.isfinite(elbo_for(guide).loss_and_grads(flat, guide))
    sphere = Predictive(flat, guide=guide, num_samples=4)()["direction"]
    assert_close(sphere.norm(dim=-1), torch.ones(4, *sphere.shape[1:-1]))


@guides
def test_copies_draw_as_the_original(make):
    guide = make(model)
    guide(Y)
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    copies = [copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))]
    copies.append(torch.load(file, weights_only=False))
    fresh = make(model)
    pyro.clear_param_store()
    fresh(Y)
    fresh.load_state_dict(guide.state_dict())
    values, medians = [], []
    for each in (guide, *copies, fresh):
        pyro.set_rng_seed(0)
        values.append(each()["z"])
        medians.append(each.median()["z"])
        pyro.clear_param_store()
    assert all(torch.equal(value, values[0]) for value in values)
    assert all(torch.equal(median, medians[0]) for median in medians)


def normal_rows(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize(
    "make",
    [
        partial(AutoImplicit, frame="mode"),
        partial(AutoImplicit, generator=AutoregressiveGenerator, frame=None),
        mixture,
        partial(AutoAmortized, rest=AutoNormal),
    ],
    ids=["searches", "injective", "mixture", "amortised"],
)
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.filterwarnings("ignore:a copy of a guide has no model")
def test_a_guide_and_its_copies_train_before_and_after_the_first_call(make, is_called):
    y, losses = torch.zeros(2), []
    guide = make(normal_rows)
    if is_called:
        guide(y)
    for each in (guide, copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        losses.append(SVI(normal_rows, each, Adam({}), default_loss(each, 2, y)).step(y))
    assert guide.model is not None
    # Copies have no model after the first call, which default_loss asks for the injective guide.
    assert losses[1] == losses[2] and (is_called or losses[0] == losses[1])
    assert math.isfinite(losses[0])


@guides
def test_module_local_params(make):
    with pyro.settings.context(module_local_params=True):
        first, second = make(model), make(model)
        first(Y), second(Y)
        elbo_for(first).loss(model, first, Y)
        first.median()
        assert len(pyro.get_param_store()) == 0
        shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert not shared
    first()
    names = set(pyro.get_param_store().keys())
    pyro.clear_param_store()
    first()
    assert set(pyro.get_param_store().keys()) == names != set()


@guides
def test_dtypes(make):
    def double():
        pyro.sample("x", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))

    guide = make(double)
    assert guide()["x"].dtype == guide.median()["x"].dtype == torch.float64
    assert {parameter.dtype for parameter in guide.parameters()} == {torch.float64}
    pyro.clear_param_store()
    guide = make(lambda: pyro.sample("x", dist.LogNormal(0.0, 1.0)))
    guide()
    guide.double()
    assert guide()["x"].dtype == guide.quantiles([0.5])["x"].dtype == torch.float64


@guides
def test_freezing(make):
    guide = make(model)
    guide(Y)
    guide.requires_grad_(False)
    assert not guide()["z"].requires_grad


@guides
def test_handlers_around_a_guide(make):
    guide = make(model)
    guide(Y)
    assert poutine.condition(guide, {"scale": torch.tensor(3.0)})()["scale"] == 3.0
    with poutine.mask(mask=False), poutine.scale(scale=0.5):
        guide()
    trace = poutine.trace(guide).get_trace()
    replayed = poutine.trace(poutine.replay(model, trace)).get_trace()
    assert all(
        torch.equal(replayed.nodes[name]["value"], trace.nodes[name]["value"]) for name in SHAPES
    )


@guides
def test_exported_by_tracing(make):
    """``call`` returns a tuple, for the tracer's sake."""
    guide = make(model)
    guide(Y)
    pyro.set_rng_seed(0)
    expected = guide.call()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's own, and torch's that it is deprecated
        torch.jit.save(torch.jit.trace_module(guide, {"call": ()}, check_trace=False), file)
        file.seek(0)
        loaded = torch.jit.load(file)
    pyro.set_rng_seed(0)
    assert_close(loaded.call(), expected)


@guides
def test_models_without_a_guide(make):
    with pytest.raises(ValueError, match="discrete|support"):
        make(lambda: pyro.sample("k", dist.Poisson(1.0)))()


@pytest.mark.parametrize("name", [*OURS, "AutoAmortized"])
def test_numbers_of_draws_are_counts(name):
    def model(x):
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    guide = {**GUIDES, "AutoAmortized": AutoAmortized}[name](model)
    for number, message in ((-5, "at least 1, but got -5"), (2.0, "a whole number")):
        with pytest.raises(ValueError, match=f"num_samples must be {message}"):
            guide.sample_posterior(number, torch.zeros(3))


def test_a_noise_dimension_is_a_count():
    with pytest.raises(ValueError, match="noise_dim must be a whole number"):
        AutoImplicit(model, noise_dim=2.0)
