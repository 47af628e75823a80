# SPDX-License-Identifier: Apache-2.0
"""AISIVI: its flow, its score and gradient against exact Gaussians, and its training."""

from __future__ import annotations

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_implicit import AISIVI_ELBO, AutoSemiImplicit, SemiImplicit
from pyro_implicit.guides.auto_draws import Frame
from pyro_implicit.infer import ReverseConditional
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from tests.infer.helpers import check_gradient_of_the_entropy, drawn, gaussian, linear

pytestmark = pytest.mark.usefixtures("double")


class Exact(nn.Module):
    """The Gaussian q(z | theta) of a linear guide, its covariance times a factor."""

    def __init__(self, q: SemiImplicit, factor: float, noise_dim: int, value_dim: int) -> None:
        super().__init__()
        assert (noise_dim, value_dim) == (2, 3)
        weight = q.generator.weight.detach() / q.scale.detach()[:, None]
        self.covariance = (torch.eye(2) + weight.T @ weight).inverse()
        self.gain = self.covariance @ weight.T / q.scale.detach()
        self.bias = q.generator.bias.detach()
        self.log_factor = nn.Parameter(torch.tensor(factor).log())

    def _density(self, value: Tensor) -> MultivariateNormal:
        covariance = self.log_factor.exp() * self.covariance
        return MultivariateNormal((value - self.bias) @ self.gain.T, covariance)

    def log_prob(self, noise: Tensor, value: Tensor) -> Tensor:
        return self._density(value).log_prob(noise)

    def sample(self, num_samples: int, value: Tensor) -> tuple[Tensor, Tensor]:
        noise = self._density(value).sample((num_samples,))
        return noise, self.log_prob(noise, value)


def elbo_of(q: SemiImplicit, num_samples: int, factor: float = 1.0) -> AISIVI_ELBO:
    make = partial(Exact, q, factor)
    return AISIVI_ELBO(q.batch_shape[0], num_samples, make, proposal_optim={"lr": 0.0})


@pytest.mark.parametrize("num_couplings", [0, 1, 3])
def test_density_of_the_flow_is_that_of_its_draws(num_couplings):
    network = ReverseConditional(3, 2, num_couplings, hidden=(7,))
    for parameter in network.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    value = torch.randn(2)
    pyro.set_rng_seed(0)
    noise, log_density = network.sample(1, value)

    def push(start: Tensor) -> Tensor:
        for layer in range(num_couplings + 1):
            shift, log_scale = network._affine(layer, start, value)
            start = shift + start * log_scale.exp()
        return start

    pyro.set_rng_seed(0)
    start = torch.randn(1, 3)
    torch.testing.assert_close(push(start), noise)
    jacobian = torch.autograd.functional.jacobian(push, start[0])
    base = torch.distributions.Normal(0.0, 1.0).log_prob(start).sum()
    torch.testing.assert_close(log_density[0], base - torch.linalg.slogdet(jacobian).logabsdet)
    torch.testing.assert_close(network.log_prob(noise, value), log_density)


@pytest.mark.parametrize("plates", [(), (2,)])
def test_value_is_exact_with_the_exact_reverse_conditional(plates):
    q = linear(5, *plates)
    site = drawn(q)
    elbo = elbo_of(q, 4)
    parts = elbo.score_parts(site, None)
    torch.testing.assert_close(parts.log_prob, gaussian(q).log_prob(site.value))
    assert elbo.effective_sizes["x"] == pytest.approx(5.0)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_score_is_that_of_the_marginal(factor):
    q = linear(6)
    value = drawn(q).value.detach().requires_grad_()
    noise = torch.zeros(6, 2)
    site = ImplicitSite("x", q, noise, value, value)
    elbo = elbo_of(q, 40_000, factor)
    log_q = elbo.score_parts(site, None).entropy_term
    (found,) = torch.autograd.grad(log_q.sum(), value)
    exact = gaussian(q).log_prob(value)
    (expected,) = torch.autograd.grad(exact.sum(), value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.06)
    torch.testing.assert_close(log_q, exact, rtol=0, atol=0.03)
    assert elbo.effective_sizes["x"] == pytest.approx(40_000 if factor == 1 else 17_500, rel=0.02)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_mean_of_the_score_is_exact_for_a_wrong_proposal(num_samples):
    """The noise behind the draw is an exact draw of q(z | theta), which a transition keeps."""
    q = linear(60_000)
    point = torch.tensor([0.5, -1.0, 1.5])
    noise, _ = Exact(q, 1.0, 2, 3).sample(60_000, point)
    value = point.expand(60_000, 3).clone().requires_grad_()
    shifted = Exact(q, 0.5, 2, 3)
    shifted.bias = shifted.bias + torch.tensor([1.0, -0.5, 0.5])
    elbo = AISIVI_ELBO(60_000, num_samples, lambda *sizes: shifted, proposal_optim={"lr": 0.0})
    parts = elbo.score_parts(ImplicitSite("x", q, noise, value, value), None)
    (scores,) = torch.autograd.grad(parts.entropy_term.sum(), value)
    standard_error = scores.std(0) / len(scores) ** 0.5
    expected = gaussian(q).precision_matrix @ (q.generator.bias - point)
    assert standard_error.max() < 0.02
    assert ((scores.mean(0) - expected).abs() < 4 * standard_error).all()
    assert elbo.effective_sizes["x"] < 0.9 * (1 + num_samples)


def test_gradient_is_that_of_the_exact_entropy():
    q = linear(500)
    check_gradient_of_the_entropy(elbo_of(q, 40), q, num_unsettled=0)


@pytest.mark.parametrize("num_couplings", [0, 2])
def test_the_proposal_learns_the_reverse_conditional(num_couplings):
    """theta = z^2 + s eta has two places of z behind it, which a Gaussian must cover both."""
    q = SemiImplicit(lambda z: z.square(), 1, torch.tensor([0.3])).expand((100,))
    make = partial(ReverseConditional, num_couplings=num_couplings, hidden=(32,))
    elbo = AISIVI_ELBO(100, 50, make, proposal_optim={"lr": 2e-2}, proposal_steps=2)
    sizes = []
    for _ in range(80):
        elbo.score_parts(drawn(q), None)
        sizes.append(elbo.effective_sizes["x"])
    assert sum(sizes[-10:]) > 1.05 * sum(sizes[:10])
    assert sum(sizes[-10:]) / 10 > 22
    network = elbo.networks["x"]
    with torch.no_grad():
        noise, _ = network.sample(2000, torch.tensor([[1.5]]))
    assert 0.35 < (noise > 0).double().mean().item() < 0.65
    assert noise.square().mean().item() == pytest.approx(1.5, abs=0.4)


def test_an_untrained_proposal_does_not_drive_the_draws_apart():
    def model() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(20), 1.0).to_event(1))

    frame = Frame(torch.zeros(20), scale=torch.ones(20))
    guide = AutoSemiImplicit(model, frame=frame, noise_scale=0.5)
    optim = pyro.optim.ClippedAdam({"lr": 1e-2})
    svi = SVI(model, guide, optim, AISIVI_ELBO(32, 20, compile="trace"))
    for _ in range(40):
        svi.step()
    assert guide.sample_posterior(1000)["x"].norm(dim=-1).max() < 2 * 20**0.5


def test_context_enters_the_proposal_and_no_gradient_reaches_its_parameters():
    context = torch.linspace(-3, 3, 5).unsqueeze(-1)
    scale = torch.linspace(0.6, 1.0, 5).unsqueeze(-1)
    q = SemiImplicit(lambda z, c: z + c, 1, scale, context).expand((8, 5))
    site = drawn(q)
    elbo = AISIVI_ELBO(8, 2000)
    value = site.value.detach().requires_grad_()
    site = ImplicitSite("x", q, site.noise, value, value)
    log_q = elbo.score_parts(site, None).entropy_term
    assert elbo.networks["x"].networks[0].layers[0].weight.shape[1] == 3
    (found,) = torch.autograd.grad(log_q.sum(), value)
    assert all(parameter.grad is None for parameter in elbo.parameters())
    torch.testing.assert_close(
        found, (context - value.detach()) / (1 + scale.square()), rtol=0, atol=0.25
    )


def test_arguments_out_of_range():
    for name in ("num_samples", "proposal_steps"):
        with pytest.raises(ValueError, match=name):
            AISIVI_ELBO(4, **{name: 0})
