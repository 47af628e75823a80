# SPDX-License-Identifier: Apache-2.0
"""LIVI's log q against what is known exactly, above all for linear generators."""

from __future__ import annotations

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_implicit import LIVI_ELBO, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from tests.infer.livi_sites import assert_same, draw, linearised

DOUBLE = torch.double
SIZES = [(4, 2), (3, 3), (2, 5), (1, 1)]  # of the value and of the noise
BATCH_SHAPES = [(), (6,), (2, 3)]


def log_q(site: ImplicitSite, **options) -> Tensor:
    elbo = LIVI_ELBO(**options)
    parts = elbo.score_parts(linearised(elbo, site), None)
    assert parts.log_prob.shape == site.distribution.batch_shape
    assert parts.entropy_term.equal(parts.log_prob)  # the entropy's gradient is that of the value
    assert parts.score_function == 0
    return parts.log_prob


def linear(m: int, d: int, batch_shape: tuple[int, ...] = (), **kwargs) -> SemiImplicit:
    scale = kwargs.get("scale", (0.1 + torch.rand(m, dtype=DOUBLE)).requires_grad_())
    return SemiImplicit(nn.Linear(d, m, dtype=DOUBLE), d, scale).expand(batch_shape)


def gaussian(q: SemiImplicit) -> MultivariateNormal:
    """What a linear generator makes, exactly."""
    weight, bias = q.generator.weight, q.generator.bias
    scale = q.scale.expand(bias.shape)
    return MultivariateNormal(bias, weight @ weight.T + scale.square().diag())


@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
@pytest.mark.parametrize("m,d", SIZES)
def test_quadratic_is_the_gaussian_density(m, d, batch_shape):
    q = linear(m, d, batch_shape)
    site = draw(q)
    value = site.value.detach().requires_grad_()
    found = log_q(replace(site, value=value), entropy="quadratic")
    expected = gaussian(q).log_prob(value)
    assert_same(found, expected, [value, q.scale, *q.generator.parameters()])


@pytest.mark.parametrize("m,d", SIZES)
def test_limit_is_the_gaussian_entropy(m, d):
    q = linear(m, d, (7,))
    entropy = -log_q(draw(q), log_det="exact")
    expected = gaussian(q).entropy().expand(7)
    assert_same(entropy, expected, [q.scale, *q.generator.parameters()])


@pytest.mark.parametrize("entropy", ["limit", "quadratic"])
def test_both_entropies_agree_in_the_mean(entropy):
    """The quadratic form of a Gaussian has mean m, which is what the limit puts in its place."""
    q = linear(3, 2, (4000,))
    found = -log_q(draw(q), entropy=entropy)
    standard_error = found.std() / 4000**0.5
    assert abs(found.mean() - gaussian(q).entropy()) < 4 * standard_error + 1e-9


@pytest.mark.parametrize("log_det", ["exact", "smallest", "stochastic", "auto"])
def test_one_noise_dimension_is_exact_for_all(log_det):
    q = linear(3, 1, (2, 5))
    entropy = -log_q(draw(q), log_det=log_det)
    expected = gaussian(q).entropy().expand(2, 5)
    assert_same(entropy, expected, [q.scale, *q.generator.parameters()])


def test_smallest_is_exact_for_equal_singular_values():
    q = linear(5, 3, (4,), scale=torch.tensor(0.3, dtype=DOUBLE, requires_grad=True))
    nn.init.orthogonal_(q.generator.weight, gain=2.0)
    entropy = -log_q(draw(q), log_det="smallest")
    expected = gaussian(q).entropy().expand(4)
    # All derivatives of this value but one along the weights themselves are the bound's own.
    assert_same(entropy, expected, [q.scale, q.generator.bias])


class Diagonal(nn.Module):
    """Elementwise: with a diagonal Jacobian random signs have no Monte Carlo error."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(size, dtype=DOUBLE))

    def forward(self, noise: Tensor) -> Tensor:
        return torch.sinh(self.weight * noise)


@pytest.mark.parametrize("num_probes", [1, 3])
@pytest.mark.parametrize("batch_shape", BATCH_SHAPES)
def test_stochastic_is_exact_for_diagonal_jacobians(batch_shape, num_probes):
    generator = Diagonal(5)
    scale = (0.1 + torch.rand(5, dtype=DOUBLE)).requires_grad_()
    q = SemiImplicit(generator, 5, scale).expand(batch_shape)
    site = draw(q)
    found = log_q(site, log_det="stochastic", num_probes=num_probes)
    slopes = generator.weight * torch.cosh(generator.weight * site.noise)
    by_hand = MultivariateNormal(
        torch.zeros(5, dtype=DOUBLE), torch.diag_embed(slopes.square() + scale.square())
    )
    assert_same(found, -by_hand.entropy(), [scale, generator.weight])


def test_stochastic_is_unbiased():
    generator = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8)).double()
    scale = (0.1 + torch.rand(8, dtype=DOUBLE)).requires_grad_()
    site = draw(SemiImplicit(generator, 6, scale).expand((3,)))
    inputs = [scale, generator[0].weight, generator[0].bias, generator[2].weight]

    def value_and_slopes(value: Tensor) -> Tensor:
        """The mean, and its derivative along each input's exact gradient."""
        gradients = torch.autograd.grad(value.mean(), inputs)
        slopes = [(g * d).sum() for g, d in zip(gradients, directions, strict=True)]
        return torch.stack([value.mean().detach(), *slopes])

    exact = log_q(site, log_det="exact")
    directions = torch.autograd.grad(exact.mean(), inputs, retain_graph=True)
    expected = value_and_slopes(exact)
    options = {"log_det": "stochastic", "num_probes": 100}
    found = torch.stack([value_and_slopes(log_q(site, **options)) for _ in range(60)])
    error = (found.mean(0) - expected).abs()
    assert (error < 4 * found.std(0) / 60**0.5).all()
    assert (error < 0.02 * expected.abs()).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("m,d", [(8, 8), (12, 5)])
def test_smallest_lies_below_exact(m, d, seed):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(d, 20), nn.Tanh(), nn.Linear(20, m)).double()
    scale = 0.05 + 0.1 * torch.rand(m, dtype=DOUBLE)
    site = draw(SemiImplicit(network, d, scale).expand((10,)))
    elbo = LIVI_ELBO(log_det="smallest", max_iterations=500)
    bound = -elbo.score_parts(site, None).log_prob
    (residual,) = elbo.residuals.values()
    assert 0 < residual <= 1e-3
    exact = -log_q(site, log_det="exact")
    assert (bound < exact).all()
    jacobian = torch.stack([torch.autograd.functional.jacobian(network, z) for z in site.noise])
    smallest = torch.linalg.svdvals(jacobian / scale.unsqueeze(-1))[:, -1].square()
    half = 0.5 * d * smallest.log1p() + scale.log().sum()
    expected = half + 0.5 * m * (1 + torch.tensor(2 * torch.pi, dtype=DOUBLE).log())
    torch.testing.assert_close(bound, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "noise",
    [dist.Normal(torch.ones(2, dtype=DOUBLE), 1.0), dist.Laplace(torch.zeros(2, dtype=DOUBLE), 1)],
)
def test_other_noise_is_refused(noise):
    q = SemiImplicit(nn.Linear(2, 3, dtype=DOUBLE), noise.to_event(1), 0.5)
    with pytest.raises(ValueError, match="standard normal noise.*site.*Cure.*noise=2"):
        LIVI_ELBO().check_site(draw(q))
