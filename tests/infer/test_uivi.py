# SPDX-License-Identifier: Apache-2.0
"""UIVI: its score and gradient against exact Gaussians, its step size, a posterior recovered."""

from __future__ import annotations

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import SemiImplicit
from pyro_implicit.infer import uivi
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.infer.uivi import UIVI_ELBO
from tests.infer.helpers import check_gradient_of_the_entropy, drawn, gaussian, linear

pytestmark = pytest.mark.usefixtures("double")


def score_of(site: ImplicitSite, **options) -> Tensor:
    """What multiplies the path of each draw."""
    num_particles = site.distribution.batch_shape[0]
    value = site.value.detach().requires_grad_()
    site = ImplicitSite("x", site.distribution, site.noise, value, value)
    log_q = UIVI_ELBO(num_particles, **options).score_parts(site, None).entropy_term
    return torch.autograd.grad(log_q.sum(), value)[0]


@pytest.mark.parametrize("plates", [(), (5,)])
def test_score_is_that_of_the_marginal(plates):
    """Averaged over many draws of z: against the exact score of the same theta."""
    torch.manual_seed(1)
    q = linear(20, *plates)
    site = drawn(q)
    found = score_of(site, num_burnin=20, num_samples=400)
    precision = gaussian(q).precision_matrix
    expected = -((site.value - q.generator.bias) @ precision).detach()
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_score_of_each_plate_element_in_its_own_context():
    """theta = c + z + s eta: the score is (c - theta) / (1 + s^2) with s and c of the element."""
    context = torch.linspace(-3, 3, 5).unsqueeze(-1)
    scale = torch.linspace(0.6, 1.0, 5)
    q = SemiImplicit(lambda z, c: (z + c).squeeze(-1), 1, scale, context)
    site = drawn(q.expand((8, 5)))
    found = score_of(site, num_samples=400)
    expected = (context.squeeze(-1) - site.value) / (1 + scale.square())
    torch.testing.assert_close(found, expected, rtol=0, atol=0.25)


def test_gradient_is_that_of_the_exact_entropy():
    check_gradient_of_the_entropy(UIVI_ELBO(500, num_burnin=10), linear(500), num_unsettled=5)


@pytest.mark.parametrize(("target", "scale"), [(0.6, 1.0), (0.9, 0.02)])
def test_acceptance_adapts_to_the_target(target, scale):
    elbo = UIVI_ELBO(20, target_accept=target)
    q = SemiImplicit(nn.Linear(4, 6), 4, scale).expand((20,))
    rates = []
    for _ in range(40):
        elbo.score_parts(drawn(q), None)
        rates.append(elbo.acceptance["x"])
    assert sum(rates[15:]) / 25 == pytest.approx(target, abs=0.03)
    assert elbo.step_sizes["x"] != ELBOS.initial_step_size


def test_a_step_size_that_diverges_recovers(monkeypatch):
    elbo = UIVI_ELBO(20)
    monkeypatch.setattr(uivi, "ELBOS", replace(ELBOS, initial_step_size=1e6))
    q = SemiImplicit(lambda z: z.sinh(), 3, 0.1).expand((20,))
    for _ in range(20):
        parts = elbo.score_parts(drawn(q), None)
        assert parts.entropy_term.isfinite().all()
    assert elbo.acceptance["x"] > 0.6


def test_value_is_the_surrogate_bound():
    q = linear(200)
    elbo = UIVI_ELBO(200, num_burnin=0, num_samples=1, num_mixing=2000)
    gaps = []
    for _ in range(10):
        site = drawn(q)
        parts = elbo.score_parts(site, None)
        assert parts.log_prob.equal(parts.entropy_term)
        gaps.append((parts.log_prob - gaussian(q).log_prob(site.value)).mean().item())
    assert -0.01 < sum(gaps) / 10 < 0.02


def test_works_without_gradients_and_makes_none():
    site = drawn(linear(6))
    torch.manual_seed(1)
    expected = UIVI_ELBO(6).score_parts(site, None).log_prob
    torch.manual_seed(1)
    with torch.no_grad():
        found = UIVI_ELBO(6).score_parts(site, None).log_prob
    assert expected.requires_grad and not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    assert site.distribution.generator.weight.grad is None


def test_an_evaluation_moves_no_chain():
    elbo, site = UIVI_ELBO(6), drawn(linear(6))
    elbo.score_parts(site, None)
    before = elbo.step_sizes
    with torch.no_grad():
        for _ in range(3):
            elbo.score_parts(site, None)
    assert elbo.step_sizes == before


@pytest.mark.parametrize(
    "noise",
    [
        dist.Normal(torch.ones(2).double(), 1.0),
        dist.Laplace(torch.zeros(2).double(), 1.0),
    ],
)
def test_other_noise_is_refused(noise):
    q = SemiImplicit(nn.Linear(2, 3), noise.to_event(1), 0.5)
    with pytest.raises(ValueError, match="UIVI needs standard normal noise.*site 'x'.*Cure.*=2"):
        UIVI_ELBO(1).check_site(drawn(q))


def test_a_generator_with_dropout_is_refused():
    q = SemiImplicit(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), 2, 0.5)
    with pytest.raises(ValueError, match="site 'x' draws randomness.*Cure"):
        UIVI_ELBO(1).check_site(drawn(q))


@pytest.mark.parametrize(
    "options",
    [
        {"num_burnin": -1},
        {"num_samples": 0},
        {"num_leapfrog": 0},
        {"num_mixing": 0},
        {"target_accept": 1.0},
    ],
)
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        UIVI_ELBO(**options)
