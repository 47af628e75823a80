# SPDX-License-Identifier: Apache-2.0
"""KSIVI: its discrepancy against quadrature, its gradient by definition, posteriors recovered."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_implicit import MLP, SemiImplicit
from pyro_implicit.infer import KSIVI_ELBO
from pyro_implicit.ops import conditional_stein_discrepancy, imq_kernel, rbf_kernel
from tests.infer.helpers import FramedGuide, check_finds_a_correlated_gaussian, quartic
from tests.infer.helpers import quartic_model as model

pytestmark = pytest.mark.usefixtures("double")


def exact_discrepancy(mean: float, sd: float, width: float, kernel: str) -> float:
    """The squared KSD of N(mean, sd^2) from N(0, 1) by Gauss-Hermite quadrature in 2d."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    x, weights = torch.tensor(mean + sd * nodes), torch.tensor(weights / math.sqrt(2 * math.pi))
    difference = -x + (x - mean) / sd**2
    evaluate = rbf_kernel if kernel == "rbf" else imq_kernel
    gram = evaluate(x[:, None], x[:, None], torch.tensor(width))
    return ((weights * difference) @ gram @ (weights * difference)).item()


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("statistic", ["u", "two-batch"])
def test_the_discrepancy_is_unbiased(kernel, statistic):
    """theta = 0.5 + 0.6 z + 0.8 eta has the marginal N(0.5, 1)."""
    z, eta = torch.randn(2, 40_000, 6, 1)
    points = 0.5 + 0.6 * z + 0.8 * eta
    differences = -points + eta / 0.8
    found = conditional_stein_discrepancy(
        points, differences, kernel, statistic, bandwidth=torch.tensor(0.7)
    )
    standard_error = found.std() / len(found) ** 0.5
    assert standard_error < 0.01
    assert abs(found.mean() - exact_discrepancy(0.5, 1.0, 0.7, kernel)) < 4 * standard_error


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("statistic", ["u", "two-batch"])
def test_the_discrepancy_is_the_sum_over_pairs(kernel, statistic):
    points, differences = torch.randn(2, 3, 5, 2)
    width = torch.tensor([0.5, 1.0, 2.0])
    found = conditional_stein_discrepancy(points, differences, kernel, statistic, width)
    for b in range(3):
        terms = []
        for i in range(5):
            for j in range(5):
                if (i != j) if statistic == "u" else (i < 2 <= j):
                    square = (points[b, i] - points[b, j]).square().sum() / width[b] ** 2
                    k = (-square / 2).exp() if kernel == "rbf" else (1 + square) ** -0.5
                    terms.append(k * differences[b, i] @ differences[b, j])
        torch.testing.assert_close(found[b], torch.stack(terms).mean())


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("statistic", ["u", "two-batch"])
def test_the_kernel_does_not_depend_on_the_spread_of_the_points(kernel, statistic):
    points, differences = torch.randn(2, 3, 8, 2)
    points.requires_grad_()
    total = conditional_stein_discrepancy(points, differences, kernel, statistic)
    scaled = conditional_stein_discrepancy(2.5 * points, differences, kernel, statistic)
    torch.testing.assert_close(scaled, total)
    (gradient,) = torch.autograd.grad(total.sum(), points)
    assert gradient.abs().max() > 0.01
    radial = (gradient * points).sum((-2, -1))
    torch.testing.assert_close(radial, torch.zeros(3))


def explicit(guide: FramedGuide, num_particles: int, statistic: str) -> Tensor:
    """The discrepancy as a function of the parameters, from the noise of seed 1."""
    pyro.set_rng_seed(1)
    noise = torch.randn(num_particles, 2)
    eta = torch.randn(num_particles, 2)
    scale = guide.log_scale.exp()
    value = guide.generator(noise) + scale * eta
    score = torch.func.vmap(torch.func.grad(lambda v: quartic(1 + guide.factor * v)))(value)
    differences = score + eta / scale
    return conditional_stein_discrepancy(value, differences, statistic=statistic)


@pytest.mark.parametrize("statistic", ["u", "two-batch"])
@pytest.mark.parametrize("mode", ["vmap", "plate", False])
def test_gradient_is_that_of_the_discrepancy(statistic, mode):
    guide = FramedGuide()
    elbo = KSIVI_ELBO(6, statistic=statistic, vectorize_particles=mode)
    parameters = list(guide.parameters())
    elbo.differentiable_loss(model, guide)  # the first step draws for its checks
    expected = torch.autograd.grad(explicit(guide, 6, statistic), parameters)
    pyro.set_rng_seed(1)
    found = torch.autograd.grad(elbo.differentiable_loss(model, guide), parameters)
    torch.testing.assert_close(found, expected)


def test_gradient_scales_with_model_and_guide_and_follows_tempering():
    guide = FramedGuide()
    parameters = list(guide.parameters())
    expected = torch.autograd.grad(explicit(guide, 6, "u"), parameters)

    def found(model, guide, **weights) -> tuple[Tensor, ...]:
        elbo = KSIVI_ELBO(6, **weights)
        elbo.differentiable_loss(model, guide)
        pyro.set_rng_seed(1)
        return torch.autograd.grad(elbo.differentiable_loss(model, guide), parameters)

    scaled = found(poutine.scale(model, 3.0), poutine.scale(guide, 3.0))
    torch.testing.assert_close(scaled, tuple(3 * g for g in expected))
    tempered = found(model, guide, inverse_temperature=0.5, entropy_weight=0.5)
    torch.testing.assert_close(tempered, tuple(0.5 * g for g in expected))
    masked = found(poutine.mask(model, mask=torch.tensor(False)), poutine.mask(guide, mask=False))
    assert all((g == 0).all() for g in masked)


def test_a_particle_without_a_density_moves_no_other():
    guide = FramedGuide()
    parameters = list(guide.parameters())

    def gradients(hole: bool) -> tuple[Tensor, ...]:
        def with_hole() -> None:
            x = pyro.sample("x", dist.Normal(torch.zeros(2), 100.0).to_event(1))
            outside = (x[..., 0] > pyro.param("edge", torch.tensor(2.5))) & torch.tensor(hole)
            pyro.factor("density", torch.where(outside, -math.inf, quartic(x)))

        elbo = KSIVI_ELBO(6)
        elbo.num_left_out = 1  # as after the warning
        pyro.set_rng_seed(3)
        elbo.differentiable_loss(with_hole, guide)
        pyro.set_rng_seed(1)
        loss = elbo.differentiable_loss(with_hole, guide)
        assert (elbo.num_left_out > 1) == hole
        return torch.autograd.grad(loss, parameters)

    plain, found = gradients(False), gradients(True)
    assert all(g.isfinite().all() for g in found)
    assert any((a != b).any() for a, b in zip(plain, found, strict=True))


def test_finds_a_correlated_gaussian():
    generator = MLP(3, 2, hidden=(50, 50), activation="relu")
    elbo = KSIVI_ELBO(100, num_mixing=1, compile="trace")
    check_finds_a_correlated_gaussian(generator, elbo, 500, atol=0.1)


def test_arguments_out_of_range():
    for options in ({"kernel": "other"}, {"statistic": "v"}, {"num_mixing": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            KSIVI_ELBO(4, **options)

    def two() -> None:
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def dependent() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        context = a[..., None]
        net = nn.Linear(3, 2).double()
        generator = lambda z, c: net(torch.cat([z, c], -1))  # noqa: E731
        pyro.sample("x", SemiImplicit(generator, 2, 0.5, context))

    with pytest.raises(ValueError, match="'x' depends on other latents.*KSIVI_ELBO.*Cure: SIVI"):
        KSIVI_ELBO(4).loss_and_grads(two, dependent)
