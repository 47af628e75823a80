# SPDX-License-Identifier: Apache-2.0
"""Layers of hand-written networks: in training mode, or frozen."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import nn

from pyro_implicit import fit
from pyro_implicit.fitting import Fit
from pyro_implicit.nn import to_bayesian_

X = torch.linspace(-2.0, 2.0, 40)[:, None]
Y = torch.tanh(X[:, 0])
BATCHES = list(zip(X.split(10), Y.split(10), strict=True))
QUIET = {"seed": 0, "progress": False}
LAYERS = [
    (nn.BatchNorm1d(1), "a BatchNorm1d, normalises by the moments"),
    (nn.Dropout(0.3), "a Dropout, draws noise"),
]


class Net(PyroModule):
    """A deterministic layer, and a last layer with priors."""

    def __init__(self, first, converted=False):
        super().__init__()
        self.first, self.last = first, PyroModule[nn.Linear](1, 1)
        self.last.weight = PyroSample(dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
        self.last.bias = PyroSample(dist.Normal(torch.zeros(1), 1.0).to_event(1))
        if converted:
            to_pyro_module_(self.first)

    def forward(self, x, y=None):
        mean = self.last(self.first(x)).squeeze(-1)
        with pyro.plate("rows", 40, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


@pytest.mark.parametrize("layer, fault", LAYERS)
def test_layers_in_training_mode_are_refused_in_a_pyro_module(layer, fault):
    net = Net(layer)
    with pytest.raises(ValueError, match=f"layer 'first', {fault}.*Cure: net.eval"):
        fit(net, "auto", batches=BATCHES, **QUIET)
    if isinstance(layer, nn.BatchNorm1d):
        assert layer.num_batches_tracked == 0
    fit(net.eval(), AutoNormal(net), batches=BATCHES, epochs=1, **QUIET)


@pytest.mark.parametrize("layer, fault", LAYERS)
def test_layers_in_training_mode_are_refused_in_a_function(layer, fault):
    net = to_bayesian_(nn.Sequential(nn.Linear(1, 1), layer, nn.Linear(1, 1))).train()

    def model(x, y):
        mean = net(x).squeeze(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    with pytest.raises(ValueError, match=f"layer '1', {fault}.*Cure: net.eval"):
        fit(model, AutoNormal(model), X, Y, **QUIET)


def test_networks_without_priors_and_encoders_may_be_in_training_mode():
    """An autoencoder whose decoder has priors, and an encoder with batch normalisation."""
    encoder = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    class Autoencoder(PyroModule):
        def __init__(self):
            super().__init__()
            self.encoder, self.shift = encoder, nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
            self.decoder = to_bayesian_(nn.Linear(1, 1))

        def forward(self, x):
            decoder = self.decoder
            weight, bias = decoder.weight, decoder.bias
            with pyro.plate("rows", 40, subsample_size=len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(z * weight + bias, 0.5).to_event(1), obs=x)

    model = Autoencoder()
    globals_ = AutoNormal(pyro.poutine.block(model, hide=["z", "x", "rows"]))

    def guide(x):
        globals_(x)
        pyro.module("encoder", encoder)
        loc, log_scale = encoder(x).chunk(2, -1)
        with pyro.plate("rows", 40, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    batches = [(x,) for x in X.split(10)]
    assert len(fit(model, guide, batches=batches, epochs=1, **QUIET).losses) == 4
    assert encoder[1].num_batches_tracked > 0


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("options", [{"batches": BATCHES, "epochs": 1}, {"num_steps": 20}])
def test_frozen_layers_stay_as_they_are(converted, options):
    net = Net(nn.Linear(1, 1).requires_grad_(False), converted)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    data = () if "batches" in options else (X, Y)
    result = fit(net, "auto", *data, **options, **QUIET)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert not any(value.requires_grad for value in net.first.parameters())
    assert result.parameters == {}


def test_only_the_other_layers_are_trained():
    first = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    net = Net(first, converted=True)
    frozen, free = (layer.weight.detach().clone() for layer in first)
    result = fit(net, AutoNormal(net), batches=BATCHES, epochs=20, **QUIET)
    assert torch.equal(first[0].weight, frozen) and not torch.equal(first[1].weight, free)
    assert sorted(result.parameters) == ["first.1.bias", "first.1.weight"]


def test_frozen_layers_of_functions_are_silent():
    first = nn.Linear(1, 1).requires_grad_(False)

    def model(x, y):
        pyro.module("first", first)
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(slope * first(x)[:, 0], 0.1), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            fit(model, "auto", X, Y, num_steps=10, **QUIET)
    assert not [one for one in caught if "not registered" in str(one.message)]


def test_a_converted_layer_is_restored_before_its_first_run(tmp_path):
    net = Net(nn.Linear(1, 1), converted=True)
    fit(net, AutoNormal(net), batches=BATCHES, epochs=1, **QUIET).save(tmp_path / "fit.pt")
    pyro.clear_param_store()
    new = Net(nn.Linear(1, 1), converted=True)
    Fit.load(tmp_path / "fit.pt", new)
    assert torch.equal(new.first.weight, net.first.weight)
    new(X)
    assert torch.equal(new.first.weight, net.first.weight)
