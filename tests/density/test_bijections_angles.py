# SPDX-License-Identifier: Apache-2.0
"""Latent angles within one turn of the circle."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_feasible
from scipy import stats
from torch.distributions import biject_to

from pyro_implicit.density import Target
from pyro_implicit.density.bijections import on_one_turn, one_turn, within_turn

FAMILIES = {
    "alone": lambda angle: angle,
    "event": lambda angle: angle.expand([2]).to_event(1),
    "masked": lambda angle: angle.mask(torch.tensor(True)),
    "skewed": lambda angle: dist.SineSkewed(
        angle.expand([2]).to_event(1), torch.tensor([0.1, -0.3]).double()
    ),
    "bivariate": lambda angle: dist.SineBivariateVonMises(
        0.4, -0.2, angle.concentration, torch.ones(()).double(), 0.1
    ),
}


def _log_turn(u, centre, width=1.0):
    """Return log N(u) minus the logarithm of the sum over 21 turns."""
    turns = 2 * math.pi * torch.arange(-10.0, 11.0).double()
    log_all = -0.5 * ((u - centre).unsqueeze(-1) + turns).square() / width**2
    return -0.5 * (u - centre).square() / width**2 - log_all.logsumexp(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_density_is_that_of_the_angle_and_of_its_number_of_turns(family):
    fn = FAMILIES[family](dist.VonMises(torch.tensor(0.5).double(), torch.tensor(2.0).double()))

    def model(obs=None):
        x = pyro.sample("x", dist.Normal(torch.zeros(()).double(), 1.0))
        pyro.sample("phi", fn, obs=obs)
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.3).double())

    target = Target(model)
    assert {name: tuple(value.shape) for name, value in target.turns.items()} == {
        "phi": tuple(fn.event_shape)
    }
    assert target.transforms["phi"].domain.event_dim == len(fn.event_shape)
    torch.manual_seed(0)
    latent = 4 * torch.randn(50, target.latent_dim, dtype=torch.float64)
    values = target.constrain(latent)
    assert (values["phi"].abs() <= math.pi).all()
    angle = latent[:, 1:].reshape(50, *fn.event_shape)
    assert torch.allclose(values["phi"].cos(), angle.cos(), atol=1e-12)
    assert torch.allclose(values["phi"].sin(), angle.sin(), atol=1e-12)
    log_turn = _log_turn(latent[:, 1:], 0.0).sum(-1)
    x = latent[:, 0]
    own = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(x, 1.0).log_prob(torch.tensor(0.3))
    expected = own + fn.log_prob(angle) + log_turn
    assert torch.allclose(target.log_prob(latent), expected, atol=1e-6)
    # An observed angle is no latent variable.
    assert not Target(model, torch.full(fn.event_shape, 0.1).double()).turns


@pytest.mark.parametrize("event", [False, True])
def test_a_uniform_phase_is_an_angle_of_another_period(event):
    low, high = torch.tensor([1.0, -2.0]).double(), torch.tensor([4.0, 0.5]).double()
    fn = dist.Uniform(low, high).to_event(1) if event else dist.Uniform(low, high)

    def model():
        with pyro.plate("phases", 2) if not event else contextlib.nullcontext():
            pyro.sample("phase", fn)

    centre = torch.tensor([3.8, -1.9]).double()
    target = Target(on_one_turn(model, {"phase": centre}))
    torch.manual_seed(0)
    latent = centre + 3 * torch.randn(2000, 2, dtype=torch.float64)
    phase = target.constrain(latent)["phase"]
    assert (phase >= low).all() and (phase < high).all()
    turns = (latent - phase) / (high - low)
    assert torch.allclose(turns, turns.round(), atol=1e-9) and len(turns.round().unique()) > 4
    unit = (high - low) / (2 * math.pi)
    log_turn = _log_turn((latent - centre) / unit, 0.0).sum(-1)
    assert torch.allclose(target.log_prob(latent), log_turn - (high - low).log().sum(), atol=1e-6)
    # All turns together have the density of the phase.
    counts = torch.arange(-4.0, 5.0).double()
    all_turns = torch.tensor([2.2, 0.1]).double() + torch.cartesian_prod(counts, counts) * (
        high - low
    )
    assert target.log_prob(all_turns).exp().sum() == pytest.approx(1 / (3.0 * 2.5), rel=1e-6)
    again = target.constrain(target.unconstrain({"phase": phase}))["phase"]
    assert torch.allclose((again - phase) / (high - low), torch.zeros(2).double(), atol=1e-9)


def test_a_phase_never_reaches_its_upper_bound():
    """There a uniform distribution of torch has no density."""
    low, high = torch.tensor(0.0), torch.tensor(2 * math.pi)
    transform = biject_to(one_turn(torch.tensor(3.0), low, high))
    ends = torch.tensor([-1e-8, -1e-7, 2 * math.pi - 1e-7, 4 * math.pi])
    assert dist.Uniform(low, high).log_prob(transform(ends)).isfinite().all()


def test_draws_of_an_angle_become_draws_of_its_coordinate():
    """Also those near the end of the turn, which belong to the next one by up to a half."""
    torch.manual_seed(0)
    centre = torch.tensor(2.0)
    transform = biject_to(one_turn(centre))
    angle = 2 * math.pi * torch.rand(20_000)
    u = transform.inv(angle)
    assert torch.allclose(within_turn(transform(u) - angle), torch.zeros(()), atol=1e-5)
    grid = torch.linspace(-10.0, 10.0, 4001).double()
    below = _log_turn(grid, 0.0).exp().cumsum(0).numpy()

    def cdf(x):
        return np.interp(x, grid.numpy(), below / below[-1])

    assert stats.kstest((u - centre).numpy(), cdf).pvalue > 0.01
    assert stats.kstest(within_turn(u - centre).numpy(), cdf).pvalue < 1e-3


def test_gradients_are_those_of_the_density():
    def model():
        phi = pyro.sample("phi", dist.VonMises(torch.tensor(0.5).double(), 2.0))
        pyro.sample("y", dist.VonMises(phi, 3.0), obs=torch.tensor(2.0).double())

    turned = on_one_turn(model, {"phi": torch.tensor(1.5).double()})
    target = Target(turned)
    latent = torch.tensor([[-4.2], [-1.7], [0.3], [4.6], [5.0]]).double().requires_grad_()
    assert torch.autograd.gradcheck(target.log_prob, latent)
    assert not target.turns  # the model says where its turn is


def test_transformed_angles_are_named():
    """Their period may be another one."""
    fn = dist.TransformedDistribution(
        dist.VonMises(0.0, 1.0), dist.transforms.AffineTransform(0, 2)
    )

    def model():
        pyro.sample("x", fn.expand([2]).to_event(1))

    with pytest.warns(
        UserWarning, match="latent 'x' is a transformed angle.*Cure: .*the angle itself"
    ):
        assert not Target(model).turns


def test_an_angle_can_begin_at_the_origin():
    def model():
        pyro.sample("x", dist.Gamma(0.001, 0.001))
        pyro.sample("phi", dist.VonMises(0.0, 1.0))

    assert Target(model, init_loc_fn=init_to_feasible).init_loc.tolist() == [0.0] * 2
