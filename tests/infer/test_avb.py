# SPDX-License-Identifier: Apache-2.0
"""AVB_ELBO: its discriminators, its value on Gaussians, and posteriors that it has to find."""

from __future__ import annotations

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_implicit import (
    AVB_ELBO,
    GPVI_ELBO,
    MLP,
    AmortizedKSD_ELBO,
    AutoImplicit,
    Implicit,
    ResidualGenerator,
)
from pyro_implicit.ops import standardize
from tests.infer.helpers import drawn

pytestmark = pytest.mark.usefixtures("double")


class Quadratic(nn.Module):
    """The log-ratio of two Gaussians, were its weights right."""

    def __init__(self, value_dim, context_dim, weights=(0.3, -0.5, 0.2)):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, values, context=None):
        features = torch.stack([torch.ones_like(values), values, values.square()], -1)
        return (features @ self.weights).sum(-1, keepdim=True)


def test_score_parts_is_the_equation():
    """Without a step of the discriminator: log of the Gaussian of the draws' moments, plus T."""
    site = drawn(Implicit(MLP(3, 2), 3).expand([6]))
    elbo = AVB_ELBO(6, num_entropy_particles=6, discriminator=Quadratic)
    with torch.no_grad():
        parts = elbo.score_parts(site, None)
    white, log_scale = standardize(site.value)
    log_normal = -0.5 * (white.square() + math.log(2 * math.pi)).sum(-1) - log_scale
    log_ratio = (0.3 - 0.5 * white + 0.2 * white.square()).sum(-1)
    torch.testing.assert_close(parts.log_prob, (log_normal + log_ratio).mean().expand(6))


def test_gradient_passes_through_the_draws_alone():
    generator = MLP(3, 2)
    site = drawn(Implicit(generator, 3).expand([6]))
    elbo = AVB_ELBO(6, num_entropy_particles=6, discriminator=Quadratic)
    parts = elbo.score_parts(site, None)
    (network,) = elbo.networks.values()
    weights = network.weights.detach()
    assert (weights != torch.tensor([0.3, -0.5, 0.2])).all()  # it learnt, and is frozen below
    found = torch.autograd.grad(parts.entropy_term.mean(), list(generator.parameters()))
    assert network.weights.grad is None
    white, log_scale = standardize(generator(site.noise))
    log_ratio = (weights[0] + weights[1] * white + weights[2] * white.square()).sum(-1)
    log_q = (-0.5 * white.square()).sum(-1).mean() - log_scale + log_ratio.mean()
    expected = torch.autograd.grad(log_q, list(generator.parameters()))
    torch.testing.assert_close(found, expected)


def wide():
    pyro.sample("x", dist.Normal(0.0, 2.0).expand([1]).to_event(1))


def narrow():
    pyro.sample("x", Implicit(lambda z: 1.0 + 0.7 * z, 1))


def test_discriminator_learns_the_ratio_to_the_prior():
    """q = N(1, 0.7^2) against N(0, 2^2): the KL in closed form."""
    elbo = AVB_ELBO(2, 200, Quadratic, 10, {"lr": 0.02}, contrast="prior", compile="trace")
    for _ in range(100):
        elbo.differentiable_loss(wide, narrow)
    losses = [elbo.loss(wide, narrow) for _ in range(20)]
    expected = math.log(2 / 0.7) + (0.7**2 + 1) / (2 * 2**2) - 0.5
    assert sum(losses) / 20 == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("contrast", ["adaptive", "prior"])
def test_the_discriminator_never_trains_on_the_points_that_it_judges(contrast):
    seen = []

    class Noted(Quadratic):
        def forward(self, values):
            seen.append(values.detach().clone())
            return super().forward(values)

    # As many particles as the discriminator sees: it would need no further draws.
    elbo = AVB_ELBO(8, 4, Noted, 2, contrast=contrast)
    elbo.differentiable_loss(wide, narrow)
    first, _, second, _, judged = seen  # each training step sees draws, then the contrast
    assert first.shape == second.shape == judged.shape
    for one, other in ((first, judged), (second, judged), (first, second)):
        assert not torch.isin(one, other).any()


def test_discriminator_knows_the_context():
    """One network for both rows: by the context it tells N(-0.9, 0.5^2) from N(0.9, 0.5^2)."""

    def model():
        with pyro.plate("rows", 2):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def guide():
        with pyro.plate("rows", 2):
            context = torch.tensor([[-1.0], [1.0]])
            pyro.sample("z", Implicit(lambda z, c: 0.5 * z + 0.9 * c, 1, context=context))

    pyro.set_rng_seed(0)
    elbo = AVB_ELBO(2, 200, None, 5, {"lr": 5e-3}, contrast="prior", compile="trace")
    for _ in range(100):
        elbo.differentiable_loss(model, guide)
    points = torch.tensor([[-1.0], [0.0], [1.0]])
    for side in (-1.0, 1.0):
        near = points[:2] if side < 0 else points[1:]
        with torch.no_grad():
            found = elbo.networks["z"](near, torch.full((2, 1), side))
        exact = dist.Normal(0.9 * side, 0.5).log_prob(near) - dist.Normal(0.0, 1.0).log_prob(near)
        torch.testing.assert_close(found, exact, rtol=0, atol=0.4)


def conjugate():
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(w.sum(-1), 0.5), obs=torch.tensor(1.0))


def test_any_names_of_sites():
    """Each site has its own network, even if a module cannot have its name."""
    names = ("values", "a.b", "a-b", "training")
    networks = [nn.Linear(2, 2) for _ in names]

    def model():
        for name in names:
            pyro.sample(name, dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def guide():
        for i, (name, network) in enumerate(zip(names, networks, strict=True)):
            pyro.sample(name, Implicit(pyro.module(f"net{i}", network), 2))

    elbo = AVB_ELBO(4)
    SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo).step()
    assert len(elbo.networks) == 4


@pytest.mark.parametrize(
    ("elbo", "layer", "shape"),
    [
        (AVB_ELBO(4), "layers.0.weight", (64, 2)),
        (AmortizedKSD_ELBO(4), "layers.0.weight", (64, 2)),
        (GPVI_ELBO(4, "helper"), "of_noise.weight", (256, 1)),  # the core alone
    ],
)
def test_networks_are_seen_and_trained_in_training_only(elbo, layer, shape):
    guide = AutoImplicit(conjugate, lambda size: ResidualGenerator(size, 1), frame=None)
    svi = SVI(conjugate, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    svi.step()
    parameters = dict(elbo(conjugate, guide).named_parameters())
    assert parameters[f"elbo.networks._AutoImplicit_latent.{layer}"].shape == shape
    name = rf"{type(elbo).__name__}-[0-9a-f]{{8}}\._AutoImplicit_latent\$\$\${layer}"
    (stored,) = filter(re.compile(name).fullmatch, pyro.get_param_store())
    values = [pyro.param(stored).detach().clone()]
    for run in (svi.step, svi.evaluate_loss):
        run()
        values.append(pyro.param(stored).detach().clone())
    assert (values[0] != values[1]).any() and values[1].equal(values[2])


def test_discriminators_are_saved_and_loaded():
    guide, elbo = AutoImplicit(conjugate, frame=None), AVB_ELBO(4)
    svi = SVI(conjugate, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    svi.step()
    state = {name: value.clone() for name, value in elbo.state_dict().items()}
    after = state["networks._AutoImplicit_latent.layers.0.weight"]

    fresh = AVB_ELBO(4)
    pyro.clear_param_store()
    fresh.loss(conjugate, guide)
    fresh.load_state_dict(state)
    assert fresh.networks["_AutoImplicit_latent"].layers[0].weight.equal(after)
    trained = SVI(conjugate, guide, pyro.optim.Adam({"lr": 1e-3}), fresh)
    trained.step()  # the optimiser follows the loaded parameters
    assert fresh.networks["_AutoImplicit_latent"].layers[0].weight.ne(after).any()


def test_arguments_and_refusals():
    for arguments, message in [
        ({"num_entropy_particles": 1}, "num_entropy_particles must be at least 2"),
        ({"discriminator_steps": 0}, "discriminator_steps must be at least 1"),
        ({"contrast": "none"}, 'contrast must be "adaptive" or "prior"'),
        ({"covariance": "low"}, 'covariance must be "diagonal" or "full"'),
    ]:
        with pytest.raises(ValueError, match=message):
            AVB_ELBO(**arguments)

    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(loc, 1.0))

    def guide():
        pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("x", Implicit(lambda z: z.squeeze(-1), 1))

    elbo = AVB_ELBO(3, contrast="prior")
    with pytest.raises(ValueError, match="'x' depends on latents of other sites.*Cure"):
        elbo.differentiable_loss(model, guide)


def test_finds_a_conjugate_posterior():
    torch.set_default_dtype(torch.float32)
    pyro.set_rng_seed(0)
    guide = AutoImplicit(conjugate, frame=None, init_scale=0.5)
    elbo = AVB_ELBO(8, contrast="adaptive", discriminator_steps=3, compile="trace")
    optim = pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.05 ** (1 / 200)})
    svi = SVI(conjugate, guide, optim, elbo)
    for _ in range(200):
        svi.step()
    draws = guide.sample_posterior(4000)["w"]
    precision = torch.eye(2) + 4.0
    covariance = torch.linalg.inv(precision)
    mean = covariance @ torch.full((2,), 4.0)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    torch.testing.assert_close((draws.mean(0) - mean) @ whiten.T, torch.zeros(2), rtol=0, atol=0.4)
    spread = torch.linalg.eigvalsh(whiten @ draws.T.cov() @ whiten.T).sqrt()
    assert 0.6 < spread.min() and spread.max() < 1.4, spread
