# SPDX-License-Identifier: Apache-2.0
"""The draws by which methods estimate the entropy of a site, and how they are standardised."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit import MLP, Implicit, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import choose_covariance, site_draws
from tests.infer.helpers import drawn


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (Implicit(MLP(3, 3), 3), "full"),
        (Implicit(MLP(3, 4), 3), "diagonal"),  # on a surface
        (SemiImplicit(MLP(3, 4), 3, 0.1), "full"),  # with noise around it
        (SemiImplicit(MLP(3, 6), 3, 0.1), "diagonal"),  # too few draws
    ],
)
def test_automatic_covariance(q, expected):
    site = drawn(q.expand([10]))
    assert choose_covariance("auto", site, 10, site.value.shape[-1]) == expected


@pytest.mark.parametrize(
    ("num_particles", "plates", "shape"),
    [(1, (), (20, 2)), (4, (), (20, 2)), (4, (3, 1), (3, 1, 20, 2)), (30, (), (30, 2))],
)
def test_draws_of_all_particles_count(num_particles, plates, shape):
    """The draws of the model come first, and more follow if these are fewer."""
    particles = (num_particles,) if num_particles > 1 else ()
    site = drawn(Implicit(MLP(3, 2), 3).expand(particles + plates))
    found = site_draws(site, num_particles, 20)
    assert found.shape == shape
    own = site.value.reshape(num_particles, *plates, 2).movedim(0, -2)
    assert found[..., :num_particles, :].equal(own)
    fresh = site_draws(site, num_particles, 20, fresh=True)
    assert fresh.shape == shape and not torch.isin(fresh, own).any()
    twice = site_draws(site, num_particles, 20, to_vectors=lambda values: 2 * values)
    assert twice[..., :num_particles, :].equal(2 * own)


def test_particles_of_different_distributions_have_draws_of_their_own():
    q = Implicit(MLP(3, 2, context_dim=1), 3, context=torch.randn(4, 1, 1))
    site = drawn(q.expand([4, 5]))
    assert site_draws(site, 4, 20).shape == (4, 5, 20, 2)
