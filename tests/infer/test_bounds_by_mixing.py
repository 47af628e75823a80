# SPDX-License-Identifier: Apache-2.0
"""SIVI and UIVI, whose conditional is as wide as the posterior, find one of closed form."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_implicit import SIVI_ELBO, UIVI_ELBO, AutoSemiImplicit


@pytest.mark.parametrize(
    "elbo, num_steps, lr",
    [
        (SIVI_ELBO(32, 100, compile="trace"), 400, 0.03),
        (UIVI_ELBO(32, compile="trace"), 150, 0.05),
    ],
)
def test_conjugate_gaussian(elbo, num_steps, lr):
    """A correlated Gaussian posterior; the conditional takes a good part of the spread."""
    x = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.5, -0.2]])
    y = torch.tensor([1.0, 0.5, -0.5])

    def model():
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)

    covariance = (torch.eye(2) + x.T @ x / 0.25).inverse()
    mean = covariance @ (x.T @ y) / 0.25
    guide = AutoSemiImplicit(
        model, lambda size: nn.Linear(size, size), 2, noise_scale=0.5, frame=None
    )
    arguments = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "T_max": num_steps}
    optimiser = pyro.optim.CosineAnnealingLR(arguments)
    svi = SVI(model, guide, optimiser, elbo)
    for _ in range(num_steps):
        svi.step()
        optimiser.step()
    draws = guide.sample_posterior(200_000)["weight"]
    assert ((draws.mean(0) - mean) / covariance.diag().sqrt()).abs().max() < 0.1
    assert (draws.T.cov() - covariance).norm() / covariance.norm() < 0.1
