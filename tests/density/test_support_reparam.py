# SPDX-License-Identifier: Apache-2.0
"""Latent variables whose supports depend on others, sampled by their positions within them."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch.distributions import constraints

from pyro_implicit import AutoImplicit, SupportReparam, fit
from pyro_implicit.density import Target
from pyro_implicit.density.checks import MovingSupportError
from pyro_implicit.density.supports import on_fixed_supports
from pyro_implicit.fitting import Fit


class Below(dist.TorchDistribution):
    """``high - x`` is exponential."""

    arg_constraints = {}

    def __init__(self, high):
        self.high = high
        super().__init__(high.shape, (), validate_args=False)

    @property
    def support(self):
        return constraints.less_than(self.high)

    def expand(self, batch_shape, _instance=None):
        return Below(self.high.expand(batch_shape))

    def log_prob(self, value):
        return value - self.high

    def sample(self, sample_shape=()):
        return self.high - dist.Exponential(torch.ones_like(self.high)).sample(sample_shape)


KINDS = {
    "interval": lambda a: dist.Uniform(-a, 2 * a),
    "vector": lambda a: dist.Uniform(a, torch.tensor([20.0, 30.0])).to_event(1),
    "expanded": lambda a: dist.Uniform(0.0, a).expand([2]).to_event(1),
    "above": lambda a: dist.Pareto(a, 3.0),
    "below": Below,
}
#: Values inside of the supports for a = 2, with the derivatives of the value by u.
VALUES = {
    "interval": (1.0, lambda x: (x + 2.0) * (4.0 - x) / 6.0),
    "vector": (
        [3.0, 29.0],
        lambda x: (x - 2) * (torch.tensor([20, 30]) - x) / torch.tensor([18, 28]),
    ),
    "expanded": ([0.5, 1.5], lambda x: x * (2 - x) / 2),
    "above": (2.5, lambda x: x - 2),
    "below": (0.5, lambda x: 2 - x),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", KINDS)
def test_density_of_the_position(kind):
    def model():
        a = pyro.sample("a", dist.LogNormal(torch.tensor(0.0), 1.0))
        pyro.sample("x", KINDS[kind](a))

    target = Target(on_fixed_supports(model, ["x"]))
    value, slope = VALUES[kind]
    a, x = torch.tensor(2.0), torch.tensor(value)
    trace = poutine.trace(poutine.condition(on_fixed_supports(model, ["x"]), {"a": a})).get_trace()
    position = trace.nodes["x_base"]["fn"]
    position = getattr(position, "base_dist", position)
    u = target.unconstrain({"a": a[None], "x_base": position.of(x)[None]})
    expected = dist.LogNormal(0.0, 1.0).log_prob(a) + a.log()
    expected = expected + KINDS[kind](a).log_prob(x) + slope(x).log().sum()
    torch.testing.assert_close(target.log_prob(u), expected[None])
    fixed = target.read_at(target.constrain(u), lambda trace: trace.nodes["x"]["value"])
    torch.testing.assert_close(fixed, x[None])


@pytest.mark.parametrize("kind", ["interval", "above", "below"])
def test_draws_are_those_of_the_model(kind):
    def model():
        a = pyro.sample("a", dist.LogNormal(torch.tensor(0.0), 1.0))
        with pyro.plate("rows", 3):
            return pyro.sample("x", KINDS[kind](a))

    pyro.set_rng_seed(0)
    expected = model()
    pyro.set_rng_seed(0)
    found = poutine.reparam(model, {"x": SupportReparam()})()
    torch.testing.assert_close(found, expected)


def test_unfit_supports_are_refused_by_name():
    def model(fn):
        a = pyro.sample("a", dist.LogNormal(torch.tensor(0.0), 1.0))
        pyro.sample("x", fn(a))

    flat = dist.ImproperUniform(constraints.greater_than(torch.tensor(1.0)), (), ())
    for fn, message in (
        (lambda _: flat, "site 'x' has a flat prior.*Cure: a proper prior"),
        (lambda _: dist.Normal(0.0, 1.0), "support of Normal is Real.*Cure: "),
    ):
        with pytest.raises(NotImplementedError, match=message):
            on_fixed_supports(model, ["x"])(fn)


def shares(counts):
    """Uniform shares of three classes, one after the other."""
    first = pyro.sample("first", dist.Beta(torch.tensor(1.0), 2.0))
    second = pyro.sample("second", dist.Uniform(torch.zeros(()), 1 - first))
    with pyro.plate("margins", 2):  # given the shares, without data
        pyro.sample("margin", dist.Pareto(first + second, 3.0))
    probs = torch.stack([first, second, 1 - first - second])
    pyro.sample("counts", dist.Multinomial(9, probs), obs=counts)


@pytest.fixture(scope="module")
def counts():
    return torch.tensor([6.0, 2.0, 1.0])


@pytest.fixture(scope="module")
def fitted(counts):
    return fit(shares, "auto", counts, seed=0, progress=False)


def test_fit_has_the_exact_posterior(fitted, counts):
    exact = dist.Dirichlet(1 + counts)
    draws = fitted.sample(4000)
    for i, name in enumerate(("first", "second")):
        mean, sd = exact.mean[i].item(), exact.variance[i].sqrt().item()
        assert draws[name].mean().item() == pytest.approx(mean, abs=0.12 * sd)
        assert draws[name].std().item() == pytest.approx(sd, rel=0.1)
    ratio = draws["margin"] / (draws["first"] + draws["second"]).unsqueeze(-1)
    logs = ratio.log()  # exponential with rate 3
    assert logs.min() > 0 and logs.mean().item() == pytest.approx(1 / 3, rel=0.1)
    assert fitted.supports == ("second", "margin")
    assert "the support of 'second' depends on others" in str(fitted)
    assert fitted.diagnose().verdict == "trust"


def test_results_speak_of_the_sites_of_the_model(fitted, counts, tmp_path):
    predicted = Predictive(shares, guide=fitted.posterior, num_samples=400)(counts)
    assert predicted["second"].mean().item() == pytest.approx(0.25, abs=0.03)
    fitted.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", shares, counts)
    assert {"first", "second", "second_base"} <= loaded.sample(10).keys()
    assert loaded.target.latent_dim == 4
    by_chain = fitted.draws_by_chain(100)
    torch.testing.assert_close(
        by_chain["second"], by_chain["second_base"] * (1 - by_chain["first"])
    )
    exact = dist.Dirichlet(1 + counts).sample((1000,))
    compared = fitted.compare({"first": exact[:, 0], "second": exact[:, 1]})
    assert "as near as exact draws" in str(compared)


def test_what_needs_fixed_supports_says_so(fitted, counts):
    with pytest.raises(ValueError, match="update needs fixed supports.*'second'.*SupportReparam"):
        fitted.update(shares, counts)
    with pytest.raises(ValueError, match="'second' changes.*Cure: .*SupportReparam"):
        fit(shares, AutoImplicit(shares), counts)
    with pytest.raises(MovingSupportError) as caught:
        Target(shares, counts)
    assert caught.value.names == ("second", "margin")


def test_a_support_that_depends_on_a_discrete_latent():
    def model(y):
        n = pyro.sample("n", dist.Poisson(2.0))
        x = pyro.sample("x", dist.Uniform(torch.zeros(()), 1 + n))
        pyro.sample("y", dist.Normal(x, 0.5), obs=y)

    draws = fit(model, "auto", torch.tensor(4.0), seed=0, progress=False).sample(4000)
    n = torch.arange(30.0)
    inside = dist.Normal(4.0, 0.5).cdf(1 + n) - dist.Normal(4.0, 0.5).cdf(torch.tensor(0.0))
    weights = dist.Poisson(2.0).log_prob(n).exp() * inside / (1 + n)
    assert draws["n"].mean().item() == pytest.approx(
        (weights * n).sum().item() / weights.sum().item(), abs=0.1
    )
    assert (draws["x"] < 1 + draws["n"]).all()
