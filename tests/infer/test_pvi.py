# SPDX-License-Identifier: Apache-2.0
"""PVI: its loss and flow against explicit mixtures and quadrature, and short runs."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from pyro_implicit import MLP, PVI

pytestmark = pytest.mark.usefixtures("double")

PRECISION = torch.tensor([[1.5, 0.4], [0.4, 1.0]], dtype=torch.float64)


def model() -> None:
    pyro.sample("x", dist.MultivariateNormal(torch.ones(2), precision_matrix=PRECISION))


def sgd(lr: float) -> pyro.optim.PyroOptim:
    return pyro.optim.SGD({"lr": lr})


def make(num_particles: int = 3, num_samples: int = 2, lr: float = 0.1, **options) -> PVI:
    generator = MLP(2, 2, hidden=(4,), activation="tanh")
    guide_options = {"generator": generator, "frame": None, "init_scale": 1.0}
    method = PVI(model, sgd(lr), num_particles, num_samples, guide_options=guide_options, **options)
    method.guide()
    return method


def mixture(guide, detach: bool = False) -> MixtureSameFamily:
    parts = guide.generator(guide.particles), guide.noise_scale
    location, scale = (part.detach() if detach else part for part in parts)
    base = guide.loc.detach() + guide.scale.detach() * location
    components = Independent(Normal(base, guide.scale.detach() * scale), 1)
    return MixtureSameFamily(Categorical(logits=torch.zeros(len(base))), components)


def explicit_loss(guide, num_samples: int) -> Tensor:
    """The free energy on the draws of seed 1, with q's parameters constant in log q."""
    pyro.set_rng_seed(1)
    location = guide.generator(guide.particles).repeat(num_samples, 1)
    value = location + guide.noise_scale * torch.randn_like(location)
    x = guide.loc + guide.scale * value
    log_q = mixture(guide, detach=True).log_prob(x)
    log_p = dist.MultivariateNormal(torch.ones(2), precision_matrix=PRECISION).log_prob(x)
    return (log_q - log_p).mean()


@pytest.mark.parametrize("mode", ["vmap", "plate", False])
def test_loss_and_gradients_are_those_of_the_mixture(mode):
    method = make(vectorize_particles=mode)
    guide = method.guide
    parameters = [guide.particles, *guide.generator.parameters()]
    expected = explicit_loss(guide, 2)
    gradients = torch.autograd.grad(expected, parameters)
    method.evaluate_loss()
    pyro.set_rng_seed(1)
    loss = method.elbo.differentiable_loss(model, guide)
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients)
    pyro.set_rng_seed(1)
    assert method.evaluate_loss() == pytest.approx(expected.item())


@pytest.mark.parametrize("precondition", [True, False])
def test_a_step_moves_particles_along_the_flow_and_parameters_along_the_gradient(precondition):
    method = make(regularization=0.3, particle_lr=0.05, precondition=precondition)
    guide = method.guide
    method.evaluate_loss()
    weight = guide.generator.layers[0].weight
    parts = [guide.particles, weight]
    gradient, weight_gradient = torch.autograd.grad(explicit_loss(guide, 2), parts)
    z, before = guide.particles.detach().clone(), weight.detach().clone()
    pyro.set_rng_seed(1)
    method.step()
    pyro.set_rng_seed(1)
    torch.randn(6, 2)  # of the draws
    noise = (2 * 0.05 * 0.3) ** 0.5 * torch.randn(3, 2)
    gradient = 3 * gradient
    if precondition:
        gradient = gradient / (0.1 * gradient.square().mean(0)).sqrt()
    torch.testing.assert_close(guide.particles.detach(), z - 0.05 * (gradient + 0.3 * z) + noise)
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight_gradient)


def test_the_velocity_is_the_gradient_of_the_first_variation():
    """In one dimension with the identity as generator, against quadrature."""

    def one() -> None:
        pyro.sample("x", dist.StudentT(3.0, torch.tensor(0.5), 1.0))

    generator = nn.Linear(1, 1)
    generator.weight.data.fill_(1.0)
    generator.bias.data.zero_()
    options = {"generator": generator, "frame": None, "init_scale": 1.0}
    method = PVI(one, sgd(0.0), 3, 100_000, noise_scale=0.7, guide_options=options)
    guide = method.guide
    guide()
    guide.loc.data.zero_()
    z = guide.particles.detach().clone()
    method.elbo.loss_and_grads(one, guide)
    found = 3 * guide.particles.grad
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    eta, weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())
    start = z.clone().requires_grad_()
    x = start + 0.7 * eta  # (particles, nodes)
    log_q = Normal(z, 0.7).log_prob(x.reshape(1, -1)).logsumexp(0).reshape(x.shape)
    variation = ((log_q - dist.StudentT(3.0, 0.5, 1.0).log_prob(x)) @ weights).sum()
    (expected,) = torch.autograd.grad(variation, start)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_plates_minibatches_and_parameters_of_the_model():
    y = torch.randn(6, 3)

    def regression(rows=None) -> None:
        shift = pyro.param("shift", torch.tensor(0.5))
        scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0), 1.0))
        with pyro.plate("groups", 3, dim=-1):
            x = pyro.sample("x", dist.Normal(0.0 * scale, 1.0))
            with pyro.plate("rows", 6, subsample=rows, dim=-2) as rows:
                pyro.sample("y", dist.Normal(x + shift, scale), obs=y[rows])

    method = PVI(regression, pyro.optim.Adam({"lr": 0.01}), 4, 2, guide_options={"frame": None})
    before = None
    for rows in torch.arange(6).split(2):
        assert abs(method.step(rows)) < 1e4
        before = before if before is not None else pyro.param("shift").item()
    assert pyro.param("shift").item() != before
    assert method.guide.sample_posterior(7)["x"].shape == (7, 3)


def test_recorded_steps_and_saved_state_go_on_bit_identically(tmp_path):
    def steps(method: PVI, number: int) -> list[float]:
        pyro.set_rng_seed(5)
        return [method.step() for _ in range(number)]

    losses = []
    for compile in (False, "trace"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        method = make(lr=0.01, compile=compile)
        losses.append(steps(method, 6))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    state = method.get_state()
    pyro.get_param_store().save(tmp_path / "params.pt")
    expected = steps(method, 3)
    pyro.clear_param_store()
    fresh = make(lr=0.01)
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "params.pt")
    fresh.evaluate_loss()  # with the checks of a first step, which draw
    fresh.set_state(state)
    assert steps(fresh, 3) == pytest.approx(expected, rel=1e-12)


def test_finds_a_skewed_density():
    """The density is normalised, so that the loss is the KL divergence."""

    def skewed() -> None:
        mixing = Categorical(torch.tensor([0.7, 0.3]))
        parts = Normal(torch.tensor([-1.0, 0.5]), torch.tensor([0.4, 1.0]))
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        density = MixtureSameFamily(mixing, parts).log_prob(x)
        pyro.factor("density", density - dist.Normal(0.0, 10.0).log_prob(x))

    options = {"generator": MLP(1, 1, hidden=(32,)), "frame": None, "init_scale": 2.0}
    optim = pyro.optim.ClippedAdam({"lr": 1e-2})
    method = PVI(skewed, optim, 50, 2, guide_options=options, noise_scale=0.5, compile="trace")
    for _ in range(600):
        method.step()
    loss = sum(method.evaluate_loss() for _ in range(50)) / 50
    assert abs(loss) < 0.05
    draws = method.guide.sample_posterior(20_000)["x"]
    assert draws.mean().item() == pytest.approx(-0.55, abs=0.1)
    assert draws.std().item() == pytest.approx((0.7 * 1.16 + 0.3 * 1.25 - 0.3025) ** 0.5, abs=0.1)


def test_arguments_out_of_range():
    for name, value in (
        ("num_particles", 1),
        ("num_samples", 0),
        ("particle_lr", 0.0),
        ("regularization", -1.0),
    ):
        with pytest.raises(ValueError, match=name):
            PVI(model, sgd(0.1), **{name: value})

    class Mixing(nn.Linear):
        def forward(self, noise: Tensor) -> Tensor:
            return super().forward(noise - noise.mean())

    options = {"generator": Mixing(2, 2), "noise_dim": 2, "frame": None}
    with pytest.raises(ValueError, match="mixes the rows"):
        PVI(model, sgd(0.1), 3, guide_options=options).step()
