# SPDX-License-Identifier: Apache-2.0
"""Initial values of mean fields: where they start, how wide, and the best of several starts."""

from __future__ import annotations

import re
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import BudgetPolicy, FitPolicy
from pyro_implicit.fitting.policy import DEFAULT
from pyro_implicit.fitting.starts import best_of_race, between, first_scales

SIZE = 101


def test_a_start_at_which_the_gradient_overflows_is_moved():
    """The median of this prior is the smallest number of float32, where the density is finite."""

    def model():
        precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
        pyro.sample("y", dist.Normal(0.0, precision**-0.5), obs=torch.tensor(30.0))

    pyro.set_rng_seed(0)
    density = Target(model)
    start = density.init_loc.unsqueeze(0)
    assert density.log_prob(start).isfinite() and not density.score(start)[1].isfinite()
    moved = {name: value.unsqueeze(0) for name, value in between(density).items()}
    assert density.score(density.unconstrain(moved))[1].isfinite()


def test_a_start_that_training_would_not_leave_is_moved():
    y = torch.tensor([0.3, -0.2, 0.1])

    def model(prior):
        sigma = pyro.sample("sigma", prior)
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(0.0, sigma), obs=y)

    density = Target(model, dist.InverseGamma(0.001, 0.001))
    assert density.init_loc > 50  # the logarithm of the median
    assert between(density)["sigma"] < 1e6
    density = Target(model, dist.LogNormal(1.0, 0.1))
    pyro.set_rng_seed(0)
    drawn = density.sample_prior(1)[0]
    pyro.set_rng_seed(0)
    expected = density.init_loc + 0.3 * (drawn - density.init_loc)
    torch.testing.assert_close(between(density)["sigma"], expected.exp().squeeze())


def summed(y, sd):
    x = pyro.sample("x", dist.Normal(torch.zeros(100), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(), sd), obs=y)


@pytest.mark.parametrize(
    ("y", "sd", "scale", "rate"),
    [
        (0.01, 10.0, 0.1, 0.05),
        (0.01, 0.1, 0.1, 0.015),
        (0.01, 0.01, 0.03, 0.0015),
        (4.0, 0.1, 0.1, 0.05),
    ],
)
def test_scales_at_which_a_sum_stays_probable(y, sd, scale, rate):
    """A step of ``lr`` adds ``100 * lr`` to the sum, draws add a Normal of sd ``10 * scale``.

    The squared distance to y over ``2 * sd**2`` must not grow by more than the limit, 10 nats per
    latent variable. Near y the first step overshoots; it is right if y is 4.
    """
    target = Target(summed, torch.tensor(y), sd)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    found = first_scales(target, {"x": torch.zeros(100)}, 0.05)
    assert found == (pytest.approx(scale), pytest.approx(rate))
    assert torch.equal(torch.rand(1), expected)


def two_modes() -> None:
    """Two normal modes at -1 and 1, the second 40 nats higher in its evidence."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), (SIZE,)))
    low, high = (dist.Normal(loc, 0.2).to_event(1).log_prob(x.expand(SIZE)) for loc in LOCS)
    pyro.factor("data", torch.logaddexp(low, high + 40.0))


LOCS = torch.tensor([-1.0, 1.0]).unsqueeze(-1).expand(2, SIZE)


def test_the_best_of_several_starts_is_in_the_higher_mode(double: None) -> None:
    """Its ELBO is near the log evidence, because the mode is normal; Adam still moves around it."""
    target = Target(two_modes)
    target.log_prob(torch.zeros(2, SIZE))
    start = {"x": torch.full((SIZE,), -1.0)}
    values, note = best_of_race(target, start, 0.1, 0.02, 100.0)
    assert (values["x"] - 1.0).abs().max() < 0.5
    best, median = map(float, re.findall(r"(?:of|all:) (-?\d+)", note.partition("starts")[2]))
    assert best == pytest.approx(40.0, abs=8.0) and median <= best
    alone = replace(DEFAULT.start, num_raced=1)
    values, note = best_of_race(target, start, 0.1, 0.02, 100.0, alone)
    assert (values["x"] + 1.0).abs().max() < 0.5
    assert float(re.findall(r"of (-?\d+) after", note)[0]) == pytest.approx(0.0, abs=8.0)
    assert best_of_race(target, start, 0.1, 0.05, 0.0) == (start, "")


def test_half_of_the_starts_under_a_vague_prior_are_near_the_origin() -> None:
    """From draws that are thousands away, 200 steps reach nothing; the first start is as far."""

    def vague() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(SIZE), 1e5).to_event(1))
        pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=torch.ones(SIZE))

    pyro.set_rng_seed(0)
    start = {"x": torch.full((SIZE,), 1e5)}
    values, note = best_of_race(Target(vague), start, 0.1, 0.05, 100.0)
    torch.testing.assert_close(values["x"], torch.ones(SIZE), rtol=0, atol=0.8)
    assert "the best of 16 starts" in note


def test_starts_that_lose_the_density_are_no_starts(double: None) -> None:
    """One step leaves the support; without a gradient, nothing leads back."""

    def narrow() -> None:
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), (SIZE,)))
        pyro.factor("data", torch.where(x.abs().amax() < 0.02, -x.square().sum(), -torch.inf))

    start = {"x": torch.full((SIZE,), 0.01)}
    assert best_of_race(Target(narrow), start, 1e-3, 0.05, 100.0) == (start, "")


@pytest.mark.parametrize("num_raced", [1, 16])
def test_chains_of_many_latent_variables_start_in_the_higher_mode(num_raced: int) -> None:
    """With this seed, one start alone ends in the lower mode."""
    budget = BudgetPolicy(most_gradients=4, least_gradients=4, patient_seconds=0.0)
    policy = FitPolicy(budget=budget, start=replace(DEFAULT.start, num_raced=num_raced))
    with pytest.warns(UserWarning, match="chains stopped"):
        found = fit(two_modes, policy=policy, seed=7, num_steps=100, progress=False)
    assert f"the best of {num_raced} starts" in found.stages[0].outcome
    assert ((found.guide.median()["x"] > 0) == (num_raced == 16)).all()
