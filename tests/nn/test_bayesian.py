# SPDX-License-Identifier: Apache-2.0
"""Priors on a network's parameters: their density, their names, and what is done with the rest."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_implicit import KIVI_ELBO, LIVI_ELBO, AutoImplicit, AutoSemiImplicit
from pyro_implicit.nn import to_bayesian_


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 3, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 1),
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)).eval()


NETS = {"mlp": (mlp, (3,)), "lenet": (lenet, (1, 10, 10)), "batch_norm": (batch_norm, (3,))}


def regression(net: nn.Module) -> Callable[..., None]:
    def model(x: Tensor, y: Tensor | None = None) -> None:
        mean = net(x).squeeze(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model


def latents(model: Callable, *args: Tensor) -> dict[str, Tensor]:
    trace = poutine.trace(model).get_trace(*args)
    trace.compute_log_prob()
    return {name: site for name, site in trace.iter_stochastic_nodes() if name != "rows"}


def log_normal(value: Tensor, sd: float, mean: float = 0.0) -> Tensor:
    terms = -0.5 * ((value - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)
    return terms.sum()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fan_ins"), [("mlp", [3, 5]), ("lenet", [9, 18, 12])])
def test_default_prior(name: str, fan_ins: list[int]) -> None:
    make, shape = NETS[name]
    net = make().double()
    expected_shapes = {key: value.shape for key, value in net.named_parameters()}
    assert to_bayesian_(net) is net
    sites = latents(net, torch.randn(4, *shape).double())
    assert {key: site["value"].shape for key, site in sites.items()} == expected_shapes
    sds = iter(3 / math.sqrt(fan_in) for fan_in in fan_ins)
    for key, site in sites.items():
        expected = log_normal(site["value"], 1.0 if key.endswith("bias") else next(sds))
        assert site["log_prob"].shape == ()
        torch.testing.assert_close(site["log_prob"], expected, rtol=1e-12, atol=1e-12)


OTHER_LAYERS = [
    (nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": 3 * 18**-0.5, "bias": 1.0}, (1, 4, 5, 5)),
    (nn.Conv1d(4, 6, 3, groups=2), {"weight": 3 * 6**-0.5, "bias": 1.0}, (1, 4, 5)),
    (nn.PReLU(), {"weight": 1.0}, (2, 3)),
    (
        nn.GRU(4, 5),
        {"weight_ih_l0": 1.5, "weight_hh_l0": 3 * 5**-0.5, "bias_ih_l0": 1.0, "bias_hh_l0": 1.0},
        (3, 4),
    ),
]


@pytest.mark.parametrize(("layer", "sds", "shape"), OTHER_LAYERS, ids=lambda x: type(x).__name__)
def test_default_prior_of_other_layers(layer, sds, shape) -> None:
    sites = latents(to_bayesian_(copy.deepcopy(layer)), torch.randn(shape))
    assert sites.keys() == sds.keys()
    for key, sd in sds.items():
        torch.testing.assert_close(sites[key]["log_prob"], log_normal(sites[key]["value"], sd))


def test_default_prior_of_embedding_and_attention() -> None:
    sites = latents(to_bayesian_(nn.Embedding(10, 4)), torch.tensor([1, 2]))
    value = sites["weight"]["value"]
    torch.testing.assert_close(sites["weight"]["log_prob"], log_normal(value, 1.0))

    attention = to_bayesian_(nn.MultiheadAttention(4, 2))
    sites = latents(lambda x: attention(x, x, x), torch.randn(3, 2, 4))
    sds = {"in_proj_weight": 1.5, "in_proj_bias": 1, "out_proj.weight": 1.5, "out_proj.bias": 1}
    assert sites.keys() == sds.keys()
    for key, sd in sds.items():
        torch.testing.assert_close(sites[key]["log_prob"], log_normal(sites[key]["value"], sd))


@pytest.mark.parametrize("prior", [0.3, dist.Normal(0.0, 0.3)], ids=["number", "distribution"])
def test_one_prior_for_all(prior) -> None:
    sites = latents(to_bayesian_(mlp(), prior), torch.randn(4, 3))
    for site in sites.values():
        torch.testing.assert_close(site["log_prob"], log_normal(site["value"], 0.3))


def test_prior_function() -> None:
    means = torch.arange(15.0).reshape(5, 3)

    def prior(name: str, parameter: nn.Parameter) -> dist.TorchDistribution | None:
        assert isinstance(parameter, nn.Parameter)
        return {
            "0.weight": dist.Normal(means, 2.0),
            "0.bias": dist.MultivariateNormal(torch.zeros(5), torch.eye(5)),
            "2.weight": dist.Laplace(0.0, 1.0),
        }.get(name)

    sites = latents(to_bayesian_(mlp(), prior), torch.randn(4, 3))
    assert list(sites) == ["0.weight", "0.bias", "2.weight"]
    values = {name: site["value"] for name, site in sites.items()}
    expected = {
        "0.weight": log_normal(values["0.weight"] - means, 2.0),
        "0.bias": log_normal(values["0.bias"], 1.0),
        "2.weight": -values["2.weight"].abs().sum() - 5 * math.log(2),
    }
    for name, site in sites.items():
        assert site["fn"].event_shape == values[name].shape
        torch.testing.assert_close(site["log_prob"], expected[name])


@pytest.mark.parametrize("name", NETS)
def test_output_is_that_of_the_drawn_weights(name: str) -> None:
    make, shape = NETS[name]
    plain, x = make(), torch.randn(4, *shape)
    net = to_bayesian_(copy.deepcopy(plain))
    trace = poutine.trace(net).get_trace(x)
    values = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}
    expected = torch.func.functional_call(plain, values, x)
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)
    assert not torch.allclose(expected, plain(x))


# --- parameters without a prior -------------------------------------------------------------------


def train(model, x, y, guide=AutoNormal, elbo=None, steps: int = 2) -> list[float]:
    guide = guide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo or Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(steps)]
    assert all(map(math.isfinite, losses))
    return losses


def test_normalization_layers() -> None:
    x, y = torch.randn(4, 3), torch.randn(4)
    net = to_bayesian_(batch_norm())
    assert "1.weight" not in latents(net, x)
    before = net[1].weight.detach().clone()
    train(regression(net), x, y)
    assert not torch.isclose(before, net[1].weight).any()

    net = to_bayesian_(batch_norm(), normalization=True)
    sites = latents(net, x)
    for name, mean in [("1.weight", 1.0), ("1.bias", 0.0)]:
        expected = log_normal(sites[name]["value"], 1.0, mean)
        torch.testing.assert_close(sites[name]["log_prob"], expected)


LAYERS = [nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3, affine=True), nn.RMSNorm(3)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_all_normalization_layers_are_known(layer: nn.Module) -> None:
    layer = copy.deepcopy(layer)
    names = [name for name, _ in layer.named_parameters()]
    assert not latents(to_bayesian_(copy.deepcopy(layer)), torch.randn(2, 3, 3))
    sites = latents(to_bayesian_(layer, normalization=True), torch.randn(2, 3, 3))
    assert sorted(sites) == sorted(names)


def test_gradient_of_a_deterministic_parameter() -> None:
    """It is that of the log-likelihood alone."""
    net = to_bayesian_(mlp(), lambda name, _: dist.Normal(0.0, 1.0) if name < "2" else None)
    x, y = torch.randn(4, 3), torch.randn(4)
    trace = poutine.trace(regression(net)).get_trace(x, y)
    (-trace.log_prob_sum()).backward()
    hidden = (x @ trace.nodes["0.weight"]["value"].T + trace.nodes["0.bias"]["value"]).relu()
    residual = y - (hidden @ net[2].weight.T + net[2].bias).squeeze(-1)
    torch.testing.assert_close(net[2].bias.grad, -residual.sum().reshape(1) / 0.25)
    torch.testing.assert_close(net[2].weight.grad, -(residual @ hidden).reshape(1, -1) / 0.25)


def test_frozen_parameters_keep_their_values() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    keys, before = list(net.state_dict()), copy.deepcopy(net.state_dict())
    to_bayesian_(net)
    x, y = torch.randn(4, 3), torch.randn(4)
    assert list(latents(net, x)) == ["2.weight", "2.bias"]
    train(regression(net), x, y)
    assert list(net.state_dict()) == [key for key in keys if key.startswith("0")]
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        "fan_in",
        "moped",
        0.5,
        dist.Laplace(0.0, 0.5),
        dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(torch.tensor(0.1), 0.5).inv]
        ),
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), torch.tensor([0.1, 1.0]))
        ),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_priors_follow_the_module(prior) -> None:
    if isinstance(prior, dist.Distribution):
        before = prior.sample().dtype
    net = to_bayesian_(mlp(), prior)
    net(torch.randn(4, 3))  # in float32 first
    values = {name: site["value"] for name, site in latents(net, torch.randn(4, 3)).items()}
    in_single = poutine.trace(poutine.condition(net, values)).get_trace(torch.randn(4, 3))
    net.double()
    x = torch.randn(4, 3, dtype=torch.float64)
    assert net(x).dtype == torch.float64
    values = {name: value.double() for name, value in values.items()}
    in_double = poutine.trace(poutine.condition(net, values)).get_trace(x)
    assert in_double.log_prob_sum().dtype == torch.float64
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(in_double.log_prob_sum(), in_single.log_prob_sum().double(), **close)
    with pyro.validation_enabled(False):  # the checks read numbers
        trace = poutine.trace(net.to("meta")).get_trace(torch.empty(4, 3, device="meta"))
    assert trace.nodes["0.bias"]["value"].is_meta
    if isinstance(prior, dist.Distribution):
        assert prior.sample().dtype == before  # the user's own distribution has not moved


def test_copies_and_pickles() -> None:
    net = to_bayesian_(mlp())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        pyro.set_rng_seed(0)
        expected = net(torch.ones(4, 3))
        pyro.set_rng_seed(0)
        assert torch.equal(other(torch.ones(4, 3)), expected)


def test_inside_a_pyro_module() -> None:
    class Model(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = to_bayesian_(mlp())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    assert "net.0.weight" in latents(Model(), torch.randn(4, 3))


# --- errors ---------------------------------------------------------------------------------------


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def with_a_site() -> nn.Module:
    net = PyroModule[nn.Linear](3, 1)
    net.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    return nn.Sequential(nn.Linear(3, 3), net)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))


ERRORS = [
    (tied, "fan_in", ValueError, "'0.weight' and '1.weight' are one tensor.*Cure: untie them"),
    (shared, "fan_in", ValueError, "'0.weight' and '2.weight' are one tensor"),
    (
        with_a_site,
        "fan_in",
        ValueError,
        "submodule '1' has Pyro's sites .*Cure: call to_bayesian_ onc",
    ),
    (lambda: to_bayesian_(nn.Linear(3, 1)), "fan_in", ValueError, r"the module \(PyroLinear\) has"),
    (
        partial(nn.LazyLinear, 1),
        "fan_in",
        ValueError,
        "'weight' has no shape yet.*Cure: run the module",
    ),
    (
        partial(nn.Embedding, 6, 3, padding_idx=0),
        "fan_in",
        ValueError,
        r"the module \(Embedding\) has padding_idx=0.*Cure: padding_idx=None",
    ),
    (spectral, "fan_in", ValueError, "'weight' of layer '0' is parametrised .*Cure: torch.nn.util"),
    (mlp, -1.0, ValueError, "standard deviation above 0, but got -1.0"),
    (mlp, "normal", ValueError, '"fan_in", "hierarchical" or "moped" .*but got \'normal\''),
    (mlp, [1.0], TypeError, "prior must be a number, .*but got list"),
    (mlp, {"fc": 1.0}, ValueError, "names 'fc', which is no layer .*the layers '0', '2'"),
    (mlp, torch.distributions.Normal(0.0, 1.0), TypeError, "'0.weight' must be a distribution of"),
    (mlp, lambda *_: 1.0, TypeError, "'0.weight' must be .* but got builtins.float"),
    (
        mlp,
        dist.Normal(torch.zeros(7), 1.0),
        ValueError,
        r"'0.weight' has batch shape \(7,\).*parameter has shape \(5, 3\). Cure: a distribution of",
    ),
    (mlp, dist.Normal(0.0, 1.0).expand([2]).to_event(1), ValueError, r"event shape \(2,\)"),
]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("make", "prior", "kind", "message"), ERRORS)
def test_errors(make, prior, kind, message) -> None:
    net = make()
    before = [type(part) for part in net.modules()]
    with pytest.raises(kind, match=message):
        to_bayesian_(net, prior)
    assert [type(part) for part in net.modules()] == before


def test_an_embedding_with_padding_may_stay_as_it_is() -> None:
    net = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 1))
    to_bayesian_(net, {"0": None})
    assert list(latents(net, torch.zeros(2, dtype=torch.long))) == ["1.weight", "1.bias"]


# --- with guides ----------------------------------------------------------------------------------


def layerwise(model) -> AutoGuideList:
    guide = AutoGuideList(model)
    for layer in ("0", "2"):
        part = poutine.block(model, expose=[f"{layer}.weight", f"{layer}.bias"])
        guide.append(AutoImplicit(part, frame=None, init_scale=0.01))
    return guide


GUIDES = {
    "AutoNormal": (AutoNormal, Trace_ELBO),
    "AutoSemiImplicit": (partial(AutoSemiImplicit, frame=None), partial(LIVI_ELBO, 4)),
    "layerwise": (layerwise, partial(KIVI_ELBO, 4)),
}


PAIRS = [(name, guide) for name in NETS for guide in ("AutoNormal", "AutoSemiImplicit")]


@pytest.mark.parametrize(("name", "guide"), [*PAIRS, ("mlp", "layerwise")])
def test_guides(name: str, guide: str) -> None:
    """A fall-back of vmap would warn, and warnings are errors."""
    make, shape = NETS[name]
    make_guide, make_elbo = GUIDES[guide]
    model = regression(to_bayesian_(make()))
    x, y = torch.randn(6, *shape), torch.randn(6)
    guide = make_guide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), make_elbo())
    assert all(math.isfinite(svi.step(x, y)) for _ in range(3))
    assert Predictive(model, guide=guide, num_samples=2)(x)["y"].shape == (2, 6)


def test_nuts() -> None:
    model = regression(to_bayesian_(mlp()))
    mcmc = MCMC(NUTS(model), num_samples=2, warmup_steps=2, disable_progbar=True)
    mcmc.run(torch.randn(6, 3), torch.randn(6))
    assert mcmc.get_samples()["0.weight"].shape == (2, 5, 3)
