# SPDX-License-Identifier: Apache-2.0
"""Networks as models: their densities, minibatches, and what they refuse."""

from __future__ import annotations

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import fit
from pyro_implicit.density.target import Target
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import classifier, regressor, start_values, to_bayesian_

SEEDED = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, dtype=torch.float64, generator=SEEDED)
LABELS = torch.tensor([0, 1, 1, 0, 2, 1])
NUMBERS = torch.randn(6, dtype=torch.float64, generator=SEEDED)


def net(outputs=1):
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs)
    return to_bayesian_(nn.Sequential(*layers).double())


def trace_of(model, *args):
    trace = poutine.trace(model).get_trace(*args)
    trace.compute_log_prob()
    return trace


def output_of(trace, x=X):
    weights = {name: trace.nodes[name]["value"] for name in ("0.weight", "0.bias")}
    hidden = (x @ weights["0.weight"].T + weights["0.bias"]).relu()
    return hidden @ trace.nodes["2.weight"]["value"].T + trace.nodes["2.bias"]["value"]


def log_normal(y, mean, sd):
    return -0.5 * ((y - mean) / sd) ** 2 - torch.log(sd) - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_density_of_labels(temperature):
    trace = trace_of(classifier(net(3), 60, temperature=temperature), X, LABELS)
    probability = output_of(trace).softmax(-1)[range(6), LABELS]
    expected = 10 / temperature * probability.log().sum()
    torch.testing.assert_close(trace.nodes["y"]["log_prob_sum"], expected)
    assert trace.nodes["0.weight"]["scale"] == 1.0
    sites = [n for n, s in trace.nodes.items() if s["type"] == "sample" and n != "data"]
    assert sites == ["0.weight", "0.bias", "2.weight", "2.bias", "y"]


NOISES = {
    "fixed": (0.3, 1, lambda trace, out: torch.tensor(0.3).double()),
    "learn": ("learn", 1, lambda trace, out: torch.tensor(0.5).double()),
    "gamma": (
        dist.Gamma(2.0, 1.0),
        1,
        lambda trace, out: trace.nodes["precision"]["value"] ** -0.5,
    ),
    "each": ("heteroscedastic", 2, lambda trace, out: nn.functional.softplus(out[:, 1]) + 1e-6),
}


@pytest.mark.parametrize("name", NOISES)
def test_density_of_numbers(name):
    noise, outputs, sd = NOISES[name]
    model = regressor(net(outputs), 60, noise=noise).double()
    trace = trace_of(model, X, NUMBERS)
    output = output_of(trace)
    expected = 10 * log_normal(NUMBERS, output[:, 0], sd(trace, output)).sum()
    torch.testing.assert_close(trace.nodes["y"]["log_prob_sum"], expected)
    if name == "gamma":
        precision = trace.nodes["precision"]
        torch.testing.assert_close(
            precision["log_prob"], precision["value"].log() - precision["value"]
        )
    assert ("log_noise" in trace.nodes) == (name == "learn")


def test_several_targets_and_columns_of_one():
    y = torch.stack([NUMBERS, -NUMBERS], -1)
    trace = trace_of(regressor(net(2), 60, noise=0.3), X, y)
    expected = 10 * log_normal(y, output_of(trace), torch.tensor(0.3).double()).sum()
    torch.testing.assert_close(trace.nodes["y"]["log_prob_sum"], expected)
    model, values = regressor(net(1), 60, noise=0.3), []
    for target in (NUMBERS, NUMBERS.unsqueeze(-1)):
        pyro.set_rng_seed(0)
        values.append(trace_of(model, X, target).nodes["y"]["log_prob_sum"])
    assert torch.equal(*values)


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_minibatches_add_up(kind):
    """The mean of the parts' densities is that of the whole."""
    model = (
        classifier(net(3), 6)
        if kind == "labels"
        else regressor(net(), 6, noise=dist.Gamma(2.0, 1.0))
    )
    y = LABELS if kind == "labels" else NUMBERS
    whole = Target.of_minibatches(model, batch=(X, y))
    assert whole.subsampled is None
    latent = whole.sample_prior(4)
    expected = whole.log_prob(latent)
    found = []
    for rows in ([0, 1], [2, 3], [4, 5]):
        part = Target.of_minibatches(model, batch=(X[rows], y[rows]))
        assert part.subsampled == ("data", 2, 6)
        found.append(part.log_prob(latent))
    torch.testing.assert_close(torch.stack(found).mean(0), expected)


def test_one_set_of_weights_for_all_rows_of_a_particle():
    """Each particle has its own, all rows of a particle the same."""
    model = classifier(net(3), 60)
    guide = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ImplicitELBO(4))
    assert all(math.isfinite(svi.step(X, LABELS)) for _ in range(2))
    drawn = Predictive(model, guide=guide, num_samples=5)(X)
    assert drawn["y"].shape == (5, 6) and drawn["0.weight"].numel() == 5 * 15


@pytest.mark.parametrize("unit", [1e3, 1e-3])
def test_targets_far_from_unit_scale(unit):
    model = regressor(net(), 60, noise="learn").double()
    with pytest.warns(UserWarning, match="root mean square of the targets is .*Cure: .y - y_train"):
        model(X, unit * NUMBERS)
    model(X, unit * NUMBERS)  # said once


def test_learnt_noise_is_learnt():
    model = regressor(net(), 6, noise="learn").double()
    svi = SVI(model, AutoDelta(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(3):
        svi.step(X, 20 * NUMBERS)
    assert model.likelihood.noise > 0.6


def test_starts_are_what_the_network_was():
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    expected = {name: value.detach().clone() for name, value in plain.named_parameters()}
    model = classifier(to_bayesian_(plain), 60)
    values = start_values(model)
    assert values.keys() == expected.keys()
    guide = AutoDelta(model, init_loc_fn=init_to_value(values=values))
    guide(X, LABELS)
    for name, value in guide.median().items():
        torch.testing.assert_close(value, expected[name])
    assert start_values(model.net).keys() == values.keys() and not start_values(nn.Linear(3, 1))
    assert all(value.dtype == torch.float32 for value in start_values(model.float()).values())


def test_priors_by_layer():
    plain = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    prior = {"": None, "1": 0.5, "2": "moped", "2.bias": 3.0}
    trace = trace_of(to_bayesian_(plain, prior), torch.randn(2, 3))
    found = {name: site["fn"].base_dist for name, site in trace.iter_stochastic_nodes()}
    assert list(found) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert torch.equal(found["2.weight"].mean, before["2.weight"])
    for name, sd in {"1.bias": 0.5, "2.weight": 3 * 5**-0.5, "2.bias": 3.0}.items():
        torch.testing.assert_close(found[name].stddev, torch.full_like(before[name], sd))
    trace = trace_of(to_bayesian_(nn.Linear(4, 1), {"bias": 2.0}), torch.randn(2, 4))
    assert (trace.nodes["weight"]["fn"].base_dist.stddev == 1.5).all()


def inside_the_plate(x, y=None):
    with pyro.plate("rows", 60, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(NET(x).squeeze(-1), 1.0), obs=y)


NET = net()


def test_a_network_inside_the_plate_is_refused():
    with pytest.raises(
        ValueError, match="'0.weight' .*inside plate 'rows'.*Cure: call the network"
    ):
        inside_the_plate(X)
    model = classifier(net(3), 60)
    elbo = Trace_ELBO(2, vectorize_particles=True)
    with pytest.raises(ValueError, match="'num_particles_vectorized'.*Cure: vectorize_particles=F"):
        elbo.loss(model, AutoNormal(model), X, LABELS)


def with_layer(layer, training=True):
    layers = nn.Linear(3, 5), layer, nn.Linear(5, 3)
    return to_bayesian_(nn.Sequential(*layers).double().train(training))


CALLS = [
    (lambda: classifier(nn.Linear(3, 2), 60), "Linear. has no priors. Cure: to_bayesian_"),
    (lambda: classifier(net(3), 0), "num_data must be positive, but got 0"),
    (lambda: classifier(net(3), 60, temperature=0.0), "temperature must be positive"),
    (lambda: regressor(net(), 60, noise=-1.0), "noise must be positive, but got -1.0"),
    (lambda: regressor(net(), 60, noise=dist.Gamma(torch.ones(2), 1.0)), "must be of scalars"),
    (lambda: classifier(net(3), 5)(X, LABELS), "6 rows, but num_data is 5, .*Cure"),
    (lambda: classifier(net(1), 60)(X, LABELS), r"shape \(6, 1\). Cure: one output for each"),
    (lambda: classifier(net(3), 60)(X, LABELS[:4]), r"targets have shape \(4,\).*has shape \(6,\)"),
    (lambda: regressor(net(3), 60, noise="heteroscedastic")(X), "a mean and a scale for each"),
    (lambda: classifier(with_layer(nn.BatchNorm1d(5)), 60)(X), "'1', a BatchNorm1d, .*net.eval()"),
    (
        lambda: classifier(with_layer(nn.BatchNorm1d(5, track_running_stats=False), False), 60)(X),
        "'1', a BatchNorm1d, normalises by the moments of the minibatch",
    ),
    (lambda: classifier(with_layer(nn.Dropout(0.1)), 60)(X), "'1', a Dropout, draws noise"),
]


class Returning(nn.Module):
    """A linear layer, and what becomes of its output."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.then = nn.Linear(3, 1).double(), then

    def forward(self, x):
        return self.then(self.layer(x))


OUTPUTS = [
    (lambda out: (out, out), TypeError, "the network returns a tuple, but must return one tensor"),
    (lambda out: out.squeeze(), ValueError, r"for 1 rows has shape \(\), .*squeeze\(-1\) instead"),
    (lambda out: out.mean(0), ValueError, r"for 6 rows has shape \(1,\)"),
]


@pytest.mark.parametrize(("then", "error", "message"), OUTPUTS)
def test_outputs_that_are_none_of_rows(then, error, message):
    x = X[:1] if "1 rows" in message else X
    with pytest.raises(error, match=message):
        regressor(to_bayesian_(Returning(then)), 60, noise=0.1)(x)


@pytest.mark.parametrize(
    "first", [nn.Linear(2, 1), nn.Sequential(nn.Conv1d(2, 1, 1), nn.Flatten())]
)
def test_rows_of_another_dtype(first):
    model = regressor(to_bayesian_(nn.Sequential(first)), 3, noise=1.0)
    x = torch.zeros(3, 2) if isinstance(first, nn.Linear) else torch.zeros(3, 2, 1)
    model(x, torch.zeros(3))
    with pytest.raises(ValueError, match=r"float64 do not suit the network .*Cure: one dtype"):
        model(x.double(), torch.zeros(3))


def test_an_error_of_the_network_is_no_matter_of_dtypes_if_it_has_that_of_the_rows():
    net = nn.Sequential(nn.Linear(2, 1))
    net.register_buffer("unused", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        regressor(to_bayesian_(net), 3, noise=1.0)(torch.zeros(3, 5), torch.zeros(3))


def test_a_loader_in_place_of_rows():
    with pytest.raises(TypeError, match="not a loader of them. Cure: batches=loader"):
        fit(classifier(net(3), 60), "auto", DataLoader(TensorDataset(X, LABELS)))


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_noise():
    with pytest.raises(TypeError, match="a number, \"learn\", .*but got 'gamma'"):
        regressor(net(), 60, noise="gamma")


@pytest.mark.parametrize("layer", [partial(nn.BatchNorm1d, 5), partial(nn.Dropout, 0.5)])
def test_layers_in_evaluation_mode(layer):
    model = classifier(with_layer(layer(), training=False), 6)
    trace = trace_of(model, X, LABELS)
    others = torch.cat([X[:1], X[1:] + 1.0])
    again = trace_of(poutine.replay(model, trace), others, LABELS)
    logits, expected = again.nodes["y"]["fn"].logits, trace.nodes["y"]["fn"].logits
    torch.testing.assert_close(logits[0], expected[0])  # independent of the other rows
    assert not logits[1:].allclose(expected[1:])
