# SPDX-License-Identifier: Apache-2.0
"""ELBOs that see an entropy in draws alone: which draws they look at, and posteriors they find."""

from __future__ import annotations

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit, Implicit
from pyro_implicit.infer.estimated_score import ScoreELBO
from tests.infer.helpers import drawn, entropy_of, fit

ELBOS = {
    "KIVI": KIVI_ELBO,
    "spectral": lambda num_particles, **options: ScoreELBO(num_particles, "spectral", **options),
    "stein": lambda num_particles, **options: ScoreELBO(num_particles, "stein", **options),
}
pytestmark = pytest.mark.usefixtures("double")
every_elbo = pytest.mark.parametrize("name", ELBOS)


@every_elbo
def test_one_likelihood_particle_against_many_of_the_entropy(name):
    """The model runs once; the entropy's gradient is nearly free of noise all the same."""
    runs = []

    def model():
        runs.append(pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1)))

    generator = nn.Linear(2, 2, bias=False)
    generator.weight.data = torch.diag(torch.tensor([0.5, 2.0]))

    def guide():
        pyro.sample("x", Implicit(generator, 2))

    elbo = ELBOS[name](1, prior_weight=0.0)
    elbo.differentiable_loss(model, guide)
    runs.clear()
    loss = elbo.differentiable_loss(model, guide)
    assert [x.shape for x in runs] == [(2,)]
    assert -loss.item() == pytest.approx(entropy_of(1.0, 2), abs=0.35)
    loss.backward()
    gradient = generator.weight.grad.diagonal()  # that of minus the entropy's log-determinant
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -0.5]), rtol=0.2, atol=0)


@every_elbo
def test_particles_that_depend_on_other_latents_are_not_pooled(name):
    """z has the spread 0.1 around a w of spread 5: pooled, its entropy would be w's."""

    def model():
        pyro.sample("w", dist.Normal(0.0, 5.0).expand([1]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def guide():
        w = pyro.sample("w", dist.Normal(0.0, 5.0).expand([1]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("z", Implicit(lambda z, w: w + 0.1 * z, 1, context=w))

    elbo = ELBOS[name](10, prior_weight=0.0)
    elbo.loss(model, guide)
    expected = entropy_of(5.0) + 3 * entropy_of(0.1)
    assert -elbo.loss(model, guide) == pytest.approx(expected, abs=1.5)  # w's is a mean of ten


@every_elbo
def test_local_latents_have_an_estimate_each(name):
    """One encoder, three data points, a subsample of two: the plate's scale reaches the entropy."""
    scales = torch.tensor([[0.1], [1.0], [4.0]])

    def model(rows):
        with pyro.plate("data", 3, subsample=rows):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def guide(rows):
        weight = pyro.param("weight", torch.ones(3))
        with pyro.plate("data", 3, subsample=rows):
            context = (weight.unsqueeze(-1) * scales)[rows]
            pyro.sample("z", Implicit(lambda z, c: c * z, 1, context=context))

    options = [{}] if name == "KIVI" else [{}, {"covariance": None}]  # moments taken out, or not
    for rows, more in itertools.product((torch.arange(3), torch.tensor([0, 2])), options):
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        elbo = ELBOS[name](4, num_entropy_particles=400, prior_weight=0.0, **more)
        factor = 3 / len(rows)
        loss = elbo.differentiable_loss(model, guide, rows)
        expected = sum(entropy_of(scales[row].item()) for row in rows) * factor
        assert -loss.item() == pytest.approx(expected, abs=0.4)
        loss.backward()
        gradient = pyro.param("weight").grad  # log-scales: each has -1, whatever the scale
        wanted = torch.zeros(3).index_fill(0, rows, -factor)
        torch.testing.assert_close(gradient, wanted, rtol=0.15, atol=1e-9)


@every_elbo
def test_finds_a_conjugate_posterior(name):
    """A Gaussian of correlation -0.97: prior N(0, I), three linear measurements."""
    design = torch.tensor([[1.0, 1.0], [0.9, 1.0], [1.0, 1.1]])
    y, noise = torch.tensor([1.0, 0.5, 1.5]), 0.3

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(w @ design.T, noise), obs=y)

    elbo = ELBOS[name](32, compile="trace")
    draws = fit(model, AutoImplicit(model, frame=None), elbo, 400, lr=0.03)["w"].reshape(-1, 2)
    covariance = torch.linalg.inv(torch.eye(2) + design.T @ design / noise**2)
    mean = covariance @ design.T @ y / noise**2
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    white = (draws - mean) @ whiten.T
    torch.testing.assert_close(white.mean(0), torch.zeros(2), rtol=0, atol=0.25)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(2), rtol=0, atol=0.3)


def test_finds_both_modes():
    """½ N(-3, 1) + ½ N(3, 1) under a flat prior, the KIVI paper's first example."""
    modes = dist.Normal(torch.tensor([-3.0, 3.0]), 1.0)

    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        x = pyro.sample("x", flat)
        pyro.factor("target", modes.log_prob(x.unsqueeze(-1)).logsumexp(-1))

    guide = AutoImplicit(model, lambda size: MLP(4, size), frame=None, init_scale=2.0)
    x = fit(model, guide, KIVI_ELBO(32, compile="trace"), 600, lr=0.02)["x"]
    assert (x > 0).double().mean().item() == pytest.approx(0.5, abs=0.25)
    for mode in (x[x > 0], -x[x < 0]):
        assert mode.mean().item() == pytest.approx(3.0, abs=0.45)
        assert mode.std().item() == pytest.approx(1.0, abs=0.35)


@every_elbo
def test_full_covariance_wants_enough_draws_of_enough_noise(name):
    def entropy(q, **options):
        ELBOS[name](4, covariance="full", **options).score_parts(drawn(q), None)

    with pytest.raises(ValueError, match=r"site 'x' has 9 dimensions.*8 draws. Cure:.*at least 10"):
        entropy(Implicit(MLP(3, 9), 3).expand([4]), num_entropy_particles=5)
    line = Implicit(lambda z: z * torch.tensor([1.0, 0.0]), 1).expand([4])
    with pytest.raises(ValueError, match="site 'x'.*Cure: covariance=\"diagonal\""):
        entropy(line)
