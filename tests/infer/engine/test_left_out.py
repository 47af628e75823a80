# SPDX-License-Identifier: Apache-2.0
"""Particles at which the model has no density are left out of a step."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, init_to_median

from pyro_implicit import AutoImplicit, AutoSemiImplicit, evidence_bound
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.infer import LIVI_ELBO, ImplicitELBO, InjectiveELBO, NonFiniteError

pytestmark = pytest.mark.usefixtures("double")


def by_factor(x):
    pyro.factor("wall", torch.where(x > 0, 0.0, -math.inf))


def by_cholesky(x):
    pyro.sample("f", dist.MultivariateNormal(torch.zeros(2), x * torch.eye(2)), obs=torch.zeros(2))


def by_scale(x):
    """Neither the value nor the gradient is a number."""
    pyro.sample("f", dist.Normal(0.0, ((x + x.abs()) / 2).sqrt()), obs=torch.tensor(0.0))


def by_error(x):
    if x < 0:
        raise ValueError("x is negative")
    pyro.factor("f", -x)


def model_of(part):
    def model():
        part(pyro.sample("x", dist.Normal(1.0, 1.0)))

    return model


PARTS = [by_factor, by_cholesky, by_scale, by_error]


@pytest.mark.parametrize("part", PARTS)
def test_value_and_gradient_are_those_of_the_others(part):
    model, guide = model_of(part), AutoNormal(model_of(by_factor), init_scale=1.0)
    elbo = ImplicitELBO(8)
    elbo.state.runs.error = ValueError("of an earlier step")
    pyro.set_rng_seed(2)
    guide()
    raised = "; the model raised ValueError: x is negative" if part is by_error else ""
    message = rf"no density at . of 8 particles, .*left out \(.*{raised}\)\. .*Cure"
    with pytest.warns(UserWarning, match=message) as told:
        pyro.set_rng_seed(3)
        elbo.differentiable_loss(model, guide)
    assert not any("of an earlier step" in str(one.message) for one in told)
    pyro.set_rng_seed(4)
    loss = elbo.differentiable_loss(model, guide)  # with no further warning
    params = [guide.locs.x_unconstrained, guide.scales.x_unconstrained]
    found = torch.autograd.grad(loss, params)
    loc, scale = guide.locs.x, guide.scales.x
    # By hand, from the same draws.
    pyro.set_rng_seed(4)
    x = dist.Normal(loc, scale).expand([8]).rsample()
    x = x[x > 0]
    assert 0 < len(x) < 8
    log_p = dist.Normal(1.0, 1.0).log_prob(x)
    if part is by_error:
        log_p = log_p - x
    elif part is by_cholesky:
        log_p = log_p - math.log(2 * math.pi) - x.log()
    elif part is by_scale:
        log_p = log_p - 0.5 * math.log(2 * math.pi) - 0.5 * x.log()
    expected = -(log_p - dist.Normal(loc, scale).log_prob(x)).mean()
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(found, torch.autograd.grad(expected, params))


@pytest.mark.parametrize("vectorize", ["vmap", False])
@pytest.mark.parametrize("part", PARTS)
def test_implicit_guides_go_on(part, vectorize):
    model = model_of(part)
    guides = [
        (
            AutoSemiImplicit(model, frame=None, init_scale=1.0),
            LIVI_ELBO(6, vectorize_particles=vectorize),
        ),
        (
            AutoImplicit(model, AutoregressiveGenerator, frame=None, init_scale=1.0),
            InjectiveELBO(6, coverage=1.0, vectorize_particles=vectorize),
        ),
    ]
    for guide, elbo in guides:
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                assert math.isfinite(svi.step())
        assert 0 < elbo.num_left_out < 48 and elbo.num_skipped == 0


def test_none_is_left():
    def model():
        x = pyro.sample("x", dist.Normal(1.0, 1.0))
        pyro.factor("wall", torch.where(x > 1e3, 0.0, -math.inf))

    guide = AutoSemiImplicit(model, frame=None)
    with pytest.raises(NonFiniteError, match="log-probability of site 'wall' is -inf"):
        LIVI_ELBO(4).loss(model, guide)


def test_the_first_run_survives_an_impossible_draw():
    model = model_of(by_cholesky)
    for seed in range(6):
        pyro.set_rng_seed(seed)
        guide = AutoNormal(model, init_loc_fn=init_to_median, init_scale=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert math.isfinite(ImplicitELBO(16).loss(model, guide))


def test_the_bound_counts_them():
    """As draws of no weight: it is -inf, and does not die."""
    model = model_of(by_scale)
    guide = AutoNormal(model, init_loc_fn=init_to_median, init_scale=1.0)
    bound = evidence_bound(model, guide, num_samples=100)
    assert bound.value == -math.inf and 10 < bound.effective_sample_size < 99
