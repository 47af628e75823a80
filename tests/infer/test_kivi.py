# SPDX-License-Identifier: Apache-2.0
"""KIVI_ELBO: its draws and its value on Gaussians; see test_entropy_of_draws, too."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import KIVI_ELBO, MLP, Implicit, SemiImplicit
from pyro_implicit.ops import adaptive_log_density
from tests.infer.helpers import drawn, entropy_of, fit

pytestmark = pytest.mark.usefixtures("double")


def test_score_parts_is_the_equation():
    """With as many particles as wanted, no other draws than the model's are looked at."""
    site = drawn(Implicit(MLP(3, 2), 3).expand([6]))
    elbo = KIVI_ELBO(6, num_entropy_particles=6, num_prior_particles=9, ridge=0.1)
    pyro.set_rng_seed(1)
    parts = elbo.score_parts(site, None)
    pyro.set_rng_seed(1)
    expected = adaptive_log_density(site.value, torch.randn(9, 2), "full", ridge=0.1).mean()
    torch.testing.assert_close(parts.log_prob, expected.expand(6))
    assert parts.entropy_term.equal(parts.log_prob)
    assert parts.score_function == 0


@pytest.mark.parametrize("semi", [False, True])
def test_each_particle_may_have_its_own_distribution(semi):
    scales = torch.tensor([[0.1], [1.0], [10.0], [100.0]])
    noise = dist.Normal(torch.zeros(4, 1), 1.0).to_event(1)
    if semi:
        q = SemiImplicit(lambda z: 0.0 * z, noise, scales)
    else:
        q = Implicit(lambda z, c: c * z, 1, context=scales)
    pyro.set_rng_seed(0)
    log_q = KIVI_ELBO(4, 1000).score_parts(drawn(q), None).log_prob
    for found, scale in zip(log_q, scales, strict=True):
        assert -found.item() == pytest.approx(entropy_of(scale.item()), abs=0.15)


def test_flat_prior_needs_no_prior_draws():
    """Beside an explicit Gamma posterior of the precision, whose prior is Gamma(6, 6)."""
    y = torch.tensor([1.0, 2.0, 3.0, 2.5, 1.5])

    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        mean = pyro.sample("mean", flat)
        precision = pyro.sample("precision", dist.Gamma(6.0, 6.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Normal(mean, precision.rsqrt()), obs=y)

    generator = MLP(2, 1)

    def guide():
        pyro.module("generator", generator)
        positive = dist.constraints.positive
        shape = pyro.param("shape", torch.tensor(6.0), constraint=positive)
        rate = pyro.param("rate", torch.tensor(6.0), constraint=positive)
        mean = pyro.sample("mean", Implicit(lambda z: generator(z).squeeze(-1), 2))
        return {"mean": mean, "precision": pyro.sample("precision", dist.Gamma(shape, rate))}

    pyro.set_rng_seed(0)
    draws = fit(
        model, guide, KIVI_ELBO(16, vectorize_particles="plate", compile="trace"), 500, lr=0.03
    )
    assert draws["mean"].mean().item() == pytest.approx(2.0, abs=0.15)
    # Mean field: sd of the mean (5 E[precision])^-1/2, precision Gamma(8.5, 7.25 + 1 / 2E[p])
    precision = draws["precision"].mean().item()
    assert precision == pytest.approx(8 / 7.25, abs=0.12)
    assert draws["mean"].std().item() == pytest.approx((5 * precision) ** -0.5, rel=0.2)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_entropy_particles": 1}, "num_entropy_particles must be at least 2"),
        ({"num_prior_particles": 0}, "num_prior_particles must be at least 1"),
        ({"ridge": 0.0}, "ridge must be positive"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"kernel": "laplace"}, "kernel must be one of .* or a function"),
        ({"contrast": "both"}, 'contrast must be "adaptive" or "prior"'),
        ({"direction": "both"}, 'direction must be "forward" or "reverse"'),
        ({"covariance": "low-rank"}, 'covariance must be "auto", "diagonal" or "full"'),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        KIVI_ELBO(**kwargs)
