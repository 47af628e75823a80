# SPDX-License-Identifier: Apache-2.0
"""Latent variables whose prior is a mixture of components with one support."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.distributions import biject_to

from pyro_implicit.density.target import Target

WEIGHTS = torch.tensor([0.3, 0.7])
COMPONENTS = {
    "real": lambda: dist.Normal(torch.tensor([-2.0, 1.0]), torch.tensor([0.5, 1.0])),
    "positive": lambda: dist.Gamma(torch.tensor([2.0, 9.0]), 1.0),
    "vector": lambda: dist.Normal(torch.zeros(2, 3), torch.tensor([[0.1], [1.0]])).to_event(1),
    "simplex": lambda: dist.Dirichlet(torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", COMPONENTS)
def test_density_is_that_of_the_sum_over_components(kind):
    """Against an explicit sum and the bijection of one component; Pyro's guides work, too."""
    parts = COMPONENTS[kind]()

    def model():
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(WEIGHTS.double()), parts))

    target = Target(model)
    latent = torch.randn(5, target.latent_dim)
    own = latent if parts.event_dim else latent.squeeze(-1)
    transform = biject_to(parts.support)
    x = transform(own)
    heights = parts.log_prob(x.unsqueeze(-1 - parts.event_dim)).exp() @ WEIGHTS.double()
    change = transform.log_abs_det_jacobian(own, x)
    change = change.sum(-1) if change.dim() > 1 else change
    torch.testing.assert_close(target.log_prob(latent), heights.log() + change)
    torch.testing.assert_close(target.constrain(latent)["x"], x)
    guide = AutoNormal(model)
    assert torch.isfinite(parts.log_prob(guide()["x"].detach())).all()
