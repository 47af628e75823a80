# SPDX-License-Identifier: Apache-2.0
"""Priors without a variance: which they are, their coordinates, and fits in these."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, fit, refine
from pyro_implicit.density import Target
from pyro_implicit.density.tails import Tails, find_tails, has_short_tails, with_short_tails
from pyro_implicit.fitting import Fit
from pyro_implicit.mcmc import NoiseSpaceReparam
from pyro_implicit.mcmc.spaces.conditional_reparam import ConditionalReparam

SCALES = torch.tensor([1.0, 3.0])
HEAVY = {
    "alone": dist.Cauchy(1.0, 2.5),
    "expanded": dist.Cauchy(1.0, 2.5).expand([2]).to_event(1),
    "masked": dist.Cauchy(1.0, 2.5).mask(torch.tensor(True)),
    "t": dist.StudentT(2.0, 1.0, 2.5),
    "scales": dist.Cauchy(0.0, SCALES).to_event(1),
}
LIGHT = {
    "t": dist.StudentT(2.1, 0.0, 1.0),
    "normal": dist.Normal(0.0, 1.0),
    "half": dist.HalfCauchy(1.0),  # its logarithm has short tails
    "transformed": dist.TransformedDistribution(
        dist.Cauchy(0.0, 1.0), [dist.transforms.ExpTransform()]
    ),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", HEAVY)
def test_the_density_is_that_of_the_values(family):
    fn = HEAVY[family]

    def model():
        pyro.sample("x", fn)

    found = find_tails(Target(model))
    loc, scale = (0.0, SCALES) if family == "scales" else (1.0, torch.tensor(2.5))
    torch.testing.assert_close(found["x"].scale, scale, check_dtype=False)
    target = Target(with_short_tails(model, found))
    points = torch.tensor([0.0, -0.7, 3.0, 30.0]).unsqueeze(-1).repeat(1, target.latent_dim)
    x = target.constrain(points)["x"]
    expected = (loc + scale * points.sinh()).reshape(x.shape)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(target.unconstrain({"x": x}), points)
    log_det = (scale * points.cosh()).log().sum(-1)
    torch.testing.assert_close(target.log_prob(points), fn.log_prob(x) + log_det)


_STANDARD = Tails(torch.tensor(0.0), torch.tensor(1.0))


def _bijection(scale):
    def model():
        pyro.sample("x", dist.Cauchy(0.0, 1.0))

    short = with_short_tails(model, {"x": Tails(torch.tensor(0.0), torch.tensor(scale))})
    return biject_to(poutine.trace(short).get_trace().nodes["x"]["fn"].support)


@pytest.mark.usefixtures("double")
def test_the_coordinate_has_two_derivatives_everywhere_and_does_not_overflow():
    bijection = _bijection(1.0)
    assert bijection == _bijection(1.0) != _bijection(2.0)
    at = torch.tensor([-2.0, 0.0, 1.0], requires_grad=True)
    assert torch.autograd.gradcheck(bijection, at)
    assert torch.autograd.gradgradcheck(lambda z: bijection.log_abs_det_jacobian(z, z), at)
    far = torch.tensor([-800.0, 800.0])
    log_det = bijection.log_abs_det_jacobian(far, far)
    torch.testing.assert_close(log_det, torch.full((2,), 800.0 - math.log(2)))


@pytest.mark.parametrize("fn", [dist.Cauchy(0.0, 2.0), dist.StudentT(1.5, 0.0, 2.0)])
def test_the_density_does_not_overflow_in_float32(fn):
    def model():
        pyro.sample("x", fn)

    short = Target(with_short_tails(model, find_tails(Target(model))))
    df = 1.0 if isinstance(fn, dist.Cauchy) else 1.5
    log_prob, score = short.score(torch.tensor([[60.0], [80.0]]))  # up to 5e34
    torch.testing.assert_close(log_prob.diff(), torch.tensor([-20.0 * df]))
    torch.testing.assert_close(score, torch.full((2, 1), -df))


@pytest.mark.parametrize("family", LIGHT)
def test_priors_with_a_variance_keep_their_coordinates(family):
    assert find_tails(Target(lambda: pyro.sample("x", LIGHT[family]))) == {}


def test_priors_that_change_with_others_keep_their_coordinates():
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        choice = pyro.sample("choice", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Cauchy(0.0, scale))
        pyro.sample("y", dist.Cauchy(5.0 * choice, 1.0))
        pyro.sample("z", dist.Cauchy(0.0, 1.0))

    target = Target(model)
    assert find_tails(target).keys() == {"z"}
    changed = Target(with_short_tails(model, find_tails(target)))
    sites = changed.trace_at(changed.init_loc).nodes
    assert ConditionalReparam.suits_site(sites["x"])
    assert not ConditionalReparam.suits_site(sites["z"])  # whose coordinate is not its value


def test_a_location_that_is_trained_does_not_move_the_coordinate():
    def model():
        pyro.sample("x", dist.Cauchy(pyro.param("loc", torch.tensor(0.5)), 1.0))

    found = find_tails(Target(model))
    pyro.param("loc").data.fill_(50.0)
    assert found["x"].loc == 0.5


def test_models_that_run_at_some_draws_of_the_prior_only():
    def model():
        x = pyro.sample("x", dist.Cauchy(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, x), obs=torch.tensor(1.0))  # an error for negative x

    for seed in range(5):
        torch.manual_seed(seed)
        with pyro.validation_enabled():
            assert find_tails(Target(model)).keys() == {"x"}


def test_changed_priors_keep_their_support_and_change_once():
    def model():
        with pyro.plate("rows", 3):
            pyro.sample("x", dist.Cauchy(0.0, 1.0))

    tails = {"x": Tails(torch.tensor(0.0), torch.tensor(1.0)), "z": _STANDARD}
    twice = with_short_tails(with_short_tails(model, tails), tails)
    with pyro.plate("particles", 2, dim=-2):
        fn = poutine.trace(twice).get_trace().nodes["x"]["fn"]
    assert fn.shape() == (2, 3) and has_short_tails(fn)
    assert Target(with_short_tails(lambda: pyro.sample("z", dist.Normal(0.0, 1.0)), tails))


def test_the_noise_of_a_guide_of_fit_serves_nuts():
    """NUTS has the model as it is, and the guide the other coordinate."""

    def model(y):
        pyro.sample("y", dist.Normal(pyro.sample("x", dist.Cauchy(0.0, 1.0)), 0.5), obs=y)

    y = torch.tensor(4.0)
    tails = {"x": _STANDARD}
    guide = AutoImplicit(with_short_tails(model, tails), AutoregressiveGenerator)
    guide(y)
    reparam = NoiseSpaceReparam(guide)
    trace = poutine.trace(reparam.reparam(model)).get_trace(y)
    noise = trace.nodes["x_shared_latent"]["value"]
    value = reparam.transform_sample(noise)["x"]
    torch.testing.assert_close(trace.nodes["x"]["value"], value)
    with pytest.raises(ValueError, match="its unconstrained coordinates are not those"):
        refine(model, guide, y, frame="noise", progress=False)


def test_a_fit_of_separable_data(tmp_path):
    """Without an end to the likelihood, the tail of the slope is that of its prior."""
    x, y = torch.tensor([-2.0, -1.0, 0.5, 1.5]), torch.tensor([0.0, 0.0, 1.0, 1.0])

    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Cauchy(0.0, 10.0))
        b = pyro.sample("b", dist.Cauchy(0.0, 2.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    result = fit(model, "auto", x, y, seed=0, progress=False)
    assert result.tails.keys() == {"a", "b"}
    grid = torch.linspace(-12.0, 12.0, 1_201, dtype=torch.float64)
    values, log_prior = {}, torch.zeros((), dtype=torch.float64)
    for name, scale in (("a", 10.0), ("b", 2.5)):
        shape = (-1, 1) if name == "a" else (1, -1)
        values[name] = scale * grid.sinh().reshape(shape)
        log_det = (scale * grid.cosh()).log().reshape(shape)
        log_prior = log_prior + dist.Cauchy(0.0, scale).log_prob(values[name]) + log_det
    logits = values["a"] + values["b"] * x.double().reshape(-1, 1, 1)
    log_likelihood = torch.distributions.Bernoulli(logits=logits).log_prob(y.reshape(-1, 1, 1))
    exact = (log_prior + log_likelihood.sum(0)).flatten().softmax(0).reshape(1_201, 1_201)
    draws = result.sample(8_000)
    for name, bounds in (("a", (-10.0, 0.0, 10.0)), ("b", (2.0, 6.0, 20.0, 200.0))):
        for bound in bounds:
            expected = (exact * (values[name] < bound)).sum().item()
            share = (draws[name] < bound).double().mean().item()
            assert share == pytest.approx(expected, abs=0.03), (name, bound)
    assert result.diagnose().verdict != "do not trust"
    result.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", model, x, y)
    assert loaded.tails == result.tails and loaded.target.shapes == result.target.shapes
    points = torch.tensor([[0.5, 3.0]])
    torch.testing.assert_close(loaded.target.log_prob(points), result.target.log_prob(points))


def test_minibatches_share_the_coordinates():
    """Global latent variables have them in fits by minibatches, too."""

    def model(y: Tensor) -> None:
        x = pyro.sample("x", dist.Cauchy(0.0, 1.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = torch.linspace(-1.0, 3.0, 40)
    result = fit(model, "auto", batches=list(y.split(20)), seed=0, progress=False)
    assert result.tails.keys() == {"x"}
    draws = result.sample(4_000)["x"]
    assert draws.mean().item() == pytest.approx(0.975, abs=0.02)  # by quadrature
    assert draws.std().item() == pytest.approx(0.158, abs=0.01)
