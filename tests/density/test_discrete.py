# SPDX-License-Identifier: Apache-2.0
"""Discrete latents are summed out, as Pyro's NUTS and TraceEnum_ELBO do."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.indexing import Vindex

from pyro_implicit.density import Target, find_modes
from pyro_implicit.density.checks.numerics import blame

pytestmark = pytest.mark.usefixtures("double")


Y = torch.tensor([-1.9, 2.2, 1.7, -2.3, 2.0], dtype=torch.float64)


def mixture():
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    with pyro.plate("rows", 5):
        z = pyro.sample("z", dist.Bernoulli(weight)).long()
        pyro.sample("y", dist.Normal(loc[z], 1.0), obs=Y)


def hmm():
    stay = pyro.sample("stay", dist.Dirichlet(torch.ones(3, 3)).to_event(1))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    x = torch.tensor(0)
    for t in pyro.markov(range(5)):
        x = pyro.sample(f"x_{t}", dist.Categorical(stay[x]))
        pyro.sample(f"y_{t}", dist.Normal(loc[x], 1.0), obs=Y[t])


def spike_and_slab():
    """A choice outside and choices in a plate, of which continuous latents depend, too."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    any_effect = pyro.sample("any", dist.Bernoulli(0.7))
    with pyro.plate("features", 3):
        is_in = pyro.sample("is_in", dist.Bernoulli(0.1 + 0.8 * any_effect))
        slope = pyro.sample("slope", dist.Normal(0.0, 0.1 + is_in))
        with pyro.plate("rows", 5):
            pyro.sample("y", dist.Normal(slope, scale), obs=Y.unsqueeze(-1))
    pyro.sample("end", dist.Normal(0.0, 1.0))


def crossed():
    """Two levels of assignments, one inside the other."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("cells", 2, dim=-2):
        kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.3, 0.7])))
        with pyro.plate("rows", 5, dim=-1), poutine.mask(mask=Y < 2):
            word = pyro.sample("word", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(Vindex(loc)[kind, word], 1.0), obs=Y)


MODELS = [mixture, hmm, spike_and_slab, crossed]


@pytest.mark.parametrize("model", MODELS)
def test_value_and_gradient_of_nuts(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        density = Target(model)
        latent = 0.7 * torch.randn(4, density.latent_dim)
        value, score = density.score(latent)
    assert density.is_vectorized
    _, potential, _, _ = initialize_model(model)
    for k in range(4):
        parts = {
            name: part[k].clone().requires_grad_() for name, part in density.split(latent).items()
        }
        expected = -potential(parts)
        if model is crossed:  # where NUTS counts each of a masked word's values as one
            expected = expected - 4 * math.log(3)
        torch.testing.assert_close(value[k], expected.detach())
        gradient = torch.autograd.grad(expected, list(parts.values()))
        torch.testing.assert_close(score[k], torch.cat([part.reshape(-1) for part in gradient]))


@pytest.mark.parametrize("model", MODELS)
def test_value_of_trace_enum_elbo(model):
    density = Target(model)
    latent = 0.7 * torch.randn(1, density.latent_dim)
    values = {name: value[0] for name, value in density.constrain(latent).items()}

    def guide():
        plates = {"slope": pyro.plate("features", 3)} if model is spike_and_slab else {}
        for name, value in values.items():
            with plates.get(name, poutine.block(hide=[])):
                event_dim = value.dim() - (name in plates)
                pyro.sample(name, dist.Delta(value, event_dim=event_dim))

    elbo = TraceEnum_ELBO(max_plate_nesting=2)
    expected = -elbo.loss(config_enumerate(model), guide)
    found = density.log_prob(latent).item()
    for name, part in density.split(latent).items():
        transform = density.transforms[name]
        found -= transform.log_abs_det_jacobian(part, transform(part)).sum().item()
    assert found == pytest.approx(expected)


def test_modes_of_a_mixture():
    modes = find_modes(Target(mixture), num_starts=10)
    assert len(modes.loc) == 2
    locs = modes.loc[:, 1:].sort(dim=-1).values
    torch.testing.assert_close(locs, torch.tensor([[-2.0, 1.9]]).expand(2, 2), atol=0.3, rtol=0)


def test_what_pyro_cannot_enumerate_is_refused():
    def counts(fn):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        k = pyro.sample("k", fn)
        pyro.sample("y", dist.Normal(x + k.sum(), 1.0), obs=torch.tensor(1.0))

    message = (
        r"site 'k' is a discrete latent \(Poisson\) that Pyro cannot enumerate.*Cure: fit or refine"
    )
    with pytest.raises(ValueError, match=message):
        Target(counts, dist.Poisson(3.0))
    message = r"site 'k' is a discrete latent \(Bernoulli\) .*Cure: a plate instead of .to_event"
    with pytest.raises(ValueError, match=message):
        Target(counts, dist.Bernoulli(0.5).expand([3]).to_event(1))


def test_a_model_that_does_not_broadcast_is_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(x if z else -x, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(ValueError, match="latents 'z' cannot be summed out.*Cure: .*broadcasts"):
        Target(model)


def test_scales_that_differ_within_a_sum_have_a_cure_of_their_own():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        with poutine.scale(scale=3.0):
            pyro.sample("y", dist.Normal(x + z, 1.0), obs=torch.tensor(1.0))

    message = r"^sites \['y', 'z'\].*different scales.*one poutine.scale for all these sites$"
    with pytest.raises(ValueError, match=message):
        Target(model)


def test_a_model_of_discrete_latents_alone():
    def model():
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(RuntimeError, match="no continuous latents: z are discrete.*Cure"):
        Target(model)


def test_the_sum_is_blamed():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Uniform(0 * x, 1.0 + z), obs=torch.tensor(-1.0))

    assert "site 'sum over z' at 2 of 2" in blame(Target(model), torch.zeros(2, 1))
