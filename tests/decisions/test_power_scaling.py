# SPDX-License-Identifier: Apache-2.0
"""Power-scaling: moments against closed forms, diagnoses of clear cases, sites that are scaled."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.decisions.power_scaling import power_scaling
from pyro_implicit.density.target import Target
from pyro_implicit.fitting import Fit
from pyro_implicit.guides import StoredDraws


def normal(y, prior_sd=1.0):
    mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=torch.float64), prior_sd))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def moments(y, prior_sd, prior_power=1.0, likelihood_power=1.0):
    precision = prior_power / prior_sd**2 + likelihood_power * len(y)
    return likelihood_power * y.sum().item() / precision, math.sqrt(1 / precision)


def scaled(y, prior_sd, **options):
    mean, sd = moments(y, prior_sd)
    draws = {"mu": mean + sd * torch.randn(40, 200, dtype=torch.float64)}
    return power_scaling(Target(normal, y, prior_sd), draws, **options)


FAR = torch.tensor([9.5, 10.2, 9.1], dtype=torch.float64)
NEAR = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)


def test_curves_are_the_moments_of_the_scaled_posteriors():
    found = scaled(FAR, 1.0)
    for name in ("prior", "likelihood"):
        curve = found.curves[name]
        for exponent, mean, sd in zip(curve.exponents.tolist(), curve.mean, curve.sd, strict=True):
            exact = moments(FAR, 1.0, **{f"{name}_power": exponent})
            assert mean.item() == pytest.approx(exact[0], abs=0.06)
            assert sd.item() == pytest.approx(exact[1], rel=0.06)
        assert found.khat[name] < 0.7


@pytest.mark.parametrize(
    ("y", "prior_sd", "diagnosis"),
    [
        (FAR, 1.0, "prior-data conflict"),
        (NEAR, 0.02, "strong prior"),
        (NEAR, 10.0, "-"),
    ],
)
def test_diagnoses(y, prior_sd, diagnosis):
    found = scaled(y, prior_sd)
    assert found.diagnosis == {"mu": diagnosis}
    assert diagnosis in str(found) and "Priors that were scaled: mu" in str(found)


def test_sensitivity_is_the_gradient_of_the_distance():
    """The distance of two normals, integrated numerically over the range of the draws."""
    found = scaled(FAR, 1.0)
    mean, sd = moments(FAR, 1.0)
    reach = 3.6 * sd  # of 8,000 draws
    x = torch.linspace(mean - reach, mean + reach, 20_001, dtype=torch.float64)
    p = dist.Normal(mean, sd).cdf(x)
    gradients = []
    for exponent in (1 / 1.01, 1.01):
        other_mean, other_sd = moments(FAR, 1.0, prior_power=exponent)
        distances = []
        for sign in (1.0, -1.0):
            q = dist.Normal(other_mean, other_sd).cdf(x)
            a, b = (p, q) if sign > 0 else (1 - p, 1 - q)
            middle = 0.5 * (a + b)
            total = (a * (a / middle).log2() + b * (b / middle).log2()).sum()
            distances.append((total / (a + b).sum()).sqrt().item())
        gradients.append(max(distances) / math.log2(1.01))
    expected = sum(gradients) / 2
    assert found.prior.item() == pytest.approx(expected, rel=0.15)


def hierarchy(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with pyro.plate("groups", 3):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(theta[:2] + z, 1.0), obs=y)


def hierarchical_draws():
    return {
        "mu": torch.randn(4, 100),
        "tau": torch.rand(4, 100) + 0.5,
        "theta": torch.randn(4, 100, 3),
        "z": torch.randn(4, 100, 2),
    }


def test_only_top_level_priors_are_scaled():
    torch.manual_seed(0)
    target, draws = Target(hierarchy, torch.tensor([0.1, 0.7])), hierarchical_draws()
    found = power_scaling(target, draws)
    assert found.prior_sites == ("mu", "tau") and len(found.labels) == 7
    one = power_scaling(target, draws, prior_sites=["mu"], quantities=lambda d: d["mu"] + d["tau"])
    assert one.prior_sites == ("mu",) and one.labels == ("quantity",)
    assert len(one.plot().axes) == 2
    with pytest.raises(TypeError, match=r"prior_sites must be a list.*Cure: prior_sites=\['mu'\]"):
        power_scaling(target, draws, prior_sites="mu")


def test_a_summed_discrete_latent_counts_to_the_likelihood():
    def mixture(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(x * (2 * z - 1), 1.0), obs=y)

    def summed(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        shares, parts = dist.Categorical(torch.tensor([0.7, 0.3])), torch.stack([-x, x])
        with pyro.plate("rows", len(y)):
            family = dist.MixtureSameFamily(shares, dist.Normal(parts, 1.0))
            pyro.sample("y", family, obs=y)

    torch.manual_seed(0)
    y, draws = torch.tensor([1.0, -2.0]), {"x": torch.randn(4, 200)}
    one, other = (power_scaling(Target(model, y), draws) for model in (mixture, summed))
    torch.testing.assert_close(one.likelihood, other.likelihood, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one.prior, other.prior)


def test_refused_input():
    target, draws = Target(hierarchy, torch.tensor([0.1, 0.7])), hierarchical_draws()
    with pytest.raises(ValueError, match="no latent site 'nu'. Cure: prior_sites="):
        power_scaling(target, draws, prior_sites=["nu"])
    with pytest.raises(ValueError, match="no prior that could be scaled"):
        power_scaling(target, draws, prior_sites=[])
    with pytest.raises(ValueError, match="prior is not finite at 400 of 400 draws"):
        power_scaling(target, {**draws, "tau": -draws["tau"]}, prior_sites=["tau"])
    with pytest.raises(ValueError, match="no posterior draws"):
        power_scaling(target, {n: torch.ones_like(v) for n, v in draws.items()})


def test_of_a_result(capsys):
    mean, sd = moments(FAR, 1.0)
    stored = StoredDraws({"mu": mean + sd * torch.randn(4000, dtype=torch.float64)})
    result = Fit(guide=stored, source=(normal, (FAR,), {}))
    outside = torch.get_rng_state()
    found = result.sensitivity(seed=3)
    assert torch.equal(torch.get_rng_state(), outside)
    assert found.diagnosis == {"mu": "prior-data conflict"}
    assert torch.equal(found.prior, result.sensitivity(seed=3).prior)
    row = result.summary().loc["mu"]
    assert "WARNING" not in capsys.readouterr().err  # ArviZ logs that a chain has no R-hat
    assert row["mean"] == pytest.approx(mean, abs=0.05) and math.isnan(row["r_hat"])
    assert row["mcse_mean"] == pytest.approx(sd / math.sqrt(2000), rel=0.25)
    assert row["hdi_95%"] - row["hdi_5%"] == pytest.approx(2 * 1.645 * sd, rel=0.1)
