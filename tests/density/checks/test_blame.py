# SPDX-License-Identifier: Apache-2.0
"""What a model must be, message by message; and starts at which it raises errors."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints

from pyro_implicit.density import SubsampledError, Target, find_modes
from pyro_implicit.density.checks.numerics import blame

Y = torch.tensor([0.3, -1.2, 2.0, 0.5])


def regression(y, x=None):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def with_nan():
    return torch.where(torch.arange(4) == 2, math.nan, Y)


def test_nan_in_observations():
    message = r"observation of site 'y' is NaN in 1 of 4 elements. Cure: .*fn.mask"
    with pytest.raises(ValueError, match=message):
        Target(regression, with_nan())


def test_masked_nan_is_no_fault():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(loc, 1.0).mask(~y.isnan()), obs=y.nan_to_num())

    assert Target(model, with_nan()).score(torch.zeros(1, 1))[1].isfinite()


OUTSIDE = [
    (dist.Exponential(1.0), [2.0, -1.0], "outside GreaterThanEq.* in 1 of 2"),
    (dist.Poisson(1.0), [0.5, 3.0], "outside IntegerGreaterThan.* in 1 of 2"),
    (dist.Bernoulli(0.3).expand([2]).to_event(1), [1.0, 2.0], "outside .*Bool.* in 1 of 1"),
    (dist.HalfNormal(1.0), [1.0, -1.0], "outside GreaterThanEq.* in 1 of 2"),
]


@pytest.mark.parametrize("fn, y, message", OUTSIDE)
def test_observations_that_are_never_possible(fn, y, message):
    def model(fn):
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", fn, obs=torch.tensor(y))

    with pytest.raises(ValueError, match=f"observation of site 'y' is {message}.*Cure"):
        Target(model, fn)


def test_observations_outside_that_may_be_meant():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        gray = dist.Bernoulli(logits=x.expand(2), validate_args=False).to_event(1)
        pyro.sample("gray", gray, obs=torch.tensor([0.2, 0.9]))
        masked = dist.Exponential(x.exp().expand(2)).mask(torch.tensor([True, False]))
        pyro.sample("masked", masked, obs=torch.tensor([1.0, -1.0]))

    assert Target(model).log_prob(torch.zeros(1, 1)).isfinite()


@pytest.mark.parametrize("by_handler", [True, False])
@pytest.mark.parametrize("missing", [math.nan, 0.0])
def test_what_is_masked_has_no_gradient(missing, by_handler):
    y = torch.tensor([3.0, missing, 1.0])
    here = torch.tensor([True, False, True])

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        fn = dist.LogNormal(x, 1.0)
        with pyro.plate("rows", 3), poutine.mask(mask=here if by_handler else True):
            pyro.sample("y", fn if by_handler else fn.mask(here), obs=y)

    _, score = Target(model).score(torch.zeros(2, 1))
    assert score.flatten().tolist() == pytest.approx([math.log(3.0)] * 2)


def test_nan_in_covariates_names_the_site():
    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(slope * x, 1.0, validate_args=False), obs=y)

    message = "site 'y' at 20 of 20: its log-density is NaN: look at the parameters of Normal"
    with pytest.raises(ValueError, match=message):
        find_modes(Target(model, with_nan(), Y))


def test_zero_latents():
    def observed(y):
        pyro.sample("y", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0), obs=y)
        pyro.deterministic("twice", 2 * y)

    message = r"the model has no latent sites: all that it samples is observed \('y'\). Cure: "
    with pytest.raises(RuntimeError, match=message):
        Target(observed, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="no latent sites: it samples nothing. Cure"):
        Target(lambda: None)
    with pytest.raises(RuntimeError, match=r"have no elements: 'x' of shape \(0,\). Cure"):
        Target(lambda: pyro.sample("x", dist.Normal(torch.zeros(0), 1.0).to_event(1)))


@pytest.mark.parametrize("by_handler", [True, False])
def test_masked_latents(by_handler):
    mask = torch.tensor([True, False, False, False])

    def model():
        outer, inner = (mask, True) if by_handler else (True, mask)
        with pyro.plate("rows", 4), pyro.poutine.mask(mask=outer):
            x = pyro.sample("x", dist.Normal(0.0, 1.0).mask(inner))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(1.0))

    message = r"3 of 4 elements of latent 'x' have no prior, because the model masks them.*improper"
    with pytest.warns(UserWarning, match=message + ".*Cure: mask observations, but not latents"):
        Target(model)


def forgotten(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("d", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def test_forgotten_observations():
    x = torch.linspace(-1, 1, 60)
    message = "observes nothing, and no site depends on 'y': 60 latents in plate 'd'. Cure: .*obs="
    with pytest.warns(UserWarning, match=message):
        Target(forgotten, x)


def test_a_factor_is_no_forgotten_observation():
    """``poutine.uncondition`` makes a latent variable without elements of it."""

    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.factor("penalty", -x.square().expand(3))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.warns(UserWarning, match="no site depends on 'y'") as caught:
        Target(pyro.poutine.uncondition(model), torch.zeros(3))
    assert not any("penalty" in str(one.message) for one in caught)


def prior_only():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    with pyro.plate("two", 2):
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))


def chain(y):
    with pyro.plate("two", 2):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("total", dist.Normal(x.sum(), y))


@pytest.mark.parametrize(
    "model, args", [(forgotten, (Y, Y)), (prior_only, ()), (chain, (torch.tensor(1.0),))]
)
def test_nothing_is_said_of_models_that_may_be_meant(model, args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target(model, *args)


def test_latents_in_a_sequential_plate_that_subsamples():
    def model():
        for row in pyro.plate("rows", 4, subsample_size=2):
            pyro.sample(f"x{row}", dist.Normal(0.0, 1.0))

    pyro.set_rng_seed(0)
    with pytest.raises(SubsampledError, match="plate 'rows' of site 'x.' subsamples 2 of 4.*Cure"):
        Target(model)
    with pytest.raises(ValueError, match="in a sequential plate that subsamples, 'rows'.*Cure"):
        Target.of_minibatches(model, batch=(), allow_local=True)


UNIT = dist.Uniform(torch.zeros(()), 1.0)
IMPOSSIBLE = [
    (UNIT, -1.0, r"site 'y' at 20 of 20: its observation is outside Interval"),
    (dist.Normal(0.0, 1e-30), 1.0, r"site 'y' at 20 of 20: its log-density is -inf in 1 of 1 elem"),
    (dist.Binomial(3, 0.5), 5.0, r"site 'y' at 20 of 20: its observation is outside Integer"),
]  # fmt: skip


@pytest.mark.parametrize("fn, y, message", IMPOSSIBLE)
def test_sites_to_blame(fn, y, message):
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", fn, obs=torch.tensor(y))

    with pytest.raises(ValueError, match="finite at none of 50 initial points: " + message):
        find_modes(Target(model))


def picky(threshold):
    """A matrix without a Cholesky factor wherever x is too small, as a kernel's can be."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    factor = torch.linalg.cholesky((x - threshold).reshape(1, 1))
    pyro.sample("y", dist.Normal(x, 1.0 + 0 * factor.squeeze()), obs=torch.tensor(2.0))


@pytest.mark.parametrize("seed", range(3))
def test_starts_at_which_the_model_raises_are_left_out(seed):
    """Half of the prior; ``init_to_median`` may be one of them."""
    pyro.set_rng_seed(seed)
    density = Target(picky, torch.tensor(0.0))
    modes = find_modes(density)
    assert modes.loc.item() == pytest.approx(1.0, abs=0.2)
    assert density.is_vectorized
    assert 10 < len(density.sample_prior(100)) < 90


def test_a_model_that_raises_everywhere():
    with pytest.raises(torch.linalg.LinAlgError):
        Target(picky, torch.tensor(1e3))
    density = Target(picky, torch.tensor(-1e3))
    density._runs.model.args = density.args = (torch.tensor(1e3),)
    with pytest.raises(
        ValueError, match="at none of 1 initial points.*model.* raises .*LinAlgError: linalg.chol"
    ):
        find_modes(density)


def test_points_are_found_in_a_batch():
    density = Target(picky, torch.tensor(0.0))
    points = torch.tensor([1.0, -1.0, 0.5, 2.0, -3.0]).unsqueeze(-1)
    bad = points.squeeze(-1) < 0
    log_prob, score = density.score(points)
    assert torch.equal(log_prob.isinf(), bad) and (score[bad] == 0).all()
    torch.testing.assert_close(score[~bad, 0], 2 - 2 * points[~bad, 0])
    hessian = density.derivatives(points)[2]
    assert hessian.shape == (5, 1, 1) and (hessian[bad] == 0).all()
    torch.testing.assert_close(hessian[~bad], torch.full((3, 1, 1), -2.0))
    assert density.is_vectorized


def test_no_points():
    assert Target(prior_only).log_prob(torch.zeros(0, 3)).shape == (0,)


def test_improper_priors_have_no_reason_to_warn():
    def model(y):
        x = pyro.sample("x", dist.ImproperUniform(constraints.positive, (), ()))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    assert Target(model, torch.tensor(1.0)).latent_dim == 1


def test_a_gradient_that_is_nan_is_said_by_latent():
    dose = torch.tensor([0.0, 1.0, 2.0])

    def model():
        base = pyro.sample("base", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.LogNormal(0.0, 1.0))
        loc = torch.where(dose > 0, base + 1 / (1 + torch.exp(-slope * dose.log())), base)
        pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=torch.zeros(3))

    assert Target(model).log_prob(torch.zeros(1, 2)).isfinite()
    message = "its gradient by 'slope' is not finite. Cure: torch.where computes"
    with pytest.raises(ValueError, match="finite at none of 50 initial points.*" + message):
        find_modes(Target(model))


def product(x, y):
    slope = pyro.sample("slope", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ slope, 1.0), obs=torch.as_tensor(y))


def test_a_model_that_cannot_run_on_arrays():
    x = np.ones((4, 1), dtype=np.float32)
    message = "raises TypeError: unsupported .*: argument 1 is a NumPy array. Cure: torch."
    with pytest.raises(TypeError, match=message + "as_tensor of these arguments$"):
        Target(product, x, Y)
    message = "argument 'x' is a NumPy array and argument 'y' is a list. Cure: torch.as_tensor of"
    with pytest.raises(TypeError, match=message):
        Target(product, x=x, y=Y.tolist())


def test_arrays_are_not_to_blame_for_a_missing_argument():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'$"):
        Target(product, np.ones((4, 1)))


def through_numpy(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    loc = torch.as_tensor(np.asarray(x) * slope.numpy())
    pyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    "x, cure",
    [(Y, "a model that computes by torch alone"), (Y.numpy(), "torch.as_tensor of these")],
)
def test_a_model_that_raises_where_its_gradient_is_asked_for(x, cure):
    message = f"no site by itself, but with gradients the model raises RuntimeError: .*Cure: {cure}"
    with pytest.raises(ValueError, match=message):
        find_modes(Target(through_numpy, x, Y))


def test_a_type_error_is_no_fault_of_the_draws():
    density = Target(product, Y[:, None], Y)
    density._runs.model.args = density.args = (Y[:, None].numpy(), Y)
    message = "it raises TypeError: unsupported .*Cure: torch.as_tensor of these arguments$"
    assert re.search(message, blame(density, torch.zeros(2, 1)))
    density._runs.model.args = density.args = (None, Y)
    message = "it raises TypeError: .*Cure: arguments of the types that the model takes$"
    assert re.search(message, blame(density, torch.zeros(2, 1)))


def test_an_error_at_all_values_is_no_fault_of_the_draws():
    x = torch.ones(3, 2)

    def model(x):
        slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ slope, 1.0).to_event(1), obs=torch.ones(3))

    density = Target(model, x)
    density._runs.model.args = density.args = (x.double(),)
    message = "at 3 of 3: it raises RuntimeError: .*Cure: correct the model: none of the 5 vectors"
    assert re.search(message, blame(density, torch.zeros(3, 2)))

    def sometimes():
        if pyro.sample("x", dist.Normal(0.0, 1.0)) > 5:
            raise RuntimeError("too large")

    found = blame(Target(sometimes), torch.tensor([[0.0], [9.0], [1.0]]))
    assert "at 1 of 3: it raises RuntimeError: too large. Cure: give the sites priors" in found
    found = blame(Target(sometimes), torch.tensor([[9.0], [8.0]]))  # but not at init_loc
    assert "at 2 of 2: it raises RuntimeError: too large. Cure: give the sites priors" in found


def test_finite_points_are_not_blamed_on_the_gradient():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(1.0))

    found = blame(Target(model), torch.zeros(3, 1))
    assert "random beyond its latents" in found and "torch.where" not in found
