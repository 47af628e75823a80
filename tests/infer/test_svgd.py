# SPDX-License-Identifier: Apache-2.0
"""Particle methods: their directions by explicit sums, their draws, and posteriors they find."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import RBFSteinKernel
from pyro.optim import SGD, Adam

from pyro_implicit import compare
from pyro_implicit.infer.svgd import GFSF, KSD, SVGD
from pyro_implicit.ops import median_bandwidth, rbf_kernel

pytestmark = pytest.mark.usefixtures("double")

MEAN = torch.tensor([1.0, -0.5], dtype=torch.float64)
COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
PRECISION = torch.linalg.inv(COVARIANCE)


def one_site():
    pyro.sample("x", dist.MultivariateNormal(MEAN, COVARIANCE))


def two_sites():
    """The same Gaussian."""
    a = pyro.sample("a", dist.Normal(MEAN[0], COVARIANCE[0, 0].sqrt()))
    slope = COVARIANCE[0, 1] / COVARIANCE[0, 0]
    variance = COVARIANCE[1, 1] - slope * COVARIANCE[0, 1]
    pyro.sample("b", dist.Normal(MEAN[1] + slope * (a - MEAN[0]), variance.sqrt()))


METHODS = {
    "SVGD-univariate": lambda *args: SVGD(args[0], RBFSteinKernel(), *args[1:]),
    "SVGD-multivariate": lambda *args: SVGD(
        args[0], RBFSteinKernel(), *args[1:], mode="multivariate"
    ),
    "GFSF": GFSF,
    "KSD": KSD,
}
methods = pytest.mark.parametrize("name", METHODS)


def joined(method):
    draws = method.get_named_particles()
    return torch.cat([value.reshape(len(value), -1) for value in draws.values()], -1)


def displacement(name, model, num_particles=6):
    """The particles before the second step and what plain descent of unit rate adds to them."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    method = METHODS[name](model, SGD({"lr": 1.0}), num_particles, 0)
    method.step()
    before = joined(method)
    method.step()
    return before, joined(method) - before


@pytest.mark.parametrize("model", [one_site, two_sites])
def test_gfsf_moves_along_the_difference_of_scores(model):
    x, moved = displacement("GFSF", model)
    n, variance = len(x), median_bandwidth(x) ** 2
    gram = rbf_kernel(x, x, variance.sqrt())
    slopes = torch.stack(
        [sum(gram[i, j] * (x[i] - x[j]) / variance for j in range(n)) for i in range(n)]
    )
    score_q = -torch.linalg.solve(gram + 1e-3 * n * torch.eye(n), slopes)
    expected = -(x - MEAN) @ PRECISION - score_q
    torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("model", [one_site, two_sites])
def test_ksd_descends_the_discrepancy(model):
    """Of the double sum of Stein kernels, written out, by its own autograd."""
    x, moved = displacement("KSD", model)
    n, variance = len(x), median_bandwidth(x) ** 2
    x.requires_grad_()
    total = 0.0
    for i in range(n):
        for j in range(n):
            delta = x[i] - x[j]
            s_i, s_j = (-PRECISION @ (x[k] - MEAN) for k in (i, j))
            value = torch.exp(-delta @ delta / (2 * variance))
            total += value * (s_i @ s_j + s_i @ delta / variance - s_j @ delta / variance)
            total += value * (2 / variance - delta @ delta / variance**2)
    (gradient,) = torch.autograd.grad(total / n**2, x)
    torch.testing.assert_close(moved, -gradient, rtol=1e-8, atol=1e-9)


@methods
def test_sites_are_parts_of_one_particle(name):
    """Split in two sites, the Gaussian has the same particles in the same places."""
    pyro.set_rng_seed(1)
    start = torch.randn(8, 2)
    moved = []
    for model in (one_site, two_sites):
        pyro.clear_param_store()
        pyro.param("svgd_particles", start.reshape(-1).clone())
        method = METHODS[name](model, SGD({"lr": 0.1}), 8, 0)
        method.step()
        moved.append(joined(method))
    assert (moved[0] - start).abs().min() > 1e-6
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize(
    ("name", "num_steps", "tolerance"),
    [
        ("SVGD-univariate", 150, 0.55),  # neither of the two ways of SVGD gets nearer
        ("SVGD-multivariate", 150, 0.35),
        ("GFSF", 150, 0.06),
        ("KSD", 500, 0.06),
    ],
)
def test_finds_a_correlated_gaussian(name, num_steps, tolerance):
    pyro.set_rng_seed(0)
    method = METHODS[name](two_sites, Adam({"lr": 0.1}), 50, 0)
    pyro.param("svgd_particles", torch.randn(100) + 1)
    for _ in range(num_steps):
        method.step()
    x = joined(method)
    whiten = torch.linalg.inv(torch.linalg.cholesky(COVARIANCE))
    white = (x - MEAN) @ whiten.T
    torch.testing.assert_close(white.mean(0), torch.zeros(2), rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(2), rtol=0, atol=tolerance)


def groups():
    """Plates, a positive scale, a simplex, a flat prior and an observation."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("probs", dist.Dirichlet(torch.ones(3)))
    shift = pyro.sample("shift", dist.ImproperUniform(constraints.real, (), ()))
    with pyro.plate("groups", 4, dim=-2):
        offset = pyro.sample("offset", dist.Normal(0.0, scale))
        with pyro.plate("rows", 5, dim=-1):
            mean = offset + shift + weight.sum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.arange(20.0).reshape(4, 5) / 10)


@methods
def test_draws_have_the_shapes_of_nuts_and_can_be_compared(name):
    method = METHODS[name](groups, Adam({"lr": 0.05}), 7, 2)
    for _ in range(3):
        assert all(value > 0 for value in method.step().values())
    draws = method.get_named_particles()
    conditioned = poutine.condition(groups, {"shift": torch.tensor(0.0)})
    sites = poutine.trace(conditioned).get_trace().nodes
    assert set(draws) == {"scale", "weight", "probs", "shift", "offset"}
    for site, value in draws.items():
        assert value.shape == (7, *sites[site]["value"].shape)
        assert not value.requires_grad
        assert value.reshape(7, -1)[:, 0].unique().numel() == 7
    assert (draws["scale"] > 0).all()
    torch.testing.assert_close(draws["probs"].sum(-1), torch.ones(7))
    reference = {site: torch.randn(9, *value.shape[1:]) for site, value in draws.items()}
    assert set(compare(None, draws, reference).sites) == set(draws)


@methods
def test_parameters_of_the_model_are_trained_as_well(name):
    def model():
        loc = pyro.param("loc", torch.tensor(0.0))
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x + loc, 0.5), obs=torch.tensor(4.0))

    method = METHODS[name](model, Adam({"lr": 0.05}), 5, 0)
    for _ in range(20):
        method.step()
    assert pyro.param("loc") > 0.5
    for _, param in pyro.get_param_store().named_parameters():
        assert param.grad is None or (param.grad == 0).all()


@methods
def test_precision_comes_from_the_model(name):
    def model():
        pyro.sample("x", dist.Normal(torch.zeros((), dtype=torch.float32), 1.0))

    method = METHODS[name](model, Adam({"lr": 0.05}), 5, 0)
    method.step()
    assert method.get_named_particles()["x"].dtype == torch.float32


def test_errors():
    method = GFSF(one_site, Adam({}), 5, 0)
    with pytest.raises(ValueError, match=r"GFSF has no particles before its first step\(\)"):
        method.get_named_particles()
    method.step()
    with pytest.raises(ValueError, match=r"10 numbers.*6 particles.*12. Cure.*clear_param_store"):
        KSD(two_sites, Adam({}), 6, 0).step()
    with pytest.raises(ValueError, match="ridge must be positive, but got 0"):
        GFSF(one_site, Adam({}), 5, 0, ridge=0)
