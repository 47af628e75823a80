# SPDX-License-Identifier: Apache-2.0
"""Networks that model and guide register by ``pyro.module``: a loaded result has their values."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import fit
from pyro_implicit.fitting import Fit

X = torch.linspace(-1.0, 1.0, 40)[:, None]
NETS = {"encoder": nn.Linear(1, 2)}
enc, dec, twin = nn.Linear(1, 2), nn.Linear(1, 1), nn.Linear(1, 1)
QUICK = {"batches": X.split(10), "epochs": 2, "lr": 0.1, "seed": 0, "progress": False}


@pytest.fixture(autouse=True)
def _new_networks():
    begin_another_process()


def begin_another_process():
    pyro.clear_param_store()
    for net in (enc, dec, twin):
        net.reset_parameters()


def model(x):
    pyro.module("dec", dec)
    with pyro.plate("rows", 40, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        twin(z)  # of the same shapes as the registered one
        pyro.sample("x", dist.Normal(dec(z), 0.5).to_event(1), obs=x)


def guide(x):
    pyro.module("encoder", enc)  # the only network of its shapes needs no name
    with pyro.plate("rows", 40, subsample_size=len(x)):
        loc, log_scale = enc(x).chunk(2, -1)
        pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def hidden_guide(x):
    net = pyro.module("encoder", NETS["encoder"])
    with pyro.plate("rows", 40, subsample_size=len(x)):
        loc, log_scale = net(x).chunk(2, -1)
        pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def values(*nets):
    return [value.detach().clone() for net in nets for value in net.parameters()]


def draws(result):
    pyro.set_rng_seed(0)
    return result.sample(5, X)["z"]


def test_a_loaded_result_computes_with_the_learnt_networks(tmp_path):
    result = fit(model, guide, **QUICK)
    learnt, expected = values(enc, dec), draws(result)
    result.save(tmp_path / "fit.pt")
    begin_another_process()
    own = values(twin)
    loaded = Fit.load(tmp_path / "fit.pt", model)
    assert all(map(torch.equal, values(enc, dec), learnt))
    assert all(map(torch.equal, values(twin), own))
    assert torch.equal(draws(loaded), expected)
    model(X), guide(X)
    store = pyro.get_param_store()
    assert store["dec$$$weight"].unconstrained() is dec.weight  # further training reaches the net


def test_a_result_keeps_its_networks_after_another_fit():
    first = fit(model, guide, **QUICK)
    expected = draws(first)
    begin_another_process()
    second = fit(model, guide, **QUICK)
    changed, others = values(enc, dec), draws(second)
    assert not torch.equal(others, expected)
    pyro.clear_param_store()
    assert torch.equal(draws(first), expected)
    assert all(map(torch.equal, values(enc, dec), changed))
    assert torch.equal(draws(second), others)


def test_a_network_that_is_not_found_is_named(tmp_path):
    fit(model, hidden_guide, **QUICK).save(tmp_path / "fit.pt")
    begin_another_process()
    with pytest.warns(UserWarning, match="registers as 'encoder' was not found.*Cure"):
        Fit.load(tmp_path / "fit.pt", model)
