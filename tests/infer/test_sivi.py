# SPDX-License-Identifier: Apache-2.0
"""SIVI: its surrogate against exact densities, and a known posterior recovered."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import HSIVI_ELBO, KPG_ELBO, KSIVI_ELBO, MLP, Implicit, SemiImplicit
from pyro_implicit.infer import LayeredGenerator
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite, flatten_site, mixing_noise
from pyro_implicit.infer.sivi import SIVI_ELBO
from tests.infer.helpers import FramedGuide, drawn, gaussian, linear, quartic_model

pytestmark = pytest.mark.usefixtures("double")


def test_surrogate_falls_to_the_exact_density():
    """E log q of the surrogate lies above the exact one, the more so the fewer the noises."""
    q = linear(100)
    gaps = []
    for num_mixing in (1, 5, 50, 2000):
        elbo = SIVI_ELBO(100, num_mixing)
        rounds = []
        for _ in range(30):
            site = drawn(q)
            surrogate = elbo.score_parts(site, None).log_prob
            rounds.append((surrogate - gaussian(q).log_prob(site.value)).mean())
        rounds = torch.stack(rounds).detach()
        gaps.append((rounds.mean().item(), rounds.std().item() / 30**0.5))
    assert all(gap > -4 * error for gap, error in gaps)
    assert all(a > b for (a, _), (b, _) in zip(gaps[:-1], gaps[1:], strict=True))
    assert gaps[0][0] > 0.3
    assert gaps[-1][0] < 0.01


@pytest.mark.parametrize("num_particles", [1, 4])
@pytest.mark.parametrize("conditioned", [None, "data", "particles"])
def test_value_and_gradient_are_those_of_the_mixture(conditioned, num_particles):
    """Own noise and fresh ones of five local latents, each with a context and a scale."""
    encoder = MLP(2, 3, (6,), context_dim=2 * bool(conditioned))
    particles = (num_particles,) * (num_particles > 1)
    context = None
    if conditioned:
        shape = (*particles, 5, 2) if conditioned == "particles" else (5, 2)
        context = torch.randn(shape, requires_grad=True)
    scale = (0.3 + torch.rand(3)).requires_grad_()
    site = drawn(SemiImplicit(encoder, 2, scale, context).expand((*particles, 5)))
    torch.manual_seed(3)
    parts = SIVI_ELBO(num_particles, 7).score_parts(site, None)
    assert parts.entropy_term is parts.log_prob and parts.score_function == 0
    torch.manual_seed(3)
    fresh = mixing_noise(site, flatten_site(site, num_particles), 7)
    shared = num_particles > 1 and conditioned != "particles"
    assert fresh.shape == (7, *((1,) if shared else particles), 5, 2)
    noise = torch.cat([site.noise.unsqueeze(0), fresh.expand((7, *particles, 5, 2))])
    log_probs = site.distribution.conditional(noise).log_prob(site.value)
    expected = log_probs.exp().mean(0).log()
    torch.testing.assert_close(parts.log_prob, expected, rtol=1e-9, atol=1e-9)
    inputs = [scale, *encoder.parameters()] + ([context] if conditioned else [])
    weight = 1 + torch.rand_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((weight * parts.log_prob).sum(), inputs, retain_graph=True),
        torch.autograd.grad((weight * expected).sum(), inputs),
        rtol=1e-8,
        atol=1e-8,
    )


class Spy(nn.Linear):
    """A generator that notes the shapes of its noise."""

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        self.shapes = [*getattr(self, "shapes", []), tuple(noise.shape)]
        value = super().forward(noise)
        return value if context is None else value + context


@pytest.mark.parametrize("context", [False, True])
def test_fresh_noise_is_shared_by_particles_and_comes_in_chunks(context):
    generator = Spy(2, 3)
    context = torch.randn(5, 3) if context else None
    site = drawn(SemiImplicit(generator, 2, 0.5, context).expand((4, 5)))
    elbo = SIVI_ELBO(4, 10, chunk_size=4)
    elbo.score_parts(site, None)
    generator.shapes = []
    elbo.score_parts(site, None)
    sizes = [4, 4, 2]
    assert generator.shapes == [(1, 4, 5, 2)] + [(size, 1, 5, 2) for size in sizes]


def test_matrix_values():
    flat = nn.Linear(4, 6)
    scale = 0.3 + torch.rand(2, 3)
    matrix = nn.Sequential(flat, nn.Unflatten(-1, (2, 3)))
    site = drawn(SemiImplicit(matrix, 4, scale).expand((5,)))
    same = SemiImplicit(flat, 4, scale.flatten()).expand((5,))
    torch.manual_seed(0)
    found = SIVI_ELBO(5, 8).score_parts(site, None).log_prob
    torch.manual_seed(0)
    value = site.value.flatten(1)
    flattened = ImplicitSite("x", same, site.noise, value, value)
    assert found.shape == (5,)
    torch.testing.assert_close(found, SIVI_ELBO(5, 8).score_parts(flattened, None).log_prob)


class Centre(nn.Module):
    """What batch normalisation does to a batch while it trains."""

    def forward(self, x):
        return x - x.mean(tuple(range(x.dim() - 1)), keepdim=True) if self.training else x


@pytest.mark.parametrize(
    ("layer", "match"),
    [(nn.Dropout(0.5), "randomness of its own"), (Centre(), "mixes the rows of a batch")],
)
def test_generator_that_is_no_function_of_its_noise(layer, match):
    generator = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3))
    site = drawn(SemiImplicit(generator, 2, 0.5).expand((8,)))
    with pytest.raises(ValueError, match=f"site 'x' .*{match}.*Cure: call generator.eval()"):
        SIVI_ELBO(8).check_site(site)
    generator.eval()
    SIVI_ELBO(8).check_site(site)


def test_refusals():
    with pytest.raises(ValueError, match="num_mixing must be at least 1"):
        SIVI_ELBO(num_mixing=0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        SIVI_ELBO(chunk_size=0)

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def guide():
        pyro.sample("x", Implicit(MLP(2, 2), 2))

    with pytest.raises(ValueError, match="SIVI_ELBO cannot train site 'x'.*Cure"):
        SIVI_ELBO().loss(model, guide)


@pytest.mark.parametrize("make", [KSIVI_ELBO, KPG_ELBO, HSIVI_ELBO])
def test_methods_that_match_scores_report_the_surrogate(make):
    guide = FramedGuide(LayeredGenerator([MLP(2, 2), MLP(2, 2)]) if make is HSIVI_ELBO else None)
    elbo, surrogate = make(6), SIVI_ELBO(6)

    def value(loss: Callable) -> float:
        pyro.set_rng_seed(1)
        return loss(quartic_model, guide)

    for one in (elbo, surrogate):  # the first step draws for its checks
        one.loss(quartic_model, guide)
    expected = value(surrogate.loss)
    assert value(elbo.loss) == expected
    if make is KSIVI_ELBO:  # in training, the others show other draws to the model
        with pytest.warns(UserWarning, match="SVI does not train parameters"):  # without Pyro
            assert value(elbo.loss_and_grads) == expected
