# SPDX-License-Identifier: Apache-2.0
"""LIVI end to end: known posteriors recovered, misuse refused."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, GatedMLP, SemiImplicit
from pyro_implicit.guides import Frame
from pyro_implicit.infer import livi


def cosine_adam(lr, num_steps):
    arguments = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "T_max": num_steps}
    return pyro.optim.CosineAnnealingLR(arguments)


def train(model, guide, elbo, num_steps, lr=0.02):
    optimiser = cosine_adam(lr, num_steps)
    svi = SVI(model, guide, optimiser, elbo)
    for _ in range(num_steps):
        svi.step()
        optimiser.step()


def test_conjugate_regression():
    """Bayesian linear regression with correlated columns: mean and covariance are known."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator) @ torch.tensor(
        [[1.0, 0.8, 0.0], [0.0, 1.0, -0.6], [0.0, 0.0, 0.5]]
    )
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.7 * torch.randn(40, generator=generator)

    def model():
        weight = pyro.sample("weight", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Normal(x @ weight, 0.7), obs=y)

    precision = torch.eye(3) / 4 + x.T @ x / 0.49
    covariance = precision.inverse()
    mean = covariance @ (x.T @ y) / 0.49

    sd = covariance.diag().sqrt()
    frame = Frame(mean + sd, scale_tril=(1.5 * sd).diag())  # without the correlations
    guide = AutoSemiImplicit(model, noise_scale="learn", frame=frame)
    train(model, guide, LIVI_ELBO(32, compile="trace"), num_steps=300)
    train(model, guide, LIVI_ELBO(256, compile="trace"), num_steps=150, lr=0.005)
    draws = guide.sample_posterior(100_000)["weight"]
    # Four times the root mean square over five seeds, .021 and .019. A factor on the entropy is
    # one on the covariance.
    assert ((draws.mean(0) - mean) / sd).abs().max() < 0.08
    assert (draws.T.cov() - covariance).norm() / covariance.norm() < 0.08


def test_amortised_posterior_of_local_latents():
    """One latent per data point, subsampled: z ~ N(0, 1), y ~ N(z, 1/2), so z|y ~ N(.8y, .2)."""
    data = torch.linspace(-3, 3, 30)
    encoder = GatedMLP(1, 1, (16,), context_dim=1)

    def model():
        with pyro.plate("data", 30, subsample_size=10) as indices:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=data[indices])

    def guide():
        pyro.module("encoder", encoder)
        with pyro.plate("data", 30, subsample_size=10) as indices:
            pyro.sample("z", SemiImplicit(encode, 1, 0.05, data[indices, None]))

    def encode(noise, context):
        return encoder(noise, context).squeeze(-1)

    train(model, guide, LIVI_ELBO(16, compile="trace"), num_steps=400)
    with torch.no_grad():
        draws = SemiImplicit(encode, 1, 0.05, data[:, None]).sample((20_000,))
    sd = 0.2**0.5
    assert ((draws.mean(0) - 0.8 * data) / sd).abs().max() < 0.15
    torch.testing.assert_close(draws.std(0), torch.full((30,), sd), rtol=0.1, atol=0.0)


class Centre(nn.Module):
    """What batch normalisation does to a batch while it trains."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True) if self.training and x.dim() > 1 else x


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (nn.Dropout(0.5), "randomness of its own"),
        (Centre(), "mixes the rows of a batch"),
    ],
)
def test_generator_that_is_no_function_of_its_noise(layer, match):
    generator = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, 3))

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoSemiImplicit(model, generator, noise_dim=2, frame=None)
    with pytest.raises(ValueError, match=f"site '_AutoSemiImplicit_latent' .*{match}.*Cure: call"):
        LIVI_ELBO(8, log_det="exact").loss(model, guide)
    generator.eval()
    LIVI_ELBO(8, log_det="exact").loss(model, guide)


def test_smallest_refuses_more_noise_than_values():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="noise_dim <= 1.*Cure: fewer noise dimensions"):
        LIVI_ELBO(2, log_det="smallest").loss(
            model, AutoSemiImplicit(model, noise_dim=3, frame=None)
        )


def test_unconverged_lobpcg_warns_once_and_reports():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([40]).to_event(1))

    guide = AutoSemiImplicit(model, lambda size: GatedMLP(20, size), frame=None)
    guide()
    guide.generator.affine.weight.data *= torch.logspace(-0.5, 0.5, 20)
    elbo = LIVI_ELBO(2, log_det="smallest", max_iterations=1)
    with pytest.warns(UserWarning, match="LOBPCG left a relative residual.*Cure") as caught:
        elbo.loss(model, guide)
        elbo.loss(model, guide)
    assert len(caught) == 1 and elbo.residuals["_AutoSemiImplicit_latent"] > 0.1
    elbo = LIVI_ELBO(2, log_det="smallest", max_iterations=200)
    elbo.loss(model, guide)
    assert elbo.residuals["_AutoSemiImplicit_latent"] < 0.1


@pytest.mark.parametrize("log_det", ["exact", "stochastic"])
def test_out_of_memory(log_det, monkeypatch):
    """Torch's error, with a note that says what takes less."""

    def huge(*_):
        return torch.empty(2**50)

    monkeypatch.setattr(livi, "covariance_log_det", huge)
    monkeypatch.setattr(livi, "stochastic_log_det", huge)
    model = lambda: pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))  # noqa: E731
    svi = SVI(model, AutoSemiImplicit(model), pyro.optim.Adam({}), LIVI_ELBO(5, log_det))
    cheaper = log_det == "exact"
    with pytest.raises(RuntimeError, match="can't allocate memory") as found:
        svi.step()
    (note,) = found.value.__notes__
    assert note.startswith("LIVI_ELBO ran out of memory in a step of 5 particles. Cure: ")
    assert ('log_det="stochastic", which stores no Jacobian' in note) == cheaper
    assert note.endswith("a smaller num_particles, or minibatches")
