# SPDX-License-Identifier: Apache-2.0
"""Ensembles as guides: every member climbs by itself, and all uses of draws take the members."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import init_to_mean
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import AutoEnsemble, diagnose, evidence_bound, fit, refine
from pyro_implicit.guides import init_to_shuffled
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.nn import classifier, evaluate, start_values, to_bayesian_

Y = torch.tensor([1.0, 3.0], dtype=torch.double)


def model(y=Y):
    """With a latent on the real line and one above 0, in a plate."""
    loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 2.0))
    with pyro.plate("rows", 2):
        scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    return x, (x.prod(-1) > 0).long()


def network():
    net = to_bayesian_(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    return net, classifier(net, 60)


def test_loss_and_gradient_are_those_of_the_members_densities():
    """In unconstrained space, of normal and log-normal by hand."""
    guide = AutoEnsemble(model, 3)
    guide()
    loss = ImplicitELBO(3).differentiable_loss(model, guide)
    zero = Y.new_zeros(())
    loc, log_scale = guide.members[:, :1], guide.members[:, 1:]
    expected = dist.Normal(zero, 2.0).log_prob(loc) + (
        dist.Normal(zero, 1.0).log_prob(log_scale) + dist.Normal(loc, log_scale.exp()).log_prob(Y)
    ).sum(-1, keepdim=True)
    torch.testing.assert_close(loss, -expected.mean(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, guide.members),
        torch.autograd.grad(-expected.mean(), guide.members),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("particles", [1, 2, 4, 6])
def test_any_number_of_particles_trains_all(particles):
    def bowl():
        pyro.sample("x", dist.Normal(torch.full((2,), 5.0), 1.0).to_event(1))

    guide = AutoEnsemble(bowl, 4)
    svi = SVI(bowl, guide, pyro.optim.Adam({"lr": 0.1}), ImplicitELBO(particles))
    for _ in range(200):
        svi.step()
    torch.testing.assert_close(guide.members, torch.full((4, 2), 5.0), rtol=0, atol=0.3)


def test_pyros_own_elbo_and_vectorised_particles():
    guide = AutoEnsemble(model, 4)
    elbo = Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    expected = ImplicitELBO(4).loss(model, guide)
    assert elbo.loss(model, guide) == pytest.approx(expected, rel=1e-12)


def test_draws_are_different_members():
    guide = AutoEnsemble(model, 5)
    guide()
    members = guide.get_samples()
    assert members["scale"].shape == (5, 2) and (members["scale"] > 0).all()
    drawn = guide.sample_posterior(5)
    torch.testing.assert_close(drawn["loc"].sort().values, members["loc"].sort().values)
    assert len(guide.sample_posterior(12)["loc"].unique()) == 5
    values = Predictive(model, guide=guide, num_samples=10)()["loc"]
    assert set(values.flatten().tolist()) <= set(members["loc"].tolist())


def test_members_of_every_support_and_in_plates():
    def constrained():
        pyro.sample("rows", dist.LKJCholesky(3, 1.0))
        with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 4, dim=-1):
            pyro.sample("mix", dist.Dirichlet(torch.ones(3)))

    guide = AutoEnsemble(constrained, 3)
    with pyro.plate("particles", 6, dim=-3):
        values = guide()
    assert values["rows"].shape == (6, 1, 1, 3, 3) and values["mix"].shape == (6, 2, 4, 3)
    assert values["mix"][:3].equal(values["mix"][3:]) and len(values["mix"].unique(dim=0)) == 3
    found = guide.get_samples()
    assert found["rows"].shape == (3, 3, 3) and found["mix"].shape == (3, 2, 4, 3)
    torch.testing.assert_close(found["mix"].sum(-1), torch.ones(3, 2, 4))
    torch.testing.assert_close(found["rows"].square().sum(-1), torch.ones(3, 3))


def test_saved_and_loaded_in_both_ways(tmp_path):
    guide = AutoEnsemble(model, 3)
    guide()
    members = guide.members.detach().clone()
    state = guide.state_dict()
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    other = AutoEnsemble(model, 3)
    other()
    assert not other.members.equal(members)
    other.load_state_dict(state)
    assert other.get_samples()["loc"].equal(members[:, 0])
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")
    third = AutoEnsemble(model, 3)
    third()
    assert third.get_samples()["loc"].equal(members[:, 0])


def test_networks_in_one_fit_and_what_takes_it():
    """Trained by minibatches from shuffled weights, evaluated, saved, refined."""
    net, labels = network()
    loader = DataLoader(TensorDataset(*data()), 20, shuffle=True)
    guide = AutoEnsemble(labels, 4, init_to_shuffled(start_values(net)))
    guide(*data())
    start = guide.members.detach().clone()
    assert not start[0].equal(start[1])
    torch.testing.assert_close(start[0].sort().values, start[1].sort().values)
    result = fit(labels, guide, batches=loader, epochs=60, lr=0.02, seed=0, progress=False)
    report = evaluate(result, loader)
    assert report.num_samples == 4 and report.accuracy > 0.9
    assert guide.get_samples()["0.weight"].flatten(1).std(0).min() > 0.05  # of several modes
    with pytest.warns(UserWarning, match="ran for only"):  # so few epochs
        refined = refine_by_minibatches(
            labels, result, batches=loader, num_chains=4, max_epochs=3,
            progress=False,
        )  # fmt: skip
    assert refined.frame == "diagonal" and refined.num_chains == 4


def test_refine_takes_what_has_samples():
    guide = AutoEnsemble(model, 12)
    guide()
    refined = refine(model, guide, num_chains=16, max_gradients=200, seed=0, progress=False)
    again = refine(model, refined, num_chains=16, max_gradients=100, seed=0, progress=False)
    assert again.get_samples()["loc"].isfinite().all()


def test_it_claims_no_density():
    guide = AutoEnsemble(model, 3)
    guide()
    with pytest.raises(ValueError, match=r"is a point \(Delta\).*Cure"):
        evidence_bound(model, guide)
    assert diagnose(model, guide).verdict != "trust"


def test_refuses_what_would_be_no_ensemble():
    with pytest.raises(ValueError, match="num_members must be at least 1"):
        AutoEnsemble(model, 0)
    with pytest.raises(ValueError, match=r"have one initial value.*Cure.*init_to_shuffled"):
        AutoEnsemble(model, 3, init_to_mean)()
    with pytest.raises(RuntimeError, match="before its first call"):
        AutoEnsemble(model).get_samples()
    assert AutoEnsemble(model, 1, init_to_mean)()["loc"] == 0


def test_sites_that_have_no_start_begin_in_the_prior():
    start = init_to_shuffled({"loc": torch.tensor(7.0, dtype=torch.double)})
    guide = AutoEnsemble(model, 3, start)
    guide()
    found = guide.get_samples()
    assert (found["loc"] == 7).all() and len(found["scale"].unique()) == 6
