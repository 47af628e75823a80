# SPDX-License-Identifier: Apache-2.0
"""The frame that a guide finds for itself."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, init_to_median, init_to_value
from pyro.optim import Adam

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, AutoSemiImplicit, InjectiveELBO
from pyro_implicit.guides import Frame, auto_implicit
from pyro_implicit.guides import affine_frame as auto_frame
from pyro_implicit.guides.policy import FRAME

CPU = torch.device("cpu")
both = pytest.mark.parametrize("make_guide", [AutoImplicit, AutoSemiImplicit])


def data_of(num_rows, dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.9 * x[:, 0] + 0.01 * x[:, 1]
    return x, x.sum(-1) + 5 + torch.randn(num_rows, generator=generator, dtype=torch.float64)


def regression(num_rows=60, dim=3, seed=0, subsample_size=None):
    """A linear regression of wide priors, and its posterior's mean and covariance."""
    x, y = data_of(num_rows, dim, seed)

    def model():
        beta = pyro.sample("beta", dist.Normal(x.new_zeros(dim), 1e3).to_event(1))
        with pyro.plate("rows", num_rows, subsample_size=subsample_size) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ beta, 1.0), obs=y[rows])

    covariance = torch.linalg.inv(x.T @ x + 1e-6 * torch.eye(dim, dtype=torch.float64))
    return model, covariance @ x.T @ y, covariance


def simple():
    pyro.sample("x", dist.Normal(50.0, 3.0).expand([2]).to_event(1))


@both
def test_a_gaussian_posterior_is_found(make_guide):
    model, mean, covariance = regression()
    guide = make_guide(model)
    guide()
    torch.testing.assert_close(guide.frame_loc.detach(), mean)
    factor = guide.frame_scale_tril.detach()
    torch.testing.assert_close(factor @ factor.T, covariance)
    assert (guide.loc == 0).all() and (guide.scale == 1).all()


def test_the_exact_guide_starts_at_the_posterior():
    model, _, _ = regression()
    guide = AutoImplicit(model, AutoregressiveGenerator)
    losses = [InjectiveELBO(4).loss(model, guide) for _ in range(4)]
    assert max(losses) - min(losses) < 0.005


def test_it_repeats_and_leaves_the_random_streams():
    before = torch.random.get_rng_state()
    frames = []
    for seed in (0, 1):
        pyro.set_rng_seed(seed)
        start = init_to_value(values={"x": torch.zeros(2)})
        state = torch.random.get_rng_state()
        frames.append(auto_frame.find_frame(simple, start, CPU, (), {}))
        assert torch.equal(torch.random.get_rng_state(), state)
    for first, second in zip(*frames, strict=True):
        assert first is second is None or torch.equal(first, second)
    torch.random.set_rng_state(before)


def test_the_search_is_unseen_by_handlers_outside():
    with poutine.trace() as traced:
        AutoImplicit(local)()
    assert set(traced.trace.nodes) >= {"_AutoImplicit_latent", "scale", "groups", "z"}


def local():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("groups", 3):
        pyro.sample("z", dist.Normal(0.0, scale))


def test_a_start_decides_between_two_modes():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 5.0))
        pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))

    for sign in (-1, 1):
        pyro.clear_param_store()
        start = init_to_value(values={"x": torch.tensor(sign * 1.0)})
        guide = AutoImplicit(model, init_loc_fn=start, frame="mode")
        draws = guide.sample_posterior(100)["x"]
        assert (sign * draws > 2).all()


def test_minibatches():
    """The location is off by what the mean of the modes of all its minibatches is off.

    Root mean squares of the norm over data sets, in standard deviations of the posterior: about 75
    for the mode of one minibatch, and a tenth for the mean of the first mode and of 100 steps.
    """
    errors, single = [], []
    for seed in range(8):
        model, mean, covariance = regression(2000, subsample_size=30, seed=seed)
        factor = torch.linalg.cholesky(covariance)

        def off(loc, factor=factor, mean=mean):
            offset = (loc - mean).unsqueeze(-1)
            return torch.linalg.solve_triangular(factor, offset, upper=False).norm().square()

        x, y = data_of(2000, seed=seed)
        for rows in torch.randperm(2000)[:1980].split(30):
            single.append(off(torch.linalg.lstsq(x[rows], y[rows].unsqueeze(-1)).solution[:, 0]))
        frame = auto_frame.find_frame(model, init_to_median, CPU, (), {})
        errors.append(off(frame.loc))
        ratio = torch.linalg.solve_triangular(factor, frame.scale_tril, upper=False)
        assert 0.5 < torch.linalg.det(ratio) < 2
    expected = torch.stack(single).mean().sqrt() / math.sqrt(1 + FRAME.num_minibatches)
    assert torch.stack(errors).mean().sqrt() < 1.3 * expected


def test_newton_steps_that_diverge_are_taken_back():
    """The first minibatch's mode is near 0, where the cube is flat and the first step too long."""
    y = 1 + torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def model():
        x = pyro.sample("x", dist.Normal(y.new_zeros(()), 10.0))
        with pyro.plate("rows", len(y), subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(x**3, 0.2), obs=y[rows])

    frame = auto_frame.find_frame(model, init_to_median, CPU, (), {})
    assert 0.4 < frame.loc.item() < 1.1


def test_many_latents_have_a_diagonal_frame():
    loc, scale = torch.linspace(-3, 3, 150), torch.linspace(0.05, 2, 150)

    def model():
        pyro.sample("x", dist.Normal(loc, scale).to_event(1))

    guide = AutoSemiImplicit(model)
    guide()
    assert guide.frame_scale_tril is None
    assert ((guide.frame_loc - loc).abs() < 0.3 * scale).all()
    torch.testing.assert_close(guide.frame_scale.log(), scale.log(), atol=0.3, rtol=0)


def test_a_start_without_a_density_is_left_for_draws_of_the_prior():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.where(x > 0, -x.clamp(min=1e-3).reciprocal(), -math.inf))

    start = init_to_value(values={"x": torch.tensor(-1.0)})
    frame = auto_frame.find_frame(model, start, CPU, (), {})
    assert frame.loc > 0


@both
def test_a_model_whose_density_fails_gets_one_warning(make_guide):
    calls = []

    def model():
        pyro.sample("x", dist.Normal(7.0, 1.0))
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("no second run")

    start = init_to_value(values={"x": torch.tensor(5.0)})
    guide = make_guide(model, init_loc_fn=start, frame="mode")
    with pytest.warns(UserWarning, match="found no frame.*ArithmeticError: no second.*Cure") as all:
        guide()
    assert len(all) == 1 and all[0].filename == __file__
    assert guide.frame_loc is None and guide.loc.item() == 5.0
    assert guide.scale.item() == pytest.approx(0.1)


def test_a_part_of_a_model_has_no_frame():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("z", dist.Normal(x, 1.0))

    guide = AutoGuideList(model)
    for name in "xz":
        guide.append(AutoImplicit(poutine.block(model, expose=[name])))
    guide()
    assert all(part.frame_loc is None for part in guide)


def kinds():
    yield "none", {"frame": None}
    yield "diagonal", {"frame": Frame(torch.ones(2), torch.ones(2))}
    yield "full", {"frame": Frame(torch.ones(2), scale_tril=torch.eye(2))}


@pytest.mark.parametrize("saved", dict(kinds()).values(), ids=dict(kinds()))
@pytest.mark.parametrize("way", ["state_dict", "store"])
def test_a_guide_with_any_frame_is_loaded_into_a_default_one(saved, way, tmp_path, monkeypatch):
    guide = AutoImplicit(simple, **saved)
    guide()
    guide.loc.data += 0.5
    if way == "store":
        pyro.get_param_store().save(tmp_path / "store.pt")
        pyro.clear_param_store()
        pyro.get_param_store().load(tmp_path / "store.pt")
        monkeypatch.setattr(auto_implicit, "find_frame", None)  # nothing is searched
        fresh = AutoImplicit(simple)
        fresh()
    else:
        state = guide.state_dict()
        pyro.clear_param_store()
        fresh = AutoImplicit(simple)
        fresh()
        fresh.load_state_dict(state)
        assert list(fresh.state_dict()) and fresh.state_dict().keys() == state.keys()
    draws = []
    for one in (guide, fresh):
        pyro.set_rng_seed(1)
        draws.append(one.sample_posterior(3)["x"])
    assert torch.equal(*draws)
    # what was loaded goes on
    before = fresh.loc.detach().clone()
    SVI(simple, fresh, Adam({"lr": 0.1}), InjectiveELBO(2)).step()
    assert (fresh.loc != before).all()


def test_the_plan_does_not_hang_on_the_clock():
    model, _, _ = regression()
    costs = []
    for _ in range(2):
        costs.append(auto_frame.Target(model).seconds(8))
    assert costs[0] == costs[1] > 0


@both
def test_explicit_initial_values_replace_the_search(make_guide, monkeypatch):
    """``simple`` has its mode at 50: a guide that searched would start there."""
    monkeypatch.setattr(auto_implicit, "find_frame", None)
    start = init_to_value(values={"x": torch.tensor([7.0, -7.0])})
    guide = make_guide(simple, init_loc_fn=start)
    guide()
    assert torch.equal(guide.loc, torch.tensor([7.0, -7.0]))
    torch.testing.assert_close(guide.scale.detach(), torch.full((2,), 0.1))
    pyro.clear_param_store()
    guide = make_guide(simple, init_scale=0.3)
    guide()
    torch.testing.assert_close(guide.loc.detach(), torch.full((2,), 50.0), atol=4.0, rtol=0)
    torch.testing.assert_close(guide.scale.detach(), torch.full((2,), 0.3))


@both
def test_initial_values_that_a_frame_would_replace_are_refused(make_guide):
    unit = Frame(torch.zeros(2), torch.ones(2))
    given = {"init_scale": 0.3, "init_loc_fn": init_to_median}
    for frame, name in ((unit, "init_scale"), (unit, "init_loc_fn"), ("mode", "init_scale")):
        with pytest.raises(ValueError, match=f"^{name} .*Cure: frame=None, or no {name}"):
            make_guide(simple, frame=frame, **{name: given[name]})


def test_a_stored_frame_is_loaded_into_a_guide_with_an_initial_value():
    guide = AutoImplicit(simple, frame=Frame(torch.ones(2), torch.full((2,), 3.0)))
    guide()
    fresh = AutoImplicit(simple, init_loc_fn=init_to_median)
    fresh()
    assert torch.equal(fresh.frame_scale, guide.frame_scale)


def test_the_search_for_a_frame_warns_of_angles():
    def angle():
        pyro.sample("phi", dist.VonMises(0.0, 1.0))

    with pytest.warns(UserWarning, match="latent 'phi' is an angle.*Cure"):
        AutoSemiImplicit(angle)()
