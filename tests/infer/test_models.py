# SPDX-License-Identifier: Apache-2.0
"""Ordinary Pyro models, as users write them: all run inside vmap and agree with the loop."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from torch.distributions import constraints

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit
from pyro_implicit.infer import ImplicitELBO

DATA = torch.tensor([0.3, -0.8, 1.5, 0.9, -0.1])
COUNTS = torch.tensor([2.0, 0.0, 1.0, 4.0, 3.0])


def simplex():
    probs = pyro.sample("probs", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.Categorical(probs), obs=torch.tensor([0, 2, 2, 1, 2]))


def correlation_matrix():
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0).expand([3]).to_event(1))
    y = torch.linspace(-1, 1, 12).reshape(4, 3)
    with pyro.plate("rows", 4):
        tril = scale.unsqueeze(-1) * factor
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=tril), obs=y)


def gaussian_process():
    length = pyro.sample("length", dist.Gamma(3.0, 2.0))
    noise = pyro.sample("noise", dist.Exponential(1.0))
    x = torch.linspace(0, 1, 5)
    kernel = torch.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
    covariance = kernel + (noise + 1e-3) * torch.eye(5)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), covariance), obs=DATA)


def differential_equation():
    rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
    start = pyro.sample("start", dist.Normal(1.0, 0.5))
    state, path = start, []
    for _ in range(5):
        state = state + 0.1 * (state - rate * state**3)
        path.append(state)
    with pyro.plate("times", 5):
        pyro.sample("y", dist.Normal(torch.stack(path), 0.3), obs=DATA)


def flat_prior_and_factor():
    loc = pyro.sample("loc", dist.ImproperUniform(constraints.real, (), ()))
    scale = pyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    pyro.factor("likelihood", dist.Normal(loc, scale).log_prob(DATA).sum())


def mixture_likelihood():
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    mixing = dist.Categorical(torch.stack([weight, 1 - weight]))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.MixtureSameFamily(mixing, dist.Normal(loc, 1.0)), obs=DATA)


def hierarchy_with_indexing():
    groups = torch.tensor([0, 1, 1, 2, 0])
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 3):
        slope = pyro.sample("slope", dist.StudentT(4.0, 0.0, spread))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.Poisson(slope[groups].exp()), obs=COUNTS)


def crossed_plates():
    with pyro.plate("rows", 5, dim=-2):
        row = pyro.sample("row", dist.Normal(0.0, 1.0))
    with pyro.plate("columns", 3, dim=-1):
        column = pyro.sample("column", dist.Normal(0.0, 1.0))
    y = torch.arange(15.0).reshape(5, 3) % 2
    with pyro.plate("rows_", 5, dim=-2), pyro.plate("columns_", 3, dim=-1):
        pyro.sample("y", dist.Bernoulli(logits=row + column), obs=y)


def masked_and_scaled():
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    observed = torch.tensor([True, False, True, True, False])
    with pyro.plate("data", 5), poutine.mask(mask=observed), poutine.scale(scale=2.5):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=DATA)
    pyro.sample("z", dist.Normal(loc, 1.0).mask(False), obs=torch.tensor(1.0))


def sequential_plate():
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    for i in pyro.plate("data", 5):
        pyro.sample(f"y_{i}", dist.Normal(loc, 1.0), obs=DATA[i])


def random_walk():
    drift = pyro.sample("drift", dist.Normal(0.0, 1.0))
    state = torch.tensor(0.0)
    for t in pyro.markov(range(5)):
        state = pyro.sample(f"state_{t}", dist.Normal(state + drift, 0.5))
        pyro.sample(f"y_{t}", dist.Normal(state, 0.5), obs=DATA[t])


def deterministic_and_parameter():
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.param("scale", torch.tensor(0.7), constraint=constraints.positive)
    mean = pyro.deterministic("mean", loc**2 + torch.where(loc > 0, loc, -loc))
    with pyro.plate("data", 5):
        pyro.sample("y", dist.Normal(mean, scale), obs=DATA)


def reparameterised():
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", 5):
        base = dist.Normal(0.0, scale)
        transforms = [dist.transforms.AffineTransform(1.0, 2.0)]
        u = pyro.sample("u", dist.Normal(0.0, scale))
        v = pyro.sample("v", dist.TransformedDistribution(base, transforms))
        pyro.sample("y", dist.Normal(u + v, 1.0), obs=DATA)


reparameterised = poutine.reparam(
    reparameterised, config={"u": LocScaleReparam(0.0), "v": TransformReparam()}
)

MODELS = [
    simplex,
    correlation_matrix,
    gaussian_process,
    differential_equation,
    flat_prior_and_factor,
    mixture_likelihood,
    hierarchy_with_indexing,
    crossed_plates,
    masked_and_scaled,
    sequential_plate,
    random_walk,
    deterministic_and_parameter,
    reparameterised,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_vmap_agrees_with_the_loop(model):
    torch.set_default_dtype(torch.float64)
    guide = AutoSemiImplicit(model, frame=None)
    losses, gradients = [], []
    for mode in ("vmap", False):
        elbo = LIVI_ELBO(4, vectorize_particles=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            elbo.loss(model, guide)
        assert elbo.vectorize_particles == mode
        pyro.set_rng_seed(1)
        losses.append(elbo.loss_and_grads(model, guide))
        params = dict(pyro.get_param_store().named_parameters())
        gradients.append({name: p.grad.clone() for name, p in params.items()})
        for param in params.values():
            param.grad = None
    assert math.isfinite(losses[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("mode", ["vmap", "plate", False])
def test_all_rows_of_obs_mask_have_their_prior(mode):
    """Pyro masks the latent variables of observed rows, which are improper without a density."""
    y, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    loc, rows = torch.tensor(0.5), torch.tensor([-1.0, 0.3, 2.0])

    def model():
        mean = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y, obs_mask=mask)

    def guide():
        pyro.sample("loc", dist.Delta(loc))
        with pyro.plate("rows", 3):
            pyro.sample("y_unobserved", dist.Delta(rows))

    found = ImplicitELBO(2, vectorize_particles=mode).loss(model, guide)
    seen = torch.cat([y[:2], rows])
    expected = dist.Normal(0.0, 1.0).log_prob(loc) + dist.Normal(loc, 1.0).log_prob(seen).sum()
    assert found == pytest.approx(-expected.item(), rel=1e-5)
