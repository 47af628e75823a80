# SPDX-License-Identifier: Apache-2.0
"""Guides with discrete sites: the gradients of score functions against sums and quadrature."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit import AutoSemiImplicit, diagnose, fit
from pyro_implicit.infer import (
    KIVI_ELBO,
    LIVI_ELBO,
    SIVI_ELBO,
    ImplicitELBO,
    ImplicitRenyiELBO,
    InjectiveELBO,
)

pytestmark = pytest.mark.usefixtures("double")


Y = torch.tensor(4.0, dtype=torch.float64)


def model():
    x = pyro.sample("x", dist.Normal(0.5, 1.0))
    n = pyro.sample("n", dist.Poisson(x.exp()))
    pyro.sample("y", dist.Normal(n, 2.0), obs=Y)


def guide():
    loc = pyro.param("loc", torch.tensor(0.8))
    rate = pyro.param("rate", torch.tensor(2.5))
    x = pyro.sample("x", dist.Normal(loc, 0.4))
    pyro.sample("n", dist.Poisson(rate + 0.5 * x**2))


def exact_elbo(loc, rate):
    """By Gauss and Hermite's quadrature over x, and a sum over n."""
    nodes = torch.linspace(-8, 8, 801)
    weight = dist.Normal(0.0, 1.0).log_prob(nodes).softmax(0)
    x, n = (loc + 0.4 * nodes).unsqueeze(-1), torch.arange(60.0)
    own = dist.Poisson(rate + 0.5 * x**2).log_prob(n)
    ratio = dist.Normal(0.5, 1.0).log_prob(x) - dist.Normal(loc, 0.4).log_prob(x)
    ratio = ratio + dist.Poisson(x.exp()).log_prob(n) + dist.Normal(n, 2.0).log_prob(Y) - own
    return (weight.unsqueeze(-1) * own.exp() * ratio).sum()


@pytest.mark.parametrize(
    "elbo", [ImplicitELBO, LIVI_ELBO, KIVI_ELBO, SIVI_ELBO, InjectiveELBO], ids=lambda c: c.__name__
)
def test_value_and_gradient(elbo):
    loss, losses, gradients = elbo(num_particles=2000), [], []
    for _ in range(12):
        with poutine.trace(param_only=True) as capture:
            losses.append(-loss.loss_and_grads(model, guide))
        found = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
        gradients.append(-torch.stack([value.grad for value in found]))
        for value in found:
            value.grad = None
    parameters = [pyro.param(name).detach().clone().requires_grad_() for name in ("loc", "rate")]
    value = exact_elbo(*parameters)
    expected = torch.stack(torch.autograd.grad(value, parameters))
    for one, other in (
        (torch.tensor(losses), value.detach()),
        (torch.stack(gradients), expected),
    ):
        error = one.std(0) / len(one) ** 0.5
        assert (error < 0.05).all()
        assert ((one.mean(0) - other).abs() < 6 * error).all()  # of t's distribution


def test_a_renyi_bound_without_a_gradient_is_refused():
    with pytest.raises(NotImplementedError, match="site 'n' .* alpha=0 gives it no gradient.*Cure"):
        ImplicitRenyiELBO(num_particles=8).loss_and_grads(model, guide)
    ImplicitRenyiELBO(alpha=0.5, num_particles=8).loss_and_grads(model, guide)


def test_an_implicit_site_and_a_discrete_site():
    continuous = AutoSemiImplicit(poutine.block(model, hide=["n", "y"]))

    def both():
        x = continuous()["x"]
        n = pyro.sample("n", dist.Poisson(pyro.param("rate", torch.tensor(2.5)) + 0.0 * x))
        return {"x": x, "n": n}

    loss, gradients = LIVI_ELBO(1000), []
    for _ in range(12):
        loss.loss_and_grads(model, both)
        rate = pyro.param("rate")
        gradients.append(-rate.grad.clone())
        rate.grad = None
    x = continuous.sample_posterior(10_000)["x"].unsqueeze(-1)
    own, n = torch.tensor(2.5, requires_grad=True), torch.arange(60.0)
    log_q = dist.Poisson(own).log_prob(n)
    log_p = dist.Poisson(x.exp()).log_prob(n) + dist.Normal(n, 2.0).log_prob(Y)
    (expected,) = torch.autograd.grad((log_q.exp() * (log_p - log_q)).sum(-1).mean(), own)
    found = torch.stack(gradients)
    assert (found.mean() - expected).abs() < 6 * found.std() / len(found) ** 0.5 + 0.05


def test_fit_and_diagnose_a_guide():
    result = fit(model, guide, num_steps=50, num_particles=32, seed=0, progress=False)
    assert result.sample(100)["n"].shape == (100,)

    def prior():
        pyro.sample("n", dist.Poisson(pyro.sample("x", dist.Normal(0.5, 1.0)).exp()))

    def tilted():
        prior()
        x = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 2.0), obs=Y / 4)

    def prior_and_z():
        prior()
        pyro.sample("z", dist.Normal(0.0, 1.0))

    found = diagnose(tilted, prior_and_z, num_samples=500)
    assert found.labels == ("`x`", "`z`", "`n`")
    # The posterior of z has the mean 0.2, that of the others is the prior.
    assert 0.1 < found.importance.mean_error < 0.35 and found.verdict != "trust"
    assert "`z`" in found.findings[0].reason

    def narrow():
        pyro.sample("x", dist.Normal(1.0, 0.02))
        pyro.sample("n", dist.Poisson(20.0))

    assert diagnose(model, narrow, num_samples=500).verdict == "do not trust"
