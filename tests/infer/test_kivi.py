# SPDX-License-Identifier: Apache-2.0
"""KIVI_ELBO: its draws, its value on Gaussians, and a posterior that it has to find."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import ClippedAdam
from torch import nn

from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit, Implicit, SemiImplicit
from pyro_implicit.infer import ImplicitSite
from pyro_implicit.ops import adaptive_log_density, rbf_kernel


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)


def drawn(q):
    noise, value, _ = q.draw()
    return ImplicitSite("x", q, noise, value, value)


def entropy_of(scale, dim=1):
    return dim * (0.5 * math.log(2 * math.pi * math.e) + math.log(scale))


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


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (Implicit(MLP(3, 3), 3), "full"),
        (Implicit(MLP(3, 4), 3), "diagonal"),  # on a surface
        (SemiImplicit(MLP(3, 4), 3, 0.1), "full"),  # with noise around it
        (SemiImplicit(MLP(3, 6), 3, 0.1), "diagonal"),  # too few draws
    ],
)
def test_automatic_covariance(q, expected):
    site = drawn(q.expand([10]))
    log_q = []
    for covariance in ("auto", "diagonal", "full"):
        pyro.set_rng_seed(0)
        elbo = KIVI_ELBO(10, 10, covariance=covariance)
        try:
            log_q.append(elbo.score_parts(site, None).log_prob)
        except ValueError:
            log_q.append(torch.zeros(10))
    assert log_q[0].equal(log_q[1]) == (expected == "diagonal")
    assert log_q[0].equal(log_q[2]) == (expected == "full")


class Spy:
    """A kernel that notes the shapes of the points at which it is evaluated."""

    def __init__(self):
        self.shapes = set()

    def __call__(self, x, y, bandwidth):
        self.shapes.add((tuple(x.shape), tuple(y.shape)))
        return rbf_kernel(x, y, bandwidth)


@pytest.mark.parametrize(
    ("num_particles", "plates", "shape"),
    [(1, (), (20, 2)), (4, (), (20, 2)), (4, (3, 1), (3, 1, 20, 2)), (30, (), (30, 2))],
)
def test_entropy_has_particles_of_its_own(num_particles, plates, shape):
    particles = (num_particles,) if num_particles > 1 else ()
    kernel = Spy()
    elbo = KIVI_ELBO(num_particles, 20, 7, kernel=kernel)
    site = drawn(Implicit(MLP(3, 2), 3).expand(particles + plates))
    log_q = elbo.score_parts(site, None).log_prob
    assert log_q.shape == particles + plates
    centers = plates + (shape[-2] + 7, 2)
    assert (shape, centers) in kernel.shapes
    assert all(y == centers for _, y in kernel.shapes)


def test_one_likelihood_particle_against_many_of_the_entropy():
    """The model runs once; the entropy's gradient is nearly free of noise all the same."""
    runs = []

    def model():
        runs.append(pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1)))

    generator = nn.Linear(2, 2, bias=False)
    generator.weight.data = torch.diag(torch.tensor([0.5, 2.0]))

    def guide():
        pyro.sample("x", Implicit(generator, 2))

    elbo = KIVI_ELBO(1, prior_weight=0.0)
    elbo.differentiable_loss(model, guide)
    runs.clear()
    loss = elbo.differentiable_loss(model, guide)
    assert [x.shape for x in runs] == [(2,)]
    assert -loss.item() == pytest.approx(entropy_of(1.0, 2), abs=0.35)
    loss.backward()
    gradient = generator.weight.grad.diagonal()  # that of minus the entropy's log-determinant
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -0.5]), rtol=0.2, atol=0)


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


def test_particles_that_depend_on_other_latents_are_not_pooled():
    """z has the spread 0.1 around a w of spread 5: pooled, its entropy would be w's."""

    def model():
        pyro.sample("w", dist.Normal(0.0, 5.0).expand([1]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def guide():
        w = pyro.sample("w", dist.Normal(0.0, 5.0).expand([1]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("z", Implicit(lambda z, w: w + 0.1 * z, 1, context=w))

    pyro.set_rng_seed(0)
    elbo = KIVI_ELBO(10, prior_weight=0.0)
    elbo.loss(model, guide)
    found = -elbo.loss(model, guide)
    expected = entropy_of(5.0) + 3 * entropy_of(0.1)
    assert found == pytest.approx(expected, abs=1.5)  # w's own entropy is a mean of ten


def test_local_latents_have_a_ratio_each():
    """One encoder, three data points, a subsample of two: the plate's scale reaches the entropy."""
    scales = torch.tensor([[0.1], [1.0], [4.0]])

    def model(rows):
        with pyro.plate("data", 3, subsample=rows):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def guide(rows):
        with pyro.plate("data", 3, subsample=rows):
            pyro.sample("z", Implicit(lambda z, c: c * z, 1, context=scales[rows]))

    pyro.set_rng_seed(0)
    for rows in (torch.arange(3), torch.tensor([0, 2])):
        elbo = KIVI_ELBO(4, 400, prior_weight=0.0)
        expected = sum(entropy_of(scales[row].item()) for row in rows) * 3 / len(rows)
        assert -elbo.loss(model, guide, rows) == pytest.approx(expected, abs=0.4)


def fit(model, guide, elbo, steps, lr=0.02):
    optim = ClippedAdam({"lr": lr, "lrd": 0.05 ** (1 / steps)})
    svi = SVI(model, guide, optim, elbo)
    for _ in range(steps):
        svi.step()
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        return guide()


def test_finds_a_conjugate_posterior():
    """A Gaussian of correlation -0.97: prior N(0, I), three linear measurements."""
    design = torch.tensor([[1.0, 1.0], [0.9, 1.0], [1.0, 1.1]])
    y, noise = torch.tensor([1.0, 0.5, 1.5]), 0.3

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(w @ design.T, noise), obs=y)

    pyro.set_rng_seed(0)
    draws = fit(model, AutoImplicit(model, frame=None), KIVI_ELBO(16, compile="trace"), 600)[
        "w"
    ].reshape(-1, 2)
    covariance = torch.linalg.inv(torch.eye(2) + design.T @ design / noise**2)
    mean = covariance @ design.T @ y / noise**2
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    white = (draws - mean) @ whiten.T
    torch.testing.assert_close(white.mean(0), torch.zeros(2), rtol=0, atol=0.15)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(2), rtol=0, atol=0.3)


def test_finds_both_modes():
    """½ N(-3, 1) + ½ N(3, 1), the paper's first example."""
    modes = dist.Normal(torch.tensor([-3.0, 3.0]), 1.0)

    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        x = pyro.sample("x", flat)
        pyro.factor("target", modes.log_prob(x.unsqueeze(-1)).logsumexp(-1))

    pyro.set_rng_seed(0)
    guide = AutoImplicit(model, lambda size: MLP(4, size), frame=None, init_scale=2.0)
    x = fit(model, guide, KIVI_ELBO(32, compile="trace"), 600)["x"]
    assert (x > 0).double().mean().item() == pytest.approx(0.5, abs=0.15)
    for mode in (x[x > 0], -x[x < 0]):
        assert mode.mean().item() == pytest.approx(3.0, abs=0.3)
        assert mode.std().item() == pytest.approx(1.0, abs=0.3)


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


def test_full_covariance_wants_enough_draws_of_enough_noise():
    elbo = KIVI_ELBO(4, 5, covariance="full")
    with pytest.raises(ValueError, match=r"site 'x' has 9 dimensions.*8 draws. Cure:.*at least 10"):
        elbo.score_parts(drawn(Implicit(MLP(3, 9), 3).expand([4])), None)
    elbo = KIVI_ELBO(4, covariance="full")
    line = Implicit(lambda z: z * torch.tensor([1.0, 0.0]), 1).expand([4])
    with pytest.raises(ValueError, match="site 'x'.*Cure: covariance=\"diagonal\""):
        elbo.score_parts(drawn(line), None)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_entropy_particles": 1}, "num_entropy_particles must be at least 2"),
        ({"num_prior_particles": 0}, "num_prior_particles must be positive"),
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
