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

from pyro_implicit import fit
from pyro_implicit.density import Target
from pyro_implicit.density.tails import Tails, find_tails, with_short_tails
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


def test_a_fit_where_the_posterior_has_no_variance_either():
    """Two coefficients of which the data know the product: two ridges, far into both tails."""

    def model(y: Tensor) -> None:
        a, b = (pyro.sample(name, dist.Cauchy(0.0, 1.0)) for name in "ab")
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a * b, 1.0), obs=y)

    y = torch.tensor([2.5, 1.2, 2.0, 3.1])
    result = fit(model, "auto", y, seed=0, progress=False)
    assert result.tails.keys() == {"a", "b"} and result.num_modes == 1  # up to both signs
    z = torch.linspace(-14.0, 14.0, 1_401, dtype=torch.float64)
    x, prior = z.sinh(), dist.Cauchy(0.0, 1.0).log_prob(z.sinh()) + z.cosh().log()
    likelihood = -0.5 * len(y) * (x.unsqueeze(-1) * x - y.mean()).square()
    exact = (prior.unsqueeze(-1) + prior + likelihood).flatten().softmax(0).reshape(1_401, 1_401)
    draws = result.sample(8_000)
    for name in "ab":
        for at in (-3.0, -1.0, 0.0, 1.0, 3.0):
            expected = exact.sum(0)[z < math.asinh(at)].sum().item()
            share = (draws[name] < at).double().mean().item()
            assert share == pytest.approx(expected, abs=0.03)
    assert (draws["a"] * draws["b"]).mean().item() == pytest.approx(
        (exact * x.unsqueeze(-1) * x).sum().item(), abs=0.06
    )
    assert result.diagnose().verdict != "do not trust"
