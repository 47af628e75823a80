# SPDX-License-Identifier: Apache-2.0
"""Models, guides and short training runs that the tests of several ELBOs share.

The tests run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, SVI
from pyro.infer.autoguide import init_to_mean
from pyro.optim import ClippedAdam
from torch import Tensor, nn

from pyro_implicit import (
    AutoImplicit,
    AutoSemiImplicit,
    Implicit,
    ResidualGenerator,
    SemiImplicit,
)
from pyro_implicit.infer import ImplicitELBO, ImplicitSite

PRECISION = torch.tensor([[1.5, 0.4], [0.4, 1.0]], dtype=torch.float64)
PRECISION_3D = torch.tensor(
    [[1.5, 0.4, 0.0], [0.4, 1.0, -0.3], [0.0, -0.3, 0.8]], dtype=torch.float64
)


def drawn(q: Implicit) -> ImplicitSite:
    """A site without model or guide."""
    noise, value, _ = q.draw()
    return ImplicitSite("x", q, noise, value, value)


def linear(*batch_shape: int) -> SemiImplicit:
    """theta = A z + b + s eta in three dimensions, with learnable s."""
    scale = torch.tensor([0.4, 0.6, 0.8], requires_grad=True)
    return SemiImplicit(nn.Linear(2, 3), 2, scale).expand(batch_shape)


def gaussian(q: SemiImplicit) -> dist.MultivariateNormal:
    """The exact distribution of a `linear` one."""
    weight, bias = q.generator.weight, q.generator.bias
    return dist.MultivariateNormal(bias, weight @ weight.T + q.scale.square().diag())


def entropy_of(scale: float, dim: int = 1) -> float:
    """The entropy of a Gaussian."""
    return dim * (0.5 * math.log(2 * math.pi * math.e) + math.log(scale))


def check_gradient_of_the_entropy(elbo: ImplicitELBO, q: SemiImplicit, num_unsettled: int) -> None:
    """Compare the mean gradient of 35 steps with that of the exact entropy of a `linear` q."""
    inputs = [q.scale, *q.generator.parameters()]
    exact = torch.autograd.grad(gaussian(q).entropy(), inputs, materialize_grads=True)
    rounds = []
    for _ in range(num_unsettled + 35):
        parts = elbo.score_parts(drawn(q), None)
        assert parts.score_function == 0
        gradients = torch.autograd.grad(-parts.entropy_term.mean(), inputs)
        rounds.append(torch.cat([g.flatten() for g in gradients]))
    rounds = torch.stack(rounds[num_unsettled:])
    error = rounds.mean(0) - torch.cat([g.flatten() for g in exact])
    standard_error = rounds.std(0) / 35**0.5
    assert (error.abs() < 4 * standard_error).all()
    assert standard_error.max() < 0.02


def guide_of(generator: Callable, noise_dim: int = 2, **options: Any) -> Callable[[], Tensor]:
    """A guide of one implicit site."""
    return lambda: pyro.sample("x", Implicit(generator, noise_dim, **options))


def quartic(x: Tensor) -> Tensor:
    """A log-density in two dimensions that is not quadratic: its second derivative varies."""
    return -0.5 * ((x @ PRECISION) * x).sum(-1) - 0.1 * x.pow(4).sum(-1)


def quartic_model() -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 100.0).to_event(1))
    prior = dist.Normal(torch.zeros(2), 100.0).log_prob(x).sum(-1)
    pyro.factor("density", quartic(x) - prior)


def gaussian_3d() -> None:
    pyro.sample("x", dist.MultivariateNormal(torch.ones(3), precision_matrix=PRECISION_3D))


def curved(size: int = 3) -> ResidualGenerator:
    """A residual generator far from affine."""
    generator = ResidualGenerator(size, 2, (6,))
    for parameter in generator.parameters():
        nn.init.normal_(parameter, std=0.4)
    return generator


class FramedGuide(nn.Module):
    """A semi-implicit guide with an affine map of the draws, like the frame of an autoguide."""

    def __init__(self, generator: nn.Module | None = None) -> None:
        super().__init__()
        if generator is None:
            generator = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
        self.generator = generator
        self.noise_dim = getattr(generator, "noise_dim", 2)
        self.log_scale = nn.Parameter(torch.tensor([-0.5, -0.2]))
        self.factor = torch.tensor([2.0, 0.5])
        self.double()

    def forward(self) -> None:
        q = SemiImplicit(self.generator, self.noise_dim, self.log_scale.exp())
        frame = dist.transforms.AffineTransform(1.0, self.factor, event_dim=1)
        pyro.sample("x", dist.TransformedDistribution(q, [frame]))


def train(
    model: Callable, guide: Callable, elbo: ELBO, steps: int, lr: float, final: float = 0.05
) -> None:
    """Train with a learning rate that falls to the share `final` of `lr`."""
    svi = SVI(model, guide, ClippedAdam({"lr": lr, "lrd": final ** (1 / steps)}), elbo)
    for _ in range(steps):
        svi.step()


def fit(model: Callable, guide: Callable, elbo: ELBO, steps: int, lr: float) -> dict[str, Tensor]:
    """Train the guide and return 4000 draws."""
    train(model, guide, elbo, steps, lr)
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        return guide()


def check_finds_a_gaussian_roughly(elbo: ELBO) -> None:
    """Train an affine guide of `gaussian_3d` and compare its moments with the exact ones."""
    guide = AutoImplicit(
        gaussian_3d,
        lambda n: ResidualGenerator(n, n, ()),
        init_loc_fn=init_to_mean,
        frame=None,
        init_scale=0.5,
    )
    train(gaussian_3d, guide, elbo, 200, lr=0.03, final=0.1)
    with torch.no_grad():
        matrix = guide.generator.linearise(torch.zeros(3)).jacobian() * guide.scale[:, None]
        center = guide.loc + guide.scale * guide.generator(torch.zeros(3))
    covariance = torch.linalg.inv(PRECISION_3D)
    assert (matrix @ matrix.T - covariance).norm() / covariance.norm() < 0.25
    assert (center - 1).norm() < 0.25


def check_finds_a_correlated_gaussian(
    generator: nn.Module, elbo: ELBO, steps: int, atol: float
) -> None:
    """Train a semi-implicit guide; compare its mean up to `atol`, its covariance up to 0.1 more."""
    mean, covariance = torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0.8], [0.8, 1.0]])

    def model() -> None:
        pyro.sample("x", dist.MultivariateNormal(mean, covariance))

    guide = AutoSemiImplicit(model, generator, frame=None, noise_scale="learn")
    guide()
    guide.scale, guide.noise_scale = torch.ones(2), torch.full((2,), 0.5)
    train(model, guide, elbo, steps, lr=0.01)
    draws = guide.sample_posterior(20_000)["x"]
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=atol)
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0, atol=atol + 0.1)
