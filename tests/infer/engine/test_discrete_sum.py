# SPDX-License-Identifier: Apache-2.0
"""ELBOs of models with discrete latents, which are summed out."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_implicit import AutoImplicit, AutoSemiImplicit, evidence_bound
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.infer import LIVI_ELBO, InjectiveELBO
from pyro_implicit.infer.implicit_elbo import ImplicitELBO

pytestmark = pytest.mark.usefixtures("double")


Y = torch.tensor([-1.9, 2.2, 1.7, -2.3, 2.0, 1.9], dtype=torch.float64)


def mixture(size=None):
    """``size`` of a minibatch."""
    loc = pyro.sample("loc", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", 6, subsample_size=size) as index:
        z = pyro.sample("z", dist.Bernoulli(0.7))
        pyro.sample("y", dist.Normal((2 * z - 1) * loc, 1.0), obs=Y[index])


def log_likelihood(loc, y=Y):
    """Of each row."""
    parts = [dist.Normal(loc, 1.0).log_prob(y), dist.Normal(-loc, 1.0).log_prob(y)]
    weights = torch.tensor([0.7, 0.3]).log()
    return torch.logsumexp(torch.stack(parts, -1) + weights, -1)


@pytest.mark.parametrize("vectorize", ["vmap", False])
@pytest.mark.parametrize("num_particles", [1, 3])
def test_the_loss_at_a_point(num_particles, vectorize):
    def guide():
        pyro.sample("loc", dist.Delta(torch.tensor(1.5)))

    elbo = ImplicitELBO(num_particles, vectorize_particles=vectorize)
    expected = TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(mixture), guide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert elbo.loss(mixture, guide) == pytest.approx(expected)
    by_hand = dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.5)) + log_likelihood(1.5).sum()
    assert expected == pytest.approx(-by_hand.item())


def test_pyros_plate_refuses_the_sum():
    def guide():
        pyro.sample("loc", dist.LogNormal(0.0, 1.0))

    with pytest.raises(ValueError, match="latents 'z' .*='plate' cannot do this. Cure: vectorize"):
        ImplicitELBO(3, "plate").loss(mixture, guide)
    for vectorize in ("vmap", False):  # the cures
        ImplicitELBO(3, vectorize).loss(mixture, guide)
    TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(mixture), guide)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("vectorize", ["vmap", False])
def test_value_and_gradients_with_an_empty_guide(vectorize, num_particles):
    def model():
        weight = pyro.param("weight", torch.tensor(0.4))
        with pyro.plate("rows", 6):
            z = pyro.sample("z", dist.Bernoulli(weight))
            loc = pyro.param("loc", torch.tensor(1.5))
            pyro.sample("y", dist.Normal((2 * z - 1) * loc, 1.0), obs=Y)

    found = []
    for elbo, one in (
        (ImplicitELBO(num_particles, vectorize), model),
        (TraceEnum_ELBO(max_plate_nesting=1), config_enumerate(model)),
    ):
        loss = elbo.loss_and_grads(one, lambda: None)
        parameters = [value for _, value in pyro.get_param_store().named_parameters()]
        found.append([loss, *(value.grad.item() for value in parameters)])
        pyro.clear_param_store()
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1])


def test_minibatches_are_scaled_outside_of_the_sum():
    seen = []

    def model():
        mixture(size=2)

    def guide():
        with pyro.plate("rows", 6, subsample_size=2) as index:
            seen.append(index)
        pyro.sample("loc", dist.Delta(torch.tensor(1.5)))

    loss = ImplicitELBO(3).loss(model, guide)
    by_hand = dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.5))
    by_hand = by_hand + 3 * log_likelihood(1.5, Y[seen[-1]]).sum()
    assert loss == pytest.approx(-by_hand.item())


def test_weights_of_rows_multiply_the_sum_of_each_row():
    """As a common scale does."""
    weights = torch.arange(1.0, 7.0) / 3

    def model(weights):
        loc = pyro.sample("loc", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 6), poutine.scale(scale=weights):
            z = pyro.sample("z", dist.Bernoulli(0.7))
            pyro.sample("y", dist.Normal((2 * z - 1) * loc, 1.0), obs=Y)

    def guide(weights):
        pyro.sample("loc", dist.Delta(torch.tensor(1.5)))

    prior = dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.5))
    for scale in (weights, torch.full((6,), 2.5), torch.tensor(2.5), 2.5):
        loss = ImplicitELBO(3).loss(model, guide, scale)
        rows = scale * log_likelihood(1.5)
        assert loss == pytest.approx(-(prior + rows.sum()).item(), rel=1e-5)


def test_a_number_and_a_tensor_are_one_scale():
    def model():
        loc = pyro.sample("loc", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 6):
            with poutine.scale(scale=torch.full((6,), 2.0)):
                z = pyro.sample("z", dist.Bernoulli(0.7))
            with poutine.scale(scale=2.0):
                pyro.sample("y", dist.Normal((2 * z - 1) * loc, 1.0), obs=Y)

    loss = ImplicitELBO(2).loss(model, lambda: pyro.sample("loc", dist.Delta(torch.tensor(1.0))))
    prior = dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.0))
    assert loss == pytest.approx(-(prior + 2 * log_likelihood(1.0).sum()).item(), rel=1e-5)


def test_a_choice_for_all_of_a_minibatch_is_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.7))
        with pyro.plate("rows", 6, subsample_size=2) as index:
            pyro.sample("y", dist.Normal(x + z, 1.0), obs=Y[index])

    guide = AutoNormal(poutine.block(model, hide=["z"]))
    with pytest.raises(ValueError, match="'y', 'z'.*different scales.*Cure"):
        ImplicitELBO(2).loss(model, guide)


def log_evidence():
    u = torch.linspace(-6, 4, 4001)  # log loc
    log_p = dist.Normal(0.0, 1.0).log_prob(u) + log_likelihood(u.exp().unsqueeze(-1)).sum(-1)
    return (log_p.logsumexp(0) + (u[1] - u[0]).log()).item()


@pytest.mark.parametrize("couples", [False, True])
def test_elements_that_share_a_term_are_refused(couples):
    """Pyro gives all elements of a plate one value at a time: the sum would be silently wrong."""

    def model():
        bright = pyro.sample("bright", dist.Normal(0.0, 1.0))
        with pyro.plate("pixels", 4):
            x = pyro.sample("x", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(bright * x, 1.0), obs=torch.zeros(4))
        if couples:
            pyro.factor("smooth", (x[..., 1:] == x[..., :-1]).double().sum())

    guide = AutoNormal(poutine.block(model, expose=["bright"]))
    for _ in range(10):  # whatever the values from which elements are moved
        step = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ImplicitELBO(2)).step
        if not couples:
            assert math.isfinite(step())
            continue
        with pytest.raises(ValueError, match="the discrete latent 'x' share a term.*Cure"):
            step()


def test_training():
    guide = AutoImplicit(mixture, AutoregressiveGenerator)
    svi = SVI(mixture, guide, pyro.optim.Adam({"lr": 0.05}), InjectiveELBO(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(80):
            svi.step()
        bound = evidence_bound(mixture, guide, num_samples=200)
    assert bound.value == pytest.approx(log_evidence(), abs=0.1)
    assert "z" not in guide()


@pytest.mark.parametrize(
    "make, elbo",
    [
        (lambda: AutoSemiImplicit(mixture), LIVI_ELBO(2)),
        (lambda: AutoSemiImplicit(mixture), LIVI_ELBO(1)),
        (lambda: AutoNormal(poutine.block(mixture, hide=["z"])), ImplicitELBO(2)),
    ],
)
def test_a_step(make, elbo):
    svi = SVI(mixture, make(), pyro.optim.Adam({"lr": 0.01}), elbo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isfinite(svi.step() + svi.step())


def test_a_guide_with_draws_of_its_own():
    """Of a discrete latent, which is then no sum."""

    def guide():
        pyro.sample("loc", dist.Delta(torch.tensor(1.5)))
        with pyro.plate("rows", 6):
            pyro.sample("z", dist.Bernoulli(torch.ones(6)))

    loss = ImplicitELBO(2).loss(mixture, guide)
    prior = dist.LogNormal(0.0, 1.0).log_prob(torch.tensor(1.5)) + 6 * torch.tensor(0.7).log()
    expected = prior + dist.Normal(1.5, 1.0).log_prob(Y).sum()
    assert loss == pytest.approx(-expected.item())


def test_what_pyro_cannot_enumerate_is_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        k = pyro.sample("k", dist.Poisson(3.0))
        pyro.sample("y", dist.Normal(x + k, 1.0), obs=torch.tensor(1.0))

    guide = AutoDelta(poutine.block(model, hide=["k"]))
    with pytest.raises(ValueError, match=r"site 'k' is a discrete latent \(Poisson\).*Cure"):
        ImplicitELBO(2).loss(model, guide)
