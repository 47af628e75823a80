# SPDX-License-Identifier: Apache-2.0
"""Models that cut the gradient of a latent are told so, and no others."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import diagnose
from pyro_implicit.density import Target
from pyro_implicit.density.checks.numerics import warn_of_lost_gradients


def regression(loc_of):
    def model():
        x = pyro.sample("x", dist.Laplace(torch.zeros(3), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(loc_of(x), scale), obs=torch.tensor([1.0, -1.0, 2.0]))

    return model


LOST = {
    "detach": lambda x: x.detach(),
    "of one latent": lambda x: torch.cat([x[:2], x[2:].detach()]),
    "no_grad": torch.no_grad()(lambda x: 4 * x.sigmoid()),
}
FINE = {
    "kink": lambda x: x.abs() + x.relu(),
    "jump": lambda x: torch.where(x > 0, x, 1.0),
    "rounded": lambda x: x.round(),
    "random": lambda x: x + torch.randn(3),
    "large": lambda x: 1e3 * x,
    "steep": lambda x: 1e6 + 1e6 * x,
    "constant": lambda x: torch.zeros(3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOST)
def test_gradients_that_a_model_cuts(name, dtype):
    pyro.set_rng_seed(1)
    torch.set_default_dtype(dtype)
    density = Target(regression(LOST[name]))
    with pytest.warns(UserWarning, match="is not its slope.*depends on 'x'\\..*Cure: compute"):
        warn_of_lost_gradients(density)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_others(name, dtype):
    torch.set_default_dtype(dtype)
    density = Target(regression(FINE[name]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not its slope")
        warnings.filterwarnings("ignore", message="Target runs")
        warn_of_lost_gradients(density)


@pytest.mark.parametrize("seed", range(3))
def test_slopes_of_a_chaotic_density_tell_nothing(seed):
    """Difference quotients are far below the slope, and not equal: no step resolves the waves."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("waves", torch.sin(1e9 * x))

    pyro.set_rng_seed(seed)
    torch.set_default_dtype(torch.float64)
    warn_of_lost_gradients(Target(model))


@pytest.mark.parametrize("loc", [2000.0, 1e6])
def test_steps_below_the_resolution_of_the_latents_tell_nothing(loc):
    def model():
        pyro.sample("far", dist.Normal(loc, 1.0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lost_gradients(Target(model))


def test_diagnose_says_so():
    pyro.set_rng_seed(1)
    draws = {"x": torch.randn(200, 3), "scale": torch.rand(200)}
    with pytest.warns(UserWarning, match="is not its slope"):
        model = regression(LOST["detach"])
        diagnose(model, draws, modes=None, num_transitions=0, num_samples=100, progress=False)
