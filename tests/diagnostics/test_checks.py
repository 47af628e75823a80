# SPDX-License-Identifier: Apache-2.0
"""Modes that a guide's draws leave out, on mixtures whose masses are known."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.checks import uncovered_modes

pytestmark = pytest.mark.usefixtures("double")


class Mixture(dist.MixtureSameFamily):
    support = constraints.real_vector


LOCS = torch.tensor([[-20.0, 0.0], [20.0, 5.0], [0.0, 30.0]], dtype=torch.double)
SDS = torch.tensor([[1.0, 3.0], [0.5, 0.5], [2.0, 1.0]], dtype=torch.double)


def density(weights):
    mixture = Mixture(dist.Categorical(torch.tensor(weights)), dist.Normal(LOCS, SDS).to_event(1))
    return Target(lambda: pyro.sample("x", mixture))


def draws(component: int, num: int = 1000):
    return LOCS[component] + SDS[component] * torch.randn(num, 2)


def test_masses_against_the_mixture():
    """Of a guide on one component, the mass is the odds against that component."""
    torch.manual_seed(0)
    weights = [0.5, 0.3, 0.2]
    found = uncovered_modes(density(weights), LOCS, draws(0))
    expected = [0.5, 0.3 / 0.8, 0.2 / 0.7]
    torch.testing.assert_close(found.mass, torch.tensor(expected), rtol=0.05, atol=0.02)
    # The bulk is that of 99 %.
    torch.testing.assert_close(found.draws, torch.tensor([0.99, 0.0, 0.0]), rtol=0, atol=0.01)
    assert found.uncovered.tolist() == [False, True, True]
    # Told the evidence, it knows each share of the whole.
    found = uncovered_modes(density(weights), LOCS, draws(0), log_evidence=0.0)
    odds = torch.tensor(weights)
    torch.testing.assert_close(found.mass, odds / (1 + odds), rtol=1e-3, atol=1e-3)


def test_a_guide_on_all_modes_covers_them():
    torch.manual_seed(0)
    u = torch.cat([draws(0, 500), draws(1, 300), draws(2, 200)])
    assert not uncovered_modes(density([0.5, 0.3, 0.2]), LOCS, u).uncovered.any()
    few = torch.cat([draws(0, 990), draws(1, 10)])  # a thirtieth of what is due
    found = uncovered_modes(density([0.5, 0.3, 0.2]), LOCS[:2], few, log_evidence=0.0)
    assert found.uncovered.tolist() == [False, True]


@pytest.mark.parametrize(("number", "lost"), [(22, True), (24, False)])
def test_a_tenth_of_the_draws_that_a_mode_is_due_covers_it(number, lost):
    """The second mode has the mass 0.3 / 1.3 of itself and the whole: a tenth are 23 of 1,000."""
    torch.manual_seed(0)
    few = torch.cat([draws(0, 1000 - number), LOCS[1].expand(number, 2)])
    found = uncovered_modes(density([0.5, 0.3, 0.2]), LOCS[:2], few, log_evidence=0.0)
    assert found.draws[1].item() == pytest.approx(number / 1000)
    assert found.uncovered.tolist() == [False, lost]


def test_small_modes_do_not_count():
    torch.manual_seed(0)
    u = torch.cat([draws(0, 500), draws(1, 500)])
    assert not uncovered_modes(density([0.499, 0.499, 0.002]), LOCS, u).uncovered.any()


def test_a_spike_without_mass_does_not_count():
    """Far above all draws in density, next to nothing in volume; as an optimiser finds in necks."""
    torch.manual_seed(0)
    spiky = Mixture(
        dist.Categorical(torch.tensor([1.0, 1e-6])),
        dist.Normal(LOCS[:2], torch.tensor([[1.0, 3.0], [1e-6, 1e-6]])).to_event(1),
    )
    found = uncovered_modes(Target(lambda: pyro.sample("x", spiky)), LOCS[:2], draws(0))
    assert spiky.log_prob(LOCS[1]) > spiky.log_prob(LOCS[0]) + 10
    assert not found.uncovered.any()


def test_a_ridge_without_curvature_does_not_count():
    """Along the second coordinate the density is flat at the given point."""
    torch.manual_seed(0)

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(False))
        pyro.factor("density", -0.5 * x[0] ** 2 - 0.25 * (x[1] - 1).clamp(min=0) ** 4)

    u = torch.randn(1000, 2) * torch.tensor([1.0, 0.5])
    found = uncovered_modes(Target(model), torch.tensor([[0.0, 0.5]]), u)
    assert found.mass.item() < 0.9 and not found.uncovered.any()
