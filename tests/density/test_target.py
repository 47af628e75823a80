# SPDX-License-Identifier: Apache-2.0
"""Target against densities written by hand, with their derivatives."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import init_to_median, init_to_value
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor
from torch.nn.functional import (
    embedding_bag,
    logsigmoid,
    scaled_dot_product_attention,
    softplus,
)

from pyro_implicit import AutoSemiImplicit
from pyro_implicit.density.model import SubsampledError, trace_model
from pyro_implicit.density.target import Target

pytestmark = pytest.mark.usefixtures("double")


def looped(is_looped=True):
    """The warning that names what vmap cannot do, if it is due."""
    message = "Target runs the model one particle at a time"
    return pytest.warns(UserWarning, match=message) if is_looped else contextlib.nullcontext()


LOG_2PI = math.log(2 * math.pi)
Y = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)


def normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - torch.log(torch.as_tensor(scale)) - 0.5 * LOG_2PI


def stick_breaking(u: Tensor) -> tuple[Tensor, Tensor]:
    """A simplex and the log-determinant of its first coordinates, by autograd."""

    def first(u):
        # torch's StickBreakingTransform: each stick by a sigmoid, shifted by log(sticks left)
        z = torch.sigmoid(u - torch.arange(len(u), 0, -1).log())
        left = torch.cat([torch.ones(1), (1 - z).cumprod(0)[:-1]])
        return z * left

    x = first(u)
    jacobian = torch.stack([
        torch.autograd.grad(x[i], u, create_graph=True)[0] for i in range(len(u))
    ])  # fmt: skip
    return torch.cat([x, 1 - x.sum(0, keepdim=True)]), torch.linalg.slogdet(jacobian).logabsdet


# Each case: a model, its log-density of one vector of unconstrained latents, and their number.
def log_normal():
    pyro.sample("x", dist.LogNormal(0.5, 0.7))


def log_normal_formula(u):
    return normal(u[0], 0.5, 0.7)


def beta():
    pyro.sample("x", dist.Beta(2.0, 3.5))


def beta_formula(u):
    log_b = math.lgamma(2.0) + math.lgamma(3.5) - math.lgamma(5.5)
    return 2.0 * logsigmoid(u[0]) + 3.5 * logsigmoid(-u[0]) - log_b


def simplex():
    pyro.sample("x", dist.Dirichlet(torch.tensor([2.0, 0.5, 3.0])))


def simplex_formula(u):
    x, log_det = stick_breaking(u)
    log_b = math.lgamma(2.0) + math.lgamma(0.5) + math.lgamma(3.0) - math.lgamma(5.5)
    return (torch.tensor([1.0, -0.5, 2.0]) * x.log()).sum() - log_b + log_det


def ordered():
    base = dist.Normal(torch.zeros(3), 2.0).to_event(1)
    x = pyro.sample("x", dist.ImproperUniform(constraints.ordered_vector, (), (3,)))
    pyro.factor("prior", base.log_prob(x))


def ordered_formula(u):
    x = torch.stack([u[0], u[0] + u[1].exp(), u[0] + u[1].exp() + u[2].exp()])
    return normal(x, 0.0, 2.0).sum() + u[1] + u[2]


def hierarchy():
    """Vector latents in plates, after and before other sites, and data."""
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    pyro.deterministic("twice", 2 * scale)
    with pyro.plate("rows", 3):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), scale.unsqueeze(-1)).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(-1), 0.5), obs=Y)
    pyro.sample("slope", dist.Normal(scale, 1.0))


def hierarchy_formula(u):
    log_scale, x, slope = u[0], u[1:7].reshape(3, 2), u[7]
    scale = log_scale.exp()
    total = math.log(2) + normal(scale, 0.0, torch.tensor(2.0)) + log_scale
    total = total + normal(x, 0.0, scale).sum() + normal(Y, x.sum(-1), 0.5).sum()
    return total + normal(slope, scale, 1.0)


def improper():
    pyro.sample("free", dist.ImproperUniform(constraints.real, (), (2,)))
    x = pyro.sample("positive", dist.ImproperUniform(constraints.positive, (), ()))
    pyro.sample("y", dist.Exponential(x), obs=torch.tensor(1.5))
    pyro.sample("bounded", dist.Uniform(-1.0, 3.0))


def improper_formula(u):
    # Each flat prior leaves its Jacobian: exp(u) of the positive, p (1 - p) of the uniform.
    return u[2] - 1.5 * u[2].exp() + u[2] - softplus(u[3]) - softplus(-u[3])


def handled():
    with poutine.scale(scale=2.5):
        x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 3), poutine.mask(mask=torch.tensor([True, False, True])):
            pyro.sample("y", dist.Normal(x, 1.0), obs=Y)


def handled_formula(u):
    # The Jacobian is not the model's: no handler scales it.
    log_p = normal(u[0], 0.0, 1.0) - u[0] + normal(Y, u[0].exp(), 1.0)[[0, 2]].sum()
    return 2.5 * log_p + u[0]


def with_param():
    loc = pyro.param("loc", torch.tensor(0.7))
    pyro.sample("x", dist.Normal(loc, pyro.param("s", torch.tensor(2.0), constraints.positive)))


def with_param_formula(u):
    return normal(u[0], 0.7, 2.0)


def refusing():
    x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
    loc = 1.0 if x.item() > 1 else -1.0
    pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(loc))


def refusing_formula(u):
    loc = 1.0 if u[0] > 0 else -1.0
    return normal(u[0], 0.0, 1.0) + normal(u[0].exp(), loc, 1.0)


CASES = {
    case.__name__: (case, formula, dim)
    for case, formula, dim in [
        (log_normal, log_normal_formula, 1),
        (beta, beta_formula, 1),
        (simplex, simplex_formula, 2),
        (ordered, ordered_formula, 3),
        (hierarchy, hierarchy_formula, 8),
        (improper, improper_formula, 4),
        (handled, handled_formula, 1),
        (with_param, with_param_formula, 1),
        (refusing, refusing_formula, 1),
    ]
}


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_hessian(name):
    model, formula, dim = CASES[name]
    density = Target(model)
    assert density.latent_dim == dim and density.init_loc.shape == (dim,)
    with looped(name == "refusing"):
        assert density.is_vectorized == (name != "refusing")
    latent = torch.randn(5, dim)
    value, score = density.score(latent)
    expected = torch.stack([formula(row.requires_grad_()) for row in latent.clone().unbind()])
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(density.log_prob(latent).detach(), value, rtol=1e-12, atol=1e-12)
    gradients = torch.stack([torch.autograd.functional.jacobian(formula, row) for row in latent])
    torch.testing.assert_close(score, gradients, rtol=1e-9, atol=1e-9)
    hessians = torch.stack([torch.autograd.functional.hessian(formula, row) for row in latent])
    found = density.derivatives(latent)[2]
    torch.testing.assert_close(found, hessians, rtol=1e-8, atol=1e-8)
    assert not (value.requires_grad or score.requires_grad or found.requires_grad)


def test_log_prob_is_differentiable_and_batches_are_independent():
    density = Target(hierarchy)
    latent = torch.randn(4, 8, requires_grad=True)
    value = density.log_prob(latent)
    (gradient,) = torch.autograd.grad(value[2], latent)
    assert (gradient[[0, 1, 3]] == 0).all() and (gradient[2] != 0).all()
    torch.testing.assert_close(gradient[2], density.score(latent[2:3])[1][0])


def test_derivatives_under_no_grad():
    density = Target(log_normal)
    with torch.no_grad():
        value, score = density.score(torch.ones(1, 1))
        hessian = density.derivatives(torch.ones(1, 1))[2]
    torch.testing.assert_close(score, torch.full((1, 1), -0.5 / 0.49))
    torch.testing.assert_close(hessian, torch.full((1, 1, 1), -1 / 0.49))
    torch.testing.assert_close(value, normal(torch.ones(1), 0.5, 0.7))


def test_order_shapes_and_round_trip():
    density = Target(hierarchy)
    assert {name: tuple(shape) for name, shape in density.shapes.items()} == {
        "scale": (),
        "x": (3, 2),
        "slope": (),
    }
    assert list(density.shapes) == ["scale", "x", "slope"]
    latent = torch.randn(7, 8)
    values = density.constrain(latent)
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "scale": (7,),
        "x": (7, 3, 2),
        "slope": (7,),
    }
    torch.testing.assert_close(values["scale"], latent[:, 0].exp())
    torch.testing.assert_close(values["x"].reshape(7, 6), latent[:, 1:7])
    torch.testing.assert_close(density.unconstrain({**values, "other": latent}), latent)
    # Any batch can be constrained, a single vector too.
    assert density.constrain(latent[0])["x"].shape == (3, 2)
    assert density.constrain(latent.expand(2, 7, 8))["x"].shape == (2, 7, 3, 2)


@pytest.mark.parametrize("name", ["log_normal", "beta", "simplex", "ordered", "improper"])
def test_round_trip_of_constrained_sites(name):
    model, _, dim = CASES[name]
    density = Target(model)
    latent = torch.randn(6, dim)
    values = density.constrain(latent)
    torch.testing.assert_close(density.unconstrain(values), latent)
    if name == "simplex":
        assert values["x"].shape == (6, 3)
        torch.testing.assert_close(values["x"].sum(-1), torch.ones(6))
    if name == "ordered":
        assert (values["x"].diff(dim=-1) > 0).all()


def test_draws_of_the_prior():
    def model():
        a = pyro.sample("a", dist.LogNormal(1.0, 0.5))
        with pyro.plate("two", 2):
            pyro.sample("b", dist.Normal(3 * a.log(), 0.1))
        pyro.sample("flat", dist.ImproperUniform(constraints.positive, (), (2,)))
        pyro.sample("y", dist.Normal(a, 0.01), obs=torch.tensor(100.0))

    draws = Target(model).sample_prior(400)
    assert draws.shape == (400, 5)
    a, b, flat = draws.split([1, 2, 2], dim=-1)
    # The data say nothing, and a child follows its own parent.
    assert a.mean().item() == pytest.approx(1.0, abs=4 * 0.5 / 20)
    assert a.std().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(800))
    assert (b - 3 * a).std().item() == pytest.approx(0.1, abs=0.015)
    assert flat.abs().max() <= 2 and flat.max() > 1.9 and flat.min() < -1.9
    assert flat.std().item() == pytest.approx(4 / math.sqrt(12), abs=0.1)
    assert flat.T.corrcoef()[0, 1].abs() < 0.2
    assert not draws.requires_grad


def test_draws_of_the_prior_follow_the_seed():
    density = Target(improper)
    draws = []
    for seed in (3, 3, 4):
        pyro.set_rng_seed(seed)
        draws.append(density.sample_prior(3))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_where_the_search_begins():
    start = init_to_value(values={"x": torch.tensor(2.0)})
    density = Target(log_normal, init_loc_fn=start)
    torch.testing.assert_close(density.init_loc, torch.tensor([2.0]).log())
    # Flat priors, of which no median can be drawn, at 0.
    init_loc = Target(improper).init_loc
    assert (init_loc[:3] == 0).all() and init_loc[3].abs() < 1.5


@pytest.mark.parametrize(
    "init_loc_fn", [init_to_median, init_to_value(values={"x": torch.ones(2)})]
)
def test_reparameterised_inside_a_plate(init_loc_fn):
    def model(inside):
        reparam = poutine.reparam(config={"x": LocScaleReparam(0.5)})
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 2), reparam if inside else contextlib.nullcontext():
            x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(1.0))

    pyro.set_rng_seed(0)
    density = Target(model, True, init_loc_fn=init_loc_fn)
    pyro.set_rng_seed(0)
    outside = poutine.reparam(model, {"x": LocScaleReparam(0.5)})
    expected = Target(outside, False, init_loc_fn=init_loc_fn)
    assert density.shapes == expected.shapes == {"scale": (), "x_decentered": (2,)}
    torch.testing.assert_close(density.init_loc, expected.init_loc)
    latent = density.sample_prior(3)
    assert (latent[:, 1] != latent[:, 2]).all()
    torch.testing.assert_close(density.log_prob(latent), expected.log_prob(latent))


def test_arguments_of_the_model():
    def model(y, scale=1.0):
        pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), scale), obs=y)

    found = Target(model, torch.tensor(2.0), scale=0.5).log_prob(torch.ones(1, 1))
    expected = normal(torch.ones(1), 0.0, 1.0) + normal(torch.ones(1), 2.0, 0.5)
    torch.testing.assert_close(found, expected)


def sometimes(where, is_observed=False):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    if where(x):
        pyro.sample("v", dist.Normal(x, 1.0), obs=torch.tensor(2.0) if is_observed else None)


@pytest.mark.parametrize("where", [lambda x: x > 0.5, lambda x: x < 0.5])  # it starts at 0
def test_a_latent_of_some_runs_is_refused(where):
    start = init_to_value(values={"x": torch.tensor(0.0)})
    density = Target(sometimes, where, init_loc_fn=start)
    points = torch.linspace(0.0, 1.0, 4).unsqueeze(-1).expand(4, density.latent_dim)
    for some in (points, points.flip(0), points[-1:]):
        fresh = Target(sometimes, where, init_loc_fn=start)
        with pytest.raises(ValueError, match="site 'v' is in some runs .* and not in others.*Cure"):
            fresh.log_prob(some)
    with pytest.raises(ValueError, match="site 'v' is in some runs"):
        density.sample_prior(50)


def test_an_observation_of_some_runs_is_no_latent():
    density = Target(sometimes, lambda x: x > 0.5, True)
    x = torch.linspace(0.0, 1.0, 4)
    expected = normal(x, 0.0, 1.0) + torch.where(x > 0.5, normal(2.0, x, 1.0), 0.0)
    torch.testing.assert_close(density.log_prob(x.unsqueeze(-1)), expected)


def test_warnings_of_the_model_are_shown_once():
    def careful():
        warnings.warn("careful", stacklevel=1)
        pyro.sample("x", dist.Normal(0.0, 1.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        Target(careful).sample_prior(20)
        trace_model(careful, (), {})
    assert 1 <= len(caught) <= 2


def noisy():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("noise", x + 10 * torch.rand(()))


def partly_hidden():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    hidden = pyro.sample("hidden", dist.Normal(0.0, 10.0))
    pyro.sample("y", dist.Normal(x + hidden, 1.0), obs=torch.tensor(1.0))


@pytest.mark.parametrize("model", [noisy, poutine.block(partly_hidden, hide=["hidden"])])
def test_a_model_random_beyond_its_latents_is_refused(model):
    message = "random beyond its latents.*log-density at one point is .*, and then .*Cure"
    density = Target(model)
    for _ in range(2):  # who catches it once is told again
        with pytest.raises(ValueError, match=message):
            density.log_prob(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=message):
        _ = density.is_vectorized
    with pytest.raises(ValueError, match=message):
        density.read(torch.zeros(2, 1), lambda trace: trace.nodes["x"]["value"])


def test_log_densities_outside_the_support():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("half", torch.where(x > 0, 0.0, -math.inf))
        pyro.sample("y", dist.Exponential(1.0), obs=torch.tensor(1.0))

    density = Target(model, init_loc_fn=init_to_value(values={"x": torch.tensor(-1.0)}))
    assert density.is_vectorized
    assert density.log_prob(torch.tensor([[-1.0], [1.0]])).isfinite().tolist() == [False, True]


def test_validated_distributions_made_outside():
    """One made while validation was on would branch on its values."""
    prior, likelihood = dist.Gamma(2.0, 1.0).expand([2]).to_event(1), dist.Normal(0.0, 1.0)
    likelihood = likelihood.expand([3]).to_event(1)

    def model():
        x = pyro.sample("x", prior)
        pyro.sample("y", likelihood, obs=Y)
        pyro.sample("z", dist.Poisson(x.sum()), obs=torch.tensor(3.0))

    density = Target(model)
    assert density.is_vectorized
    u = torch.tensor([0.4, -0.3])
    rate = u.exp().sum()
    expected = 2 * u.sum() - rate + normal(Y, 0.0, 1.0).sum() + 3 * rate.log() - rate - math.log(6)
    torch.testing.assert_close(density.log_prob(u.unsqueeze(0)), expected.unsqueeze(0))


def test_handlers_outside_do_not_see_it():
    density = Target(hierarchy)
    with poutine.trace() as tracer:
        density.log_prob(torch.zeros(2, 8))
        density.sample_prior(2)
        Target(hierarchy)
    assert not [s for s in tracer.trace.nodes.values() if s["type"] == "sample"]


def test_subsampled_data_are_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 100, subsample_size=10):
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.zeros(10))

    message = "plate 'rows' of site 'y' subsamples 10 of 100 elements. Cure: run the model without"
    with pytest.raises(SubsampledError, match=message):
        Target(model)
    assert issubclass(SubsampledError, ValueError)


def test_a_model_without_latents():
    with pytest.raises(RuntimeError, match="latent"):
        Target(lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0)))


@pytest.mark.parametrize("name", ["hierarchy", "simplex", "refusing"])
def test_single_precision(name):
    torch.set_default_dtype(torch.float32)
    model, formula, dim = CASES[name]
    if name == "hierarchy":
        model = poutine.condition(model, {"y": Y.float()})
    density = Target(model)
    latent = torch.randn(3, dim)
    with looped(name == "refusing"):
        value, score = density.score(latent)
    assert value.dtype == score.dtype == density.derivatives(latent)[2].dtype == torch.float32
    assert density.init_loc.dtype == density.sample_prior(2).dtype == torch.float32
    expected = torch.stack([formula(row.requires_grad_()) for row in latent.double().unbind()])
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "cure"),
    [
        (lambda: dist.ProjectedNormal(torch.ones(3)), "Cure: dist.ProjectedNormal, and a model"),
        (
            lambda: dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.Uniform(0.0, torch.tensor([1.0, 2.0]))
            ),
            "may have different bounds. Cure: which = pyro.sample('x_which'",
        ),
        (
            lambda: dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.VonMises(torch.tensor([0.0, 2.0]), 1.0)
            ),
            "densities of angles. Cure: which = pyro.sample('x_which'",
        ),
    ],
)
def test_latents_without_unconstrained_coordinates_are_named(fn, cure):
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("x", fn())

    with pytest.raises(ValueError, match="latent 'x' has no unconstrained coordinates") as caught:
        Target(model)
    assert cure in str(caught.value)


def test_latent_with_a_point_mass_is_named():
    def model():
        a = pyro.sample("a", dist.Delta(torch.ones(2)).to_event(1))
        pyro.sample("x", dist.Normal(a, 1.0).to_event(1))

    for call in (lambda: Target(model), AutoSemiImplicit(model, frame=None)):
        with pytest.raises(ValueError, match=r"'a' has the prior Delta.*pyro.deterministic\('a'"):
            call()
    Target(poutine.condition(model, {"a": torch.ones(2)}))


def test_latent_with_an_empirical_prior_is_named():
    def model():
        a = pyro.sample("a", dist.Empirical(torch.randn(9), torch.zeros(9)))
        pyro.sample("x", dist.Normal(a, 1.0), obs=torch.tensor(1.0))

    for call in (lambda: Target(model), AutoSemiImplicit(model, frame=None)):
        with pytest.raises(ValueError, match=r"'a' has the prior Empirical.*Cure: which = pyro"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives_that_torch_loses_are_found(dtype):
    """Of ``dose ** h`` at a dose of 0, that by h is NaN."""
    dose = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=dtype)
    y = torch.tensor([0.1, 0.4, 1.1, 1.9], dtype=dtype)

    def model():
        zero = torch.zeros((), dtype=dtype)
        top = pyro.sample("top", dist.Normal(zero, 2.0))
        h = pyro.sample("h", dist.LogNormal(zero, 0.5))
        loc = top * dose**h
        pyro.sample("y", dist.Normal(loc, 0.5).to_event(1), obs=y)

    def log_density(latent):
        top, h = latent[0], latent[1].exp()
        loc = top * torch.cat([torch.zeros_like(top[None]), dose[1:] ** h])
        return -(((y - loc) ** 2).sum() / 0.25 + top**2 / 4 + latent[1] ** 2 / 0.25) / 2

    points = torch.tensor([[0.3, 0.2], [1.1, -0.4], [-0.5, 0.1]], dtype=dtype)
    found = Target(model).derivatives(points)[2]
    expected = torch.stack([torch.autograd.functional.hessian(log_density, one) for one in points])
    error = 3 * torch.finfo(dtype).eps ** (1 / 2)
    torch.testing.assert_close(found, expected, rtol=error, atol=0.0)


@pytest.mark.parametrize("kind", ["bag", "attention"])
def test_second_derivatives_that_torch_lacks_are_differences(kind):
    """EmbeddingBag and torch's attention have none; their parts have."""
    rows, q = torch.tensor([[0, 2], [1, 1], [2, 0]]), torch.randn(1, 2, 3, 2)

    def fused(w):
        if kind == "bag":
            return embedding_bag(rows, w.reshape(3, 2)).sum(-1)
        key = q @ w[:4].reshape(2, 2)
        return scaled_dot_product_attention(q, key, key * w[4:].mean()).sum((0, 1, -1))

    def in_parts(w):
        if kind == "bag":
            return w.reshape(3, 2)[rows].mean(1).sum(-1)
        key = q @ w[:4].reshape(2, 2)
        share = (q @ key.mT / 2**0.5).softmax(-1)
        return (share @ (key * w[4:].mean())).sum((0, 1, -1))

    def posterior(network):
        def model():
            w = pyro.sample("w", dist.Normal(torch.zeros(6), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(network(w).tanh(), 0.5).to_event(1), obs=Y)

        return Target(model)

    points = torch.randn(3, 6)
    found = posterior(fused).derivatives(points)
    for one, other in zip(found, posterior(in_parts).derivatives(points), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("like", [torch.float32, torch.float64])
def test_a_flat_prior_may_be_inside_of_another_distribution(like):
    flat = dist.ImproperUniform(constraints.positive, (3,), ()).to_event(1)
    data = torch.tensor([1.0, 2.0, 0.5], dtype=like)

    def model():
        rate = pyro.sample("rate", flat)
        pyro.sample("y", dist.Exponential(rate).to_event(1), obs=data)

    density = Target(model)
    assert density.init_loc.equal(torch.zeros(3, dtype=like))
    latent = torch.tensor([[0.3, -1.0, 0.2]], dtype=like)
    expected = (2 * latent - data * latent.exp()).sum(-1)
    torch.testing.assert_close(density.log_prob(latent), expected)


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_a_wide_target_is_that_of_double_precision(is_closed_over):
    torch.set_default_dtype(torch.float32)
    counts = torch.tensor([1e6, 1.001e6, 9.99e5])

    def model(counts):
        rate = pyro.sample("rate", dist.LogNormal(torch.tensor(0.0), 5.0))
        shape = pyro.sample("shape", dist.Gamma(2.0, torch.tensor(0.1)))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.GammaPoisson(shape, shape / rate), obs=counts)

    args = () if is_closed_over else (counts,)
    source = (lambda: model(counts)) if is_closed_over else model
    target = Target(source, *args)
    points = torch.tensor([[13.8, 3.0], [13.9, 2.5], [13.7, 5.0]])
    wide = Target(model, counts.double())
    exact, exact_score = wide.score(points.double())
    differences = exact - exact[0]

    def error():
        value, score = target.score(points)
        assert value.dtype == score.dtype == torch.float32
        off = (value.double() - value[0].double() - differences).abs().max().item()
        return off, ((score - exact_score) / exact_score).abs().max().item()

    before, _ = error()
    assert before > 0.1
    sibling = copy.copy(target)
    assert target.widen(points) and not target.widen(points)
    assert not sibling.is_wide and sibling.transforms is not target.transforms
    value, slope = error()
    assert value < 1e-4 and slope < 1e-4
    draws = target.constrain(points)
    assert all(part.dtype == torch.float32 for part in draws.values())
    assert target.log_likelihood(draws, ["y"])["y"].dtype == torch.float64
    assert not wide.widen(points.double())


def test_a_target_that_mixes_precisions_stays_narrow():
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(5, 2), torch.randn(5)

    def model():
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ slope, 1.0).to_event(1), obs=y)

    target, points = Target(model), torch.randn(4, 2)
    before = target.score(points)
    assert not target.widen(points)
    for one, other in zip(before, target.score(points), strict=True):
        assert torch.equal(one, other)
    assert target.is_vectorized


def effects_of_unknown_size():
    """Their medians are 1e150 or so."""
    precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
    pyro.sample("effects", dist.Normal(0.0, precision**-0.5).expand([20]).to_event(1))


def test_a_prior_whose_medians_are_extreme():
    assert Target(effects_of_unknown_size).init_loc.tolist() == [0.0] * 21
    told = Target(effects_of_unknown_size, init_loc_fn=lambda site: init_to_median(site))
    assert told.init_loc.abs().max() > 1e6


def test_a_prior_with_an_extreme_location():
    """Counts of some millions, and an impossible origin."""

    def model():
        size = pyro.sample("size", dist.Normal(2e6, 1e5))
        pyro.sample("count", dist.Poisson(0.5 * size), obs=torch.tensor(1e6))

    assert Target(model).init_loc.item() == pytest.approx(2e6, rel=0.2)


def test_a_location_beside_extreme_medians():
    """Only the effects and their precision move: with all latents 0, the count is impossible."""

    def model():
        effects_of_unknown_size()
        size = pyro.sample("size", dist.Normal(3000.0, 300.0))
        pyro.sample("count", dist.Poisson(0.1 * size), obs=torch.tensor(320.0))

    *others, size = Target(model).init_loc.tolist()
    assert others == [0.0] * 21 and size == pytest.approx(3000.0, rel=0.3)


def test_extreme_medians_stay_where_the_origin_is_impossible():
    def model():
        effects_of_unknown_size()
        far = pyro.sample("far", dist.Normal(0.0, 1e8))
        pyro.factor("data", torch.where(far.abs() > 1e5, 0.0, -torch.inf))

    target = Target(model)
    assert target.init_loc[-1].abs() > 1e5 and target.log_prob(target.init_loc[None]).isfinite()


def test_a_factor_that_is_nan_at_all_draws_of_the_prior():
    time = torch.tensor([1.0, 2.0, 5.0])

    def model():
        log_rate = pyro.sample("log_rate", dist.Normal(0.0, 1e6))
        shape = pyro.sample("shape", dist.Gamma(0.001, 0.001))
        pyro.factor("data", dist.Weibull(log_rate.exp(), shape).log_prob(time).sum())

    assert Target(model).init_loc.tolist() == [0.0, 0.0]
    guide = AutoSemiImplicit(model, frame=None)
    assert all(value.isfinite() for value in guide().values())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("vectorized", [True, False])
def test_log_likelihoods_with_discrete_latents_of_each_row(vectorized):
    """Two latents of a row, one of which depends on the other; a mask, and a scale."""
    y, mask = torch.randn(5), torch.tensor([True, True, False, True, True])
    share, shift = torch.tensor([0.3, 0.5, 0.3]), torch.tensor([0.0, 1.0])

    def mixture():
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        if not vectorized:
            loc = loc + 0.0 * loc[0].item()
        with pyro.plate("rows", 5), poutine.scale(scale=2.0):
            z = pyro.sample("z", dist.Categorical(weights))
            is_high = pyro.sample("is_high", dist.Bernoulli(share[z]))
            with poutine.mask(mask=mask):
                pyro.sample("y", dist.Normal(loc[z] + is_high, 1.0), obs=y)
        pyro.sample("x", dist.Normal(loc[0], 1.0), obs=torch.tensor(0.0))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Target runs the model one particle at a time")
        target = Target(mixture)
        assert target.is_vectorized == vectorized
    draws = {"weights": dist.Dirichlet(torch.ones(3)).sample((4,)), "loc": torch.randn(4, 3)}
    both = torch.stack([1 - share, share], -1).log() + draws["weights"].log().unsqueeze(-1)
    means = draws["loc"].unsqueeze(-1) + shift
    rows = dist.Normal(means.unsqueeze(1), 1.0).log_prob(y.reshape(5, 1, 1)) + both.unsqueeze(1)
    rows = rows.flatten(-2).logsumexp(-1)
    found = target.log_likelihood(draws, ["y", "x"])
    torch.testing.assert_close(found["y"], 2.0 * rows * mask)
    torch.testing.assert_close(found["x"], dist.Normal(draws["loc"][:, 0], 1.0).log_prob(0 * y[0]))
    plain = target.log_likelihood(draws, ["y"], scaled=False)["y"]
    torch.testing.assert_close(plain[:, mask], rows[:, mask])


def markov(y):
    p, z = pyro.sample("p", dist.Beta(1.0, 1.0)), torch.tensor(0.0)
    for step in pyro.markov(range(2)):
        z = pyro.sample(f"z_{step}", dist.Bernoulli(0.5 * p + 0.2 * z))
        pyro.sample(f"y_{step}", dist.Normal(z, 1.0), obs=y[step])


def two_sites(y):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y_0", dist.Normal(z, 1.0), obs=y)
        pyro.sample("y_1", dist.Normal(z, 1.0), obs=y)


def of_all_rows(y):
    z = pyro.sample("z", dist.Bernoulli(pyro.sample("p", dist.Beta(1.0, 1.0))))
    with pyro.plate("rows", 2):
        pyro.sample("y_0", dist.Normal(z, 1.0), obs=y)


def with_latent(y):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("rows", 2):
        z = pyro.sample("z", dist.Bernoulli(p))
        x = pyro.sample("x", dist.Normal(z, 1.0))
        pyro.sample("y_0", dist.Normal(x, 1.0), obs=y)
        pyro.sample("y_1", dist.Normal(x + z, 1.0), obs=y)


@pytest.mark.parametrize("model", [markov, two_sites, of_all_rows])
def test_observations_that_share_discrete_latents_have_no_log_likelihood(model):
    target = Target(model, torch.tensor([0.3, 1.1]))
    assert target.joint_sites(["y_0"]) == ["y_0"]
    with pytest.raises(ValueError, match=r"site 'y_0' is not known, because they share discrete"):
        target.log_likelihood({"p": torch.rand(3)}, ["y_0"])


def test_data_given_a_continuous_latent_of_a_class():
    """Without it, the class of a row is summed out of the prior alone."""
    y, x = torch.tensor([0.3, 1.1]), torch.randn(3, 2)
    target = Target(with_latent, y)
    assert target.joint_sites(["y_0", "y_1"]) == ["y_1"]
    found = target.log_likelihood({"p": torch.rand(3), "x": x}, ["y_0"])
    torch.testing.assert_close(found["y_0"], dist.Normal(x, 1.0).log_prob(y))
