# SPDX-License-Identifier: Apache-2.0
"""Several networks in one process: none touches another, and each is saved with all it learnt."""

from __future__ import annotations

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import nn

from pyro_implicit import fit
from pyro_implicit.fitting import Fit, stages
from pyro_implicit.nn import evaluate, regressor, start_values, to_bayesian_

HEAD_ALONE = {"": None, "2": "fan_in"}


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 1, generator=generator)
    y = torch.sin((2 + seed) * x[:, 0]) + 0.1 * torch.randn(60, generator=generator)
    return [(x[part], y[part]) for part in torch.arange(60).split(20)]


def network(seed=0, units=60):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1))


def learning_noise(seed=0):
    return regressor(to_bayesian_(network(seed)), 60, noise="learn")


def with_backbone(seed=0, units=60):
    return regressor(to_bayesian_(network(seed, units), HEAD_ALONE), 60, noise=0.1)


def by_hand(seed=0):
    """The recipe of the docs, whose network is found through the function's closure."""
    net = to_bayesian_(network(seed), HEAD_ALONE)

    def model(x, y=None):
        mean = net(x).squeeze(-1)
        noise = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


MODELS = {"noise": learning_noise, "backbone": with_backbone, "by hand": by_hand}


def fitted(model, seed=0, **options):
    options = {"epochs": 4, "lr": 0.03, "seed": 0, "progress": False, **options}
    return fit(model, "auto", batches=rows(seed), **options)


def score(result, seed=0):
    pyro.set_rng_seed(0)
    return evaluate(result, rows(seed), num_samples=20).log_likelihood


@pytest.mark.parametrize("name", ["noise", "backbone"])
def test_a_second_one_learns_and_leaves_the_first_alone(name):
    models = [MODELS[name](seed) for seed in range(2)]
    first = fitted(models[0])
    before = score(first)
    started = {n: p.detach().clone() for n, p in models[1].named_parameters()}
    assert started
    second = fitted(models[1], seed=1)
    for n, p in models[1].named_parameters():
        assert not torch.equal(p, started[n]), f"{n} of the second network was not trained"
    assert score(first) == before
    alone = MODELS[name](1)
    pyro.clear_param_store()
    assert fitted(alone, seed=1).losses == second.losses


def test_a_second_one_by_hand_learns():
    fitted(by_hand(0))
    model = by_hand(1)
    net = model.__closure__[0].cell_contents
    backbone = net[0].weight.detach().clone()
    fitted(model, seed=1)
    assert not torch.equal(net[0].weight, backbone)


def test_a_fit_repeats_and_leaves_the_starts_alone():
    plain = network()
    drawn = copy.deepcopy(plain.state_dict())
    model = regressor(to_bayesian_(plain), 60, noise=0.1)
    first = fitted(model)
    values = first.guide.median()
    again = fitted(model)
    assert again.losses == first.losses
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=start_values(model)))
    fit(model, guide, batches=rows(), epochs=2, progress=False)
    assert all(torch.equal(values[n], v) for n, v in first.guide.median().items())
    assert all(torch.equal(start_values(model)[n], v) for n, v in drawn.items())


@pytest.mark.parametrize("name", MODELS)
def test_loaded_in_another_process_it_predicts_the_same(name, tmp_path):
    result = fitted(MODELS[name]())
    expected = score(result)
    result.save(tmp_path / "fit.pt")
    pyro.clear_param_store()
    other = MODELS[name](seed=5)
    assert score(Fit(guide=result.guide, source=(other, (), {}))) != expected
    assert score(Fit.load(tmp_path / "fit.pt", other)) == expected


@pytest.mark.parametrize("failures", [3, 100])
def test_a_model_that_fails_at_some_draws_loses_no_fit(failures, monkeypatch):
    calls, read = [], stages.learnt_parameters

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) <= failures:
            raise torch.linalg.LinAlgError("singular")
        return read(*args, **kwargs)

    monkeypatch.setattr(stages, "learnt_parameters", failing)
    result = fitted(with_backbone(), epochs=1)
    assert len(result.losses) == 3 and bool(result.parameters) == (failures == 3)


def test_parameters_of_other_shapes_are_refused(tmp_path):
    fitted(with_backbone()).save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match=r"parameter '0.weight' has shape \(7, 1\), .*\(60, 1\)"):
        Fit.load(tmp_path / "fit.pt", with_backbone(units=7))


def test_a_guide_that_is_a_function_is_saved_with_its_parameters(tmp_path):
    result = fit(coin, guide_of_coin, num_steps=20, seed=0, progress=False)
    learnt = pyro.param("loc").item()
    assert learnt != 0
    result.save(tmp_path / "fit.pt")
    pyro.clear_param_store()
    Fit.load(tmp_path / "fit.pt", coin)
    assert pyro.param("loc").item() == learnt


def coin():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))


def guide_of_coin():
    pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
