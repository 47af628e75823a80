# SPDX-License-Identifier: Apache-2.0
"""However bad a guide's draws are, there is a verdict, and it is "do not trust"."""

from __future__ import annotations

import math
import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal, init_to_value
from torch import nn
from torch.distributions import constraints

from pyro_implicit import AutoImplicit, AutoSemiImplicit, diagnose
from pyro_implicit.diagnostics.checks import drift_check
from pyro_implicit.diagnostics.moments import whiten_draws
from pyro_implicit.diagnostics.verdict import has_power

pytestmark = pytest.mark.usefixtures("double")

EPS = torch.finfo(torch.double).eps


def model(obs=0.5):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("x", dist.LogNormal(0.0, 1.0))
    pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(obs))


class Made(dist.TorchDistribution):
    """Draws of any kind, and any numbers as their log-densities."""

    arg_constraints: dict = {}
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(self, make, log_q=torch.zeros, batch_shape=()):
        self.make, self.log_q = make, log_q
        super().__init__(torch.Size(batch_shape), torch.Size((2,)), validate_args=False)

    def expand(self, batch_shape, _instance=None):
        return Made(self.make, self.log_q, batch_shape)

    def rsample(self, sample_shape=()):
        shape = torch.Size(sample_shape) + self.batch_shape
        return self.make(shape.numel()).reshape(shape + (2,))

    def log_prob(self, value):
        return self.log_q(value.shape[:-1])


def rare(values, bad, share=0.01):
    """Some rows of another kind, at least one."""
    chosen = torch.rand(len(values)) < share
    chosen[0] = True
    return torch.where(chosen.unsqueeze(-1), bad, values)


def plane(num):
    return torch.randn(num, 1) * torch.tensor([1.0, 3.0]) + 0.1


BAD_DRAWS = {
    "equal": lambda num: torch.full((num, 2), 0.1),
    "zero": lambda num: torch.zeros(num, 2),
    "equal up to rounding": lambda num: 0.1 * (1 + EPS * torch.randint(-2, 3, (num, 2))),
    "one coordinate constant": lambda num: torch.randn(num, 2) * torch.tensor([1.0, 0.0]) + 0.3,
    "on a line": plane,
    "on a line up to rounding": lambda num: plane(num) * (1 + EPS * torch.randn(num, 2)),
    "nearly on a line": lambda num: plane(num) + 1e-5 * torch.randn(num, 2),
    "tiny": lambda num: 1e-200 * torch.randn(num, 2),
    "two points": lambda num: torch.randn(num, 2).sign(),
    "one stray": lambda num: rare(torch.full((num, 2), 0.1), torch.tensor([1.0, 2.0])),
    "1e30": lambda num: 1e30 * torch.randn(num, 2),
    "1e30, equal": lambda num: torch.full((num, 2), 1e30),
    "1e100": lambda num: 1e100 * torch.randn(num, 2),
    "1e300": lambda num: 1e300 * torch.randn(num, 2),
    "rarely 1e30": lambda num: rare(torch.randn(num, 2), torch.tensor(1e30)),
    "Cauchy": lambda num: (1 / torch.randn(num, 2)).pow(9),
    "inf": lambda num: torch.full((num, 2), math.inf),
    "rarely inf": lambda num: rare(torch.randn(num, 2), torch.tensor(-math.inf)),
    "nan": lambda num: torch.full((num, 2), math.nan),
    "rarely nan": lambda num: rare(torch.randn(num, 2), torch.tensor(math.nan)),
}


def bad_guide(make, log_q=torch.zeros):
    def guide():
        pyro.sample("w", Made(make, log_q))
        pyro.sample("x", dist.LogNormal(0.0, 1.0))

    return guide


def distrusted(model, guide, verdict="do not trust", **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Encountered ")  # Pyro says so, too
        found = diagnose(model, guide, **{"num_samples": 100, "num_transitions": 2} | options)
    assert found.verdict == verdict and found.cures
    assert f"Verdict: {verdict}: " in str(found)
    assert all("nan" not in finding.reason for finding in found.findings if not found.broken)
    return found


@pytest.mark.parametrize("has_density", [True, False])
@pytest.mark.parametrize("kind", BAD_DRAWS)
def test_bad_draws(kind, has_density):
    guide = bad_guide(BAD_DRAWS[kind])
    if not has_density:
        guide = AutoImplicit(
            pyro.poutine.block(model, hide=["x", "y"]), Generator(BAD_DRAWS[kind]), frame=None
        )
        guide()
        guide.loc.data.zero_()
        guide.scale = torch.ones(2)
        both = guide
        guide = lambda: (both(), pyro.sample("x", dist.LogNormal(0.0, 1.0)))  # noqa: E731
    loss = Trace_ELBO() if has_density else None
    found = distrusted(model, guide, modes=torch.zeros(1, 3), loss=loss)
    if kind == "rarely 1e30" and has_density:
        assert "standard deviations from the median" in found.broken


@pytest.mark.parametrize("value", [-3.0, -1.7, 0.1, 0.3, 1.1, 1.5409961082440433])
def test_points(value):
    """Their sd is 0 or a rounding error, of the last one 0 of the first draws alone."""

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    guide = AutoDelta(model, init_loc_fn=init_to_value(values={"x": torch.tensor(value)}))
    found = distrusted(model, guide, num_samples=2000, modes=None)
    assert "lie on a hyperplane" in found.broken


class Generator(nn.Module):
    """Ignores its noise."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self, noise):
        value = self.make(noise.shape[:-1].numel()).reshape(noise.shape[:-1] + (2,))
        return value + noise @ self.weight


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("share", [1.0, 0.05])
def test_bad_densities(value, share):
    """Weights of zero or without end."""

    def log_q(shape):
        return torch.where(torch.rand(shape) < share, value, 0.0)

    good = lambda num: torch.randn(num, 2)  # noqa: E731
    found = distrusted(model, bad_guide(good, log_q))
    assert found.broken and found.bound is None


def test_a_search_leaves_the_verdict():
    distrusted(model, bad_guide(BAD_DRAWS["1e30"]), modes="search")
    distrusted(model, bad_guide(BAD_DRAWS["nan"]), modes="search")


@pytest.mark.parametrize("is_valid", [True, False])
@pytest.mark.parametrize("autoguide", [AutoNormal, AutoMultivariateNormal, AutoSemiImplicit])
def test_guides_whose_parameters_are_lost(autoguide, is_valid):
    with pyro.validation_enabled(is_valid):
        guide = autoguide(model)
        guide()
        for parameter in guide.parameters():
            parameter.data.fill_(math.nan)
        assert distrusted(model, guide, modes=None).broken


def test_values_outside_their_support():
    def guide():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(-3.0, 1.0))

    assert "not finite" in distrusted(model, guide).broken


def normal(reach=math.inf):
    """A model or a guide that raises an error beyond a distance."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    if reach < math.inf:
        matrix = torch.eye(2) * (reach - w.square().sum())
        pyro.factor("nothing", 0.0 * torch.linalg.cholesky(matrix).sum())


def cut(reach):
    """Draws of it that are within the distance."""

    def make(num):
        draws = torch.randn(10 * num + 100, 2)
        return draws[draws.square().sum(-1) < reach][:num]

    pyro.sample("w", Made(make, lambda shape: torch.full(shape, -1.0)))


def test_models_that_raise_errors():
    found = distrusted(lambda: normal(2.0), normal)
    (lost,) = re.findall(r"is not finite at (\d+) draws", found.broken)
    # Of 100 draws, exp(-1) are beyond: the standard error is 4.8.
    assert int(lost) == pytest.approx(100 / math.e, abs=20)
    # At few draws: they are left out, and said.
    # About 3 % of the seeds have no such draw, more than 10, or a false alarm of the other checks.
    pyro.set_rng_seed(0)
    found = diagnose(lambda: normal(12.0), normal, num_samples=2000, modes=None)
    assert not found.broken and found.verdict == "check" and found.stein is not None
    assert re.search(r"not finite at \d+ draws, of 2000", str(found))
    assert found.findings[0].cure.startswith("data and defaults in float64")
    # Or only on the way of short HMC.
    found = diagnose(lambda: normal(9.0), lambda: cut(8.0), num_samples=500, modes=None)
    assert not found.broken and found.stein is not None
    assert found.drift is not None  # such places reject what comes their way


def test_objectives_without_a_number():
    class Lost(Trace_ELBO):
        def loss(self, *args, **kwargs):
            return math.nan

    class Raises(Trace_ELBO):
        def loss(self, *args, **kwargs):
            raise FloatingPointError("lost")

    for loss in (Lost(), Raises()):
        found = diagnose(normal, normal, num_samples=100, num_transitions=0, modes=None, loss=loss)
        assert found.verdict == "check" and "the objective is not finite" in str(found)


def test_chains_that_stand_still_show_nothing():
    draws = whiten_draws(torch.randn(100, 2))
    found = drift_check(draws, lambda u: -1e20 * u.square().sum(-1), num_transitions=3)
    assert found.acceptance < 0.1 and not has_power(found)
    found = drift_check(draws, lambda u: -0.5 * u.square().sum(-1), num_transitions=3)
    assert found.acceptance > 0.5 and math.isfinite(found.resolution.mean)
