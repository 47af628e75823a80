# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that errs in the last bit."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit import fit
from pyro_implicit.density import Target, find_modes
from pyro_implicit.density.checks.numerics import (
    InexactArithmetic,
    beyond_resolution,
    harmful_rounding,
    is_rounding,
    loses_digits,
    widen_if_rounded,
)
from pyro_implicit.fitting import Fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_off_by_one_last_bit(dtype):
    x = torch.rand(1000, dtype=dtype) + 1
    with InexactArithmetic():
        found = x.log()
    off = (found - x.log()) / x.log()
    # Multiplied by 1 + eps, and rounded once more.
    eps = torch.finfo(dtype).eps
    assert ((off.abs() > 0.2 * eps) & (off.abs() < 2 * eps)).all()
    assert (off > 0).any() and (off < 0).any()


def test_copies_counts_and_the_random_streams_stay_as_they_are():
    x = torch.arange(9.0)
    state = torch.get_rng_state()
    with InexactArithmetic():
        assert torch.equal(x.double().long().float().clone().reshape(3, 3).flatten(), x)
        _ = x + 1
    assert torch.equal(torch.get_rng_state(), state)


def beta_binomial(y):
    a = pyro.sample("a", dist.HalfCauchy(2.0))
    b = pyro.sample("b", dist.HalfCauchy(2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.BetaBinomial(a, b, 20), obs=y)


def test_what_absorption_leaves_is_no_density():
    """Where a + b is a, the data seem likelier than anywhere else, and smoothly so."""
    density = Target(beta_binomial, torch.tensor([3.0, 12.0, 7.0, 18.0, 1.0, 9.0, 15.0]))
    points = torch.tensor([[27.0, 8.7], [0.3, 0.4]])
    log_density = density.log_prob(points)
    assert log_density[0] > log_density[1]
    assert is_rounding(density, points).tolist() == [True, False]


def test_the_search_does_not_climb_where_numbers_are_absorbed():
    y = torch.tensor([3.0, 12.0, 7.0, 18.0, 1.0, 9.0, 15.0, 0.0, 19.0, 4.0, 11.0, 6.0])
    for seed in range(3):
        pyro.set_rng_seed(seed)
        assert (find_modes(Target(beta_binomial, y)).loc.abs() < 3).all()


def near_one():
    with pyro.plate("groups", 2):
        p = pyro.sample("p", dist.Beta(0.1, 0.2))
        pyro.sample("y", dist.Binomial(10, p), obs=torch.tensor([3.0, 10.0]))


def test_single_precision_stands_still_near_a_bound():
    target = Target(near_one)
    points = torch.stack([torch.zeros(50), torch.linspace(15.0, 25.0, 50)], -1)
    assert harmful_rounding(target, points) > 0.3
    assert target.widen(points) and harmful_rounding(target, points) == 0.0
    found = target.log_prob(points)
    assert found.dtype == torch.float32
    log_rest = torch.nn.functional.logsigmoid(-points[:, 1].double())  # log(1 - p)
    torch.testing.assert_close(found - found[0], (0.2 * (log_rest - log_rest[0])).float())


def test_single_precision_stands_still_in_a_wide_interval():
    """Its values are integers there; those of double precision are not, and come back."""
    y = torch.tensor([3.1, 4.2, 3.6])

    def model(y):
        mu = pyro.sample("mu", dist.Uniform(torch.full((2,), -1e7), 1e7).to_event(1))
        pyro.sample("y", dist.Normal(mu[0], 1.0).expand([3]).to_event(1), obs=y)

    target = Target(model, y)
    draws = 6.5e-7 + 4.5e-8 * torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    values = target.constrain(draws)["mu"]
    assert torch.equal(values, values.round()) and loses_digits(target, draws)
    assert "from here in float64" in widen_if_rounded(target, lambda number: draws[:number])
    values, exact = target.constrain(draws)["mu"], 2e7 * draws.double().sigmoid() - 1e7
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(target.unconstrain({"mu": values}), draws, rtol=1e-5, atol=0)
    transform = target.transforms["mu"]
    log_det = transform.log_abs_det_jacobian(draws, values)
    torch.testing.assert_close(log_det, torch.full((32,), 2 * math.log(5e6)))
    points = torch.tensor([[3.3, -7.7], [0.0, 0.0]]).double()  # of single precision
    found = transform.log_abs_det_jacobian(points.float(), points)  # computed in double precision
    exact = (points.sigmoid() * (-points).sigmoid()).log().sum(-1)
    torch.testing.assert_close(found.diff(), exact.diff(), rtol=0, atol=1e-9)
    ends = transform(torch.tensor([[-200.0, 200.0]]))
    assert (ends > -1e7).sum() == 1 and (ends < 1e7).sum() == 2 and ends.dtype == torch.float32
    assert torch.equal(pickle.loads(pickle.dumps(transform))(draws), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 2.0), (-3.0, 0.0)])
def test_the_last_number_before_a_bound(low, high, dtype):
    torch.set_default_dtype(dtype)
    target = Target(lambda: pyro.sample("x", dist.Uniform(low, high)))
    digits = -math.log(torch.finfo(dtype).eps)

    def is_lost(x):
        return beyond_resolution(target, torch.full((9, 1), x)) == ("x",)

    assert not is_lost(digits - 2) and is_lost(digits + 2)
    assert is_lost(-digits - 2) == (low != 0) and not is_lost(2 - digits)


def test_sites_without_elements_and_simplices_are_resolved():
    def model():
        pyro.sample("x", dist.Uniform(torch.zeros(0), 1.0).to_event(1))
        pyro.sample("shares", dist.Dirichlet(torch.full((3,), 0.05)))

    assert beyond_resolution(Target(model), torch.full((9, 2), 20.0)) == ()


def test_fit_finds_the_mass_near_a_bound(tmp_path):
    result = fit(near_one, "auto", seed=0, progress=False)
    share = (result.sample(4000)["p"][:, 1] < 0.999).double().mean()
    exact = dist.Beta(torch.tensor(10.1).double(), 0.2).sample((100_000,)) < 0.999
    assert abs(share - exact.double().mean()) < 0.02  # 0.035 in single precision
    result.save(tmp_path / "result")
    loaded = Fit.load(tmp_path / "result", near_one)
    assert loaded.target.is_wide and result.target.is_wide
    assert torch.equal(loaded.sample(100, seed=0)["p"], result.sample(100, seed=0)["p"])
    changed = Fit.load(tmp_path / "result", poutine.scale(near_one, scale=2.0))
    with pytest.raises(ValueError, match="log-density at a draw was"):
        _ = changed.target


def test_a_model_that_no_longer_runs_in_double_precision():
    def mixed():
        p = pyro.sample("p", dist.Beta(10.1, 0.1))
        pyro.factor("f", (torch.eye(1) @ p.reshape(1)).sum())

    result = Fit(source=(mixed, (), {}), in_double=True)
    with pytest.warns(UserWarning, match="the model ran in float64 in fit.*Cure: "):
        assert not result.target.is_wide


def test_equal_points_come_back():
    points = torch.tensor([[0.3, 0.7]]).expand(4, 2)
    assert not loses_digits(Target(near_one), points)
