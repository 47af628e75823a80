# SPDX-License-Identifier: Apache-2.0
"""ImplicitELBO(inverse_temperature=b): the ELBO of the b-th power of the model's density."""

from __future__ import annotations

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_value

from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.infer import LIVI_ELBO, ImplicitELBO, InjectiveELBO
from pyro_implicit.infer.engine.traces import NonFiniteError

pytestmark = pytest.mark.usefixtures("double")

BETA = 0.3
Y = torch.tensor([0.5, 2.0, 1.1], dtype=torch.float64)


def free_model():
    """All latents are real: Pyro's own scale says what a tempered model is."""
    loc = pyro.sample("loc", dist.Normal(1.0, 2.0))
    with pyro.plate("rows", 3):
        x = pyro.sample("x", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.Normal(x, 0.5), obs=Y)


def constrained_model():
    """With a positive latent and one in the unit interval."""
    scale = pyro.sample("scale", dist.LogNormal(0.2, 0.7))
    share = pyro.sample("share", dist.Uniform(0.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(share, scale), obs=Y)


def unconstrained_model():
    """The same, in the coordinates in which the guides live: the Jacobians are in the densities."""
    u = pyro.sample("scale", dist.Normal(0.2, 0.7))
    logistic = dist.TransformedDistribution(
        dist.Uniform(0.0, 1.0), [dist.transforms.SigmoidTransform().inv]
    )
    v = pyro.sample("share", logistic)
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(v.sigmoid(), u.exp()), obs=Y)


SCALE, SHARE = torch.tensor([0.8, 0.3], dtype=torch.float64)
CONSTRAINED = {"scale": SCALE, "share": SHARE}
UNCONSTRAINED = {"scale": SCALE.log(), "share": SHARE.logit()}
GUIDES = {
    "AutoNormal": (AutoNormal, ImplicitELBO),
    "AutoMultivariateNormal": (AutoMultivariateNormal, ImplicitELBO),
    "livi": (partial(AutoSemiImplicit, frame=None), LIVI_ELBO),
    "injective": (
        lambda model, **init: AutoImplicit(model, AutoregressiveGenerator, frame=None, **init),
        InjectiveELBO,
    ),
}


def value_and_gradients(elbo, model, make, values):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = make(model, init_loc_fn=init_to_value(values=values))
    guide()
    elbo.loss(model, guide)
    pyro.set_rng_seed(1)
    loss = elbo.differentiable_loss(model, guide)
    parameters = list(guide.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["vmap", "plate", False])
@pytest.mark.parametrize("name", GUIDES)
def test_real_latents(name, mode):
    make, elbo = GUIDES[name]
    values = {"loc": torch.tensor(0.4), "x": torch.tensor([0.1, 1.0, -1.0])}
    options = {"num_particles": 5, "vectorize_particles": mode}
    found = value_and_gradients(elbo(inverse_temperature=BETA, **options), free_model, make, values)
    scaled = poutine.scale(free_model, BETA)
    assert_same(found, value_and_gradients(elbo(**options), scaled, make, values))
    plain = value_and_gradients(elbo(**options), free_model, make, values)
    assert (found[0] - plain[0]).abs() > 0.1  # and that is no empty statement


@pytest.mark.parametrize("name", GUIDES)
def test_constrained_latents_are_tempered_with_their_jacobians(name):
    make, elbo = GUIDES[name]
    found = value_and_gradients(
        elbo(5, inverse_temperature=BETA), constrained_model, make, CONSTRAINED
    )
    scaled = poutine.scale(unconstrained_model, BETA)
    assert_same(found, value_and_gradients(elbo(5), scaled, make, UNCONSTRAINED))


def test_by_hand():
    """One site without Jacobian, one draw: b log p - log q."""
    guide = AutoNormal(constrained_model, init_loc_fn=init_to_value(values=CONSTRAINED))
    guide()
    elbo = ImplicitELBO(inverse_temperature=BETA)
    elbo.loss(constrained_model, guide)
    pyro.set_rng_seed(4)
    found = elbo.loss(constrained_model, guide)
    pyro.set_rng_seed(4)
    draw = guide()
    u, v = draw["scale"].log(), draw["share"].logit()
    log_p = dist.Normal(0.2, 0.7).log_prob(u) + v.sigmoid().log() + (-v).sigmoid().log()
    log_p = log_p + dist.Normal(draw["share"], draw["scale"]).log_prob(Y).sum()
    log_q = dist.Normal(UNCONSTRAINED["scale"], 0.1).log_prob(u)
    log_q = log_q + dist.Normal(UNCONSTRAINED["share"], 0.1).log_prob(v)
    assert found == pytest.approx((log_q - BETA * log_p).item(), rel=1e-10)


def test_it_combines_with_the_weight_of_the_prior():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))

    def by_hand():
        with poutine.scale(scale=0.25 * 0.5):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with poutine.scale(scale=0.25):
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))

    values = {"x": torch.tensor(0.7)}
    found = value_and_gradients(
        ImplicitELBO(3, inverse_temperature=0.25, prior_weight=0.5), model, AutoNormal, values
    )
    assert_same(found, value_and_gradients(ImplicitELBO(3), by_hand, AutoNormal, values))


def standard_normal():
    pyro.sample("x", dist.Normal(0.0, 1.0))


def test_a_quarter_doubles_the_sd():
    """N(0, 1)^b is a N(0, 1/b): there the gradient is zero at every draw, once a first step has
    shown that it may take the path alone."""
    for scale, is_optimal in [(2.0, True), (1.0, False), (0.5, False)]:
        pyro.clear_param_store()
        guide = AutoImplicit(
            standard_normal,
            AutoregressiveGenerator,
            frame=None,
            init_scale=scale,
            init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}),
        )
        guide()
        elbo = InjectiveELBO(6, inverse_temperature=0.25)
        elbo.differentiable_loss(standard_normal, guide).backward()
        loss = elbo.differentiable_loss(standard_normal, guide)
        gradients = torch.autograd.grad(loss, list(guide.parameters()), allow_unused=True)
        largest = max(g.abs().max().item() for g in gradients if g is not None)
        assert (largest < 1e-9) == is_optimal
        if is_optimal:
            # Minus the log-integral of N(0, 1)^b
            expected = 0.25 * 0.5 * math.log(2 * math.pi) - 0.5 * math.log(2 * math.pi * 4)
            assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_it_may_change_between_steps():
    values = {"loc": torch.tensor(0.4), "x": torch.tensor([0.1, 1.0, -1.0])}
    elbo = ImplicitELBO(5)
    plain = value_and_gradients(elbo, free_model, AutoNormal, values)
    elbo.inverse_temperature = BETA
    tempered = value_and_gradients(elbo, free_model, AutoNormal, values)
    expected = value_and_gradients(
        ImplicitELBO(5, inverse_temperature=BETA), free_model, AutoNormal, values
    )
    assert_same(tempered, expected)
    elbo.inverse_temperature = 1.0
    assert_same(plain, value_and_gradients(elbo, free_model, AutoNormal, values))


def test_entropy_and_prior_are_weighed_in_the_loop_too():
    values = {"loc": torch.tensor(0.4), "x": torch.tensor([0.1, 1.0, -1.0])}
    weights = {"prior_weight": 0.5, "entropy_weight": 2.0}
    found = [
        value_and_gradients(ImplicitELBO(1, vectorize_particles=mode, **weights),
                            free_model, AutoNormal, values)
        for mode in ("vmap", False)
    ]  # fmt: skip
    assert_same(*found)


@pytest.mark.parametrize("mode", ["vmap", False])
def test_terms_that_are_not_finite_are_named_in_the_loop_too(mode):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("wall", torch.where(x < 100, -math.inf, 0.0))

    guide = AutoNormal(model, init_loc_fn=init_to_value(values={"x": torch.tensor(200.0)}))
    guide()
    with torch.no_grad():
        guide.locs.x.fill_(0.0)
    with pytest.raises(NonFiniteError, match="wall"):
        ImplicitELBO(3, vectorize_particles=mode).differentiable_loss(model, guide)
    elbo = ImplicitELBO(3, vectorize_particles=mode, nonfinite="skip")
    assert math.isnan(elbo.differentiable_loss(model, guide).item()) and elbo.num_skipped == 1
