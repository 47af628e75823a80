# SPDX-License-Identifier: Apache-2.0
"""Which guides know their density exactly."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import InjectiveELBO
from pyro_implicit.density import Target
from pyro_implicit.fitting.candidates import exact_log_weights
from pyro_implicit.generators import MLP, AutoregressiveGenerator, ResidualGenerator
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit
from pyro_implicit.guides.auto_implicit import has_exact_density, why_inexact


def model():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def residual(size):
    return ResidualGenerator(size, core_dim=1)


def mixed(*generators):
    return AutoMixture(model, [AutoImplicit(model, one, frame=None) for one in generators])


KINDS = {
    "gated": (lambda: AutoImplicit(model, frame=None), False),
    "fewer noises": (lambda: AutoImplicit(model, lambda n: MLP(1, n), frame=None), False),
    "semi-implicit": (lambda: AutoSemiImplicit(model, frame=None), False),
    "another's": (lambda: AutoNormal(model), False),
    "injective": (lambda: AutoImplicit(model, AutoregressiveGenerator, frame=None), True),
    "without inverse": (lambda: AutoImplicit(model, residual, frame=None), True),
    "mixture": (lambda: mixed(AutoregressiveGenerator, AutoregressiveGenerator), True),
    "one of them gated": (lambda: mixed(AutoregressiveGenerator, None), False),
    "one of them without inverse": (lambda: mixed(AutoregressiveGenerator, residual), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_guide_is_asked_what_it_is_made_of(name):
    make, is_exact = KINDS[name]
    guide = make()
    guide()
    state = torch.get_rng_state()
    assert has_exact_density(guide) is is_exact
    assert torch.get_rng_state().equal(state)
    if isinstance(guide, AutoImplicit):
        assert ("Cure" in why_inexact(guide)) is not is_exact
    if is_exact:
        draws, log_weights = exact_log_weights(Target(model), guide, 7)
        assert draws.shape == (7, 2) and log_weights.values.isfinite().all()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("generator", [AutoregressiveGenerator, residual])
def test_an_exact_guide_can_be_trained_by_pyros_elbo(generator):
    torch.manual_seed(0)
    guide = AutoImplicit(model, generator, frame=None)
    guide()
    for parameter in guide.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    found, injective = [], InjectiveELBO(1, path_derivative=False)
    injective.loss(model, guide)  # the first step draws more, for checks
    for elbo in (Trace_ELBO(), injective):
        torch.manual_seed(1)
        guide.zero_grad()
        loss = elbo.loss_and_grads(model, guide)
        found.append([torch.tensor(loss), *(p.grad for p in guide.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("double")
def test_an_exact_guide_has_a_density_at_other_values():
    torch.manual_seed(0)
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=None)
    guide()
    value = guide.get_posterior().rsample((5,)).detach()
    explicit = dist.TransformedDistribution(guide.get_base_dist(), guide.get_transform())
    found = []
    for q in (guide.get_posterior(), explicit):
        log_q = q.log_prob(value)
        found.append([log_q, *torch.autograd.grad(log_q.sum(), [*guide.parameters()])])
    torch.testing.assert_close(*found)
