# SPDX-License-Identifier: Apache-2.0
"""Loops with faults: changing lengths, missing steps, groups without data, improper posteriors."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit import fit
from pyro_implicit.density import Target


@pytest.mark.parametrize("size", [8, 80])
def test_observations_of_a_loop_of_changing_length(size):
    """Also if the first runs have the same length, and the loop is long enough to be fused."""
    lengths = itertools.chain([size] * 4, itertools.cycle([size, size - 1]))

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        for i in range(next(lengths)):
            pyro.sample(f"y_{i}", dist.Normal(mean, 1.0), obs=y[i])

    target = Target(model, torch.zeros(size))
    with pytest.raises(
        ValueError, match=rf"site 'y_{size - 1}' is in some runs .* Cure: sample it"
    ):
        for _ in range(12):
            target.log_prob(torch.zeros(2, 1))


def test_latents_of_a_loop_of_changing_length():
    lengths = itertools.chain([8] * 4, itertools.cycle([8, 7]))

    def model(y):
        for i in range(next(lengths)):
            x = pyro.sample(f"x_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(x, 1.0), obs=y[i])

    target = Target(model, torch.zeros(8))
    with pytest.raises(ValueError, match=r"site 'x_7' is in some runs .* Cure: sample it always"):
        for _ in range(6):
            target.log_prob(torch.zeros(2, 8))


def test_observations_that_depend_on_a_branch():
    """Other observed sites in other runs are no fault if the latents choose them."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        name, scale = ("low", 1.0) if x < 0 else ("high", 2.0)
        pyro.sample(name, dist.Normal(x, scale), obs=torch.tensor(0.5))

    x = torch.tensor([[-1.0], [2.0]])
    scale = torch.tensor([1.0, 2.0])
    expected = dist.Normal(0.0, 1.0).log_prob(x[:, 0])
    expected = expected + dist.Normal(x[:, 0], scale).log_prob(torch.tensor(0.5))
    target = Target(model)
    for _ in range(3):
        torch.testing.assert_close(target.log_prob(x), expected)


@pytest.mark.parametrize("in_loop", [True, False])
def test_missing_steps_are_named(in_loop):
    y = torch.randn(60)
    y[3] = math.nan

    def model(y):
        x = torch.tensor(0.0)
        for t in range(len(y) if in_loop else 0):
            x = pyro.sample(f"x_{t}", dist.Normal(x, 1.0))
            pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=y[t])
        if not in_loop:
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            with pyro.plate("steps", len(y)):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    name = "y_3" if in_loop else "y"
    with pytest.raises(ValueError, match=rf"observation of site '{name}' is NaN in 1 of .* Cure"):
        Target(model, y)


def test_masked_missing_steps_have_the_density_of_the_others():
    """A fused random walk with masked steps: the exact marginal of the observed ones."""
    torch.manual_seed(0)
    y = torch.randn(60, dtype=torch.float64)
    y[::5] = math.nan

    def model(y):
        x = torch.tensor(0.0, dtype=y.dtype)
        for t in range(len(y)):
            x = pyro.sample(f"x_{t}", dist.Normal(x, torch.tensor(1.0, dtype=y.dtype)))
            with poutine.mask(mask=~y[t].isnan()):
                pyro.sample(f"y_{t}", dist.Normal(x, 0.5), obs=y[t].nan_to_num(0.0))

    target = Target(model, y)
    start = torch.zeros(1, 60, dtype=y.dtype)
    for _ in range(3):
        value, score, hessian = target.derivatives(start)
    assert target._fused.refusal is None
    # The integral of a Gaussian integrand is exact.
    precision = -hessian[0]
    mean = torch.linalg.solve(precision, score[0])
    found = value[0] + 0.5 * score[0] @ mean + 30 * math.log(2 * math.pi)
    found = found - 0.5 * torch.logdet(precision)
    seen = ~y.isnan()
    steps = torch.arange(1.0, 61.0, dtype=y.dtype)
    covariance = torch.minimum(steps[:, None], steps)[seen][:, seen]
    covariance = covariance + 0.25 * torch.eye(int(seen.sum()), dtype=y.dtype)
    exact = torch.distributions.MultivariateNormal(torch.zeros_like(y[seen]), covariance)
    torch.testing.assert_close(found, exact.log_prob(y[seen]), rtol=1e-9, atol=1e-9)


def lattice(islands):
    """A line of eight elements, and elements without neighbours."""
    neighbours = torch.diag(torch.ones(7), 1)
    neighbours = torch.nn.functional.pad(neighbours + neighbours.mT, (0, islands, 0, islands))
    return neighbours


def test_islands_of_a_lattice_without_an_inverse():
    neighbours = lattice(2)

    def model(y):
        precision = neighbours.sum(0).diag() - 0.9 * neighbours
        phi = pyro.sample(
            "phi", dist.MultivariateNormal(torch.zeros(10), precision_matrix=precision)
        )
        pyro.sample("y", dist.Normal(phi, 0.5).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"invalid values\. Cure: .*\(islands\) have rows of"):
        Target(model, torch.zeros(10))


def intrinsic(y, islands):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (8 + islands,))
    phi = pyro.sample("phi", flat)
    one, other = lattice(islands).triu().nonzero().T
    pyro.factor("prior", -0.5 * ((phi[one] - phi[other]) / tau).square().sum() - 7 * tau.log())
    pyro.sample("y", dist.Normal(phi[: len(y)], 0.5).to_event(1), obs=y)


def test_islands_without_data():
    with pytest.raises(
        ValueError, match=r"improper: 2 of 10 elements of site 'phi' .* Cure: a pro"
    ):
        fit(intrinsic, "auto", torch.zeros(8), 2, progress=False)


def test_islands_with_data_have_the_posterior_of_their_data():
    torch.manual_seed(0)
    y = torch.randn(10)
    target = Target(intrinsic, y, 2)
    target.refuse_improper()
    points = torch.randn(3, target.latent_dim)
    _, score = target.score(points)
    torch.testing.assert_close(score[:, -2:], 4 * (y[-2:] - points[:, -2:]))


@pytest.mark.parametrize("support", [dist.constraints.positive, dist.constraints.real])
def test_scale_of_no_group(support):
    """A scale with a flat prior that no data see."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("scale", dist.ImproperUniform(support, (), ()))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([4]).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"improper: 1 of 1 elements of site 'scale' .* Cure: a p"):
        Target(model, torch.zeros(4)).refuse_improper()


def test_flat_prior_of_a_share_is_proper():
    def model(y):
        pyro.sample("share", dist.ImproperUniform(dist.constraints.unit_interval, (), ()))
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([4]).to_event(1), obs=y)

    target = Target(model, torch.zeros(4))
    target.refuse_improper()
    assert target.latent_dim == 2


def test_groups_without_data_have_the_density_of_their_prior():
    """Also in a loop that is fused."""
    torch.manual_seed(0)
    y = torch.randn(60)

    def model(y):
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        for i in range(60):
            theta = pyro.sample(f"theta_{i}", dist.Normal(0.0, tau))
            if i % 2:
                pyro.sample(f"y_{i}", dist.Normal(theta, 1.0), obs=y[i])

    target = Target(model, y)
    points = 0.3 * torch.randn(4, 61)
    for _ in range(3):
        _, score = target.score(points)
    assert target._fused.refusal is None
    tau = points[:, :1].exp()
    torch.testing.assert_close(score[:, 1::2], -points[:, 1::2] / tau**2)


@pytest.mark.parametrize("by_handler", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_masks_that_change_after_their_site(by_handler, in_place):
    """Capture and recapture, as in Pyro's example: an animal counts once it was seen."""

    def model(y):
        rate = pyro.sample("rate", dist.Beta(1.0, 1.0))
        seen = torch.zeros(len(y), dtype=torch.bool)
        with pyro.plate("animals", len(y)):
            for t in pyro.markov(range(y.shape[1])):
                outer, inner = (seen, True) if by_handler else (True, seen)
                with poutine.mask(mask=outer):
                    pyro.sample(f"y_{t}", dist.Bernoulli(rate).mask(inner), obs=y[:, t])
                seen = seen.logical_or_(y[:, t] > 0) if in_place else seen | (y[:, t] > 0)

    y = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    if in_place:
        message = "changes the mask of site 'y_0' after it.* Cure: a new tensor"
        with pytest.raises(ValueError, match=message):
            Target(model, y)
    else:  # the first capture does not count
        points = torch.tensor([[0.3]])
        rate = points[0].sigmoid()
        expected = rate.log() + 2 * (-rate).log1p() + (rate * (1 - rate)).log()
        torch.testing.assert_close(Target(model, y).log_prob(points), expected)


def test_a_plate_inside_of_a_mask():
    def model(y):
        with poutine.mask(mask=torch.tensor([True, False, True])), pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    with pytest.warns(UserWarning, match="1 of 3 elements of latent 'x' have no prior"):
        assert Target(model, torch.zeros(3)).latent_dim == 3
