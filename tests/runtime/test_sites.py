# SPDX-License-Identifier: Apache-2.0
"""Data among what Pyro marks as observed; latents in sequential plates are as in a loop."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoDelta, init_to_mean
from pyro.infer.reparam import LocScaleReparam

from pyro_implicit import LIVI_ELBO, AutoImplicit, AutoSemiImplicit, InjectiveELBO, fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import BudgetPolicy, FitPolicy, HeldOut, TrainingPolicy
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.sites import is_data, unplated_as_events, unplated_dims


def everything(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("tilt", -x.square())
    with pyro.plate("rows", 6, subsample_size=len(y)):
        pyro.deterministic("twice", 2 * x.expand(len(y)))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    pyro.param("learnt", torch.tensor(1.0))


def test_deterministic_sites_and_what_is_computed_are_none():
    non_centred = poutine.reparam(everything, config={"x": LocScaleReparam(0.0)})
    for one in (everything, non_centred):
        nodes = poutine.trace(one).get_trace(torch.zeros(2)).nodes
        assert [name for name, site in nodes.items() if is_data(site)] == ["tilt", "y"]
        assert [n for n, site in nodes.items() if is_data(site, factors=False)] == ["y"]


def test_a_model_may_be_a_closure_that_calls_itself():
    scale = torch.ones((), dtype=torch.float64)

    def chain(number, before=0.0):
        x = pyro.sample(f"x{number}", dist.Normal(before, scale))
        return chain(number - 1, x) if number else x

    target = Target(chain, 2)
    assert list(target.shapes) == ["x2", "x1", "x0"]
    assert target.init_loc.dtype == torch.float64


def test_batches_outside_of_plates_become_events_with_the_same_density():
    mask = torch.tensor([True, False])

    def model(y):
        pyro.sample("k", dist.Categorical(torch.ones(2, 3)))
        x = pyro.sample("x", dist.Dirichlet(torch.ones(4, 2, 3)))
        pyro.factor("f", x.sum(-1).exp())
        pyro.deterministic("d", x, event_dim=1)
        with pyro.plate("rows", 2), poutine.mask(mask=mask):
            pyro.sample("plated", dist.Normal(0.0, 1.0))
        with poutine.mask(mask=mask):
            pyro.sample("masked", dist.Normal(torch.zeros(2), 1.0))
        pyro.sample("y", dist.Normal(0.0, x.mean()), obs=y)

    plain = poutine.trace(model).get_trace(torch.randn(5))
    dims = unplated_dims(plain)
    assert dims == {"x": 2, "f": 2, "d": 2, "y": 1}
    declared = poutine.replay(unplated_as_events(model, dims), trace=plain)
    trace = poutine.trace(declared).get_trace(plain.nodes["y"]["value"])
    for one in (plain, trace):
        one.compute_log_prob()
    for name in dims:
        assert trace.nodes[name]["fn"].batch_shape == ()
        expected = plain.nodes[name]["log_prob"].sum()
        torch.testing.assert_close(trace.nodes[name]["log_prob"], expected)
    torch.testing.assert_close(trace.log_prob_sum(), plain.log_prob_sum())


def test_guides_of_a_model_that_keeps_a_value_of_an_earlier_run():
    def base():
        for name in ("cats", "dogs"):
            scale = pyro.sample(f"{name}_scale", dist.LogNormal(0.0, 1.0))
            pyro.sample(f"{name}_mean", dist.Normal(0.0, scale))

    model = poutine.equalize(base, ".+_scale")
    for elbo in (LIVI_ELBO(2), LIVI_ELBO(2)):
        pyro.clear_param_store()
        guide = AutoSemiImplicit(model)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
        assert isinstance(svi.step(), float)
        assert sorted(guide()) == ["cats_mean", "cats_scale", "dogs_mean"]


@pytest.mark.parametrize("config", [{}, {"x": LocScaleReparam(0.0)}])
def test_held_out_rows_are_those_of_the_data_alone(config):
    @poutine.reparam(config=config)
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 100, subsample_size=len(y)):
            pyro.deterministic("twice", 2 * x.expand(len(y)))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoDelta(model, init_loc_fn=init_to_mean)
    score = HeldOut(model, torch.zeros(20).split(5))(guide)
    assert score == pytest.approx(0.91894, abs=1e-5)


def test_a_scaled_site_that_is_no_data_scales_none():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("columns", 9, subsample_size=3):
            pyro.deterministic("thrice", x.expand(3))
        pyro.sample("y", dist.Normal(x, 1.0).expand(y.shape).to_event(1), obs=y)

    density = Target.of_minibatches(model, batch=(torch.zeros(2),))
    assert not density.scaled and density.subsampled is None


def test_a_guide_may_be_reparameterised():
    def guide():
        pyro.sample("x", dist.Normal(torch.tensor(1.0), 2.0))

    non_centred = poutine.reparam(guide, config={"x": LocScaleReparam(0.0)})
    assert draw(non_centred, 3)["x_decentered"].shape == (3,)


Y = torch.tensor([[0.5, 1.5, 1.0], [-1.0, -0.5, -2.0], [3.0, 2.0, 2.5]])


def grouped(rows, y=Y):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    for row in rows:
        effect = pyro.sample(f"effect_{row}", dist.Normal(mean, 1.0))
        with pyro.plate(f"repeats_{row}", 3):
            pyro.sample(f"y_{row}", dist.Normal(effect, 1.0), obs=None if y is None else y[row])


def in_a_plate(y=Y):
    grouped(pyro.plate("rows", 3), y)


def in_a_loop(y=Y):
    grouped(range(3), y)


def test_the_density_is_that_of_a_loop():
    points = torch.randn(5, 4)
    found = Target(in_a_plate).score(points)
    torch.testing.assert_close(found, Target(in_a_loop).score(points))


@pytest.mark.parametrize(
    "kind, elbo", [(AutoImplicit, InjectiveELBO), (AutoSemiImplicit, LIVI_ELBO)]
)
@pytest.mark.parametrize("vectorize_particles", [True, False])
def test_a_step_is_that_of_a_loop(kind, elbo, vectorize_particles):
    losses = []
    for model in (in_a_plate, in_a_loop):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        loss = elbo(4, vectorize_particles=vectorize_particles)
        losses.append(SVI(model, kind(model, frame=None), pyro.optim.Adam({}), loss).step())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_fit_and_refine(monkeypatch):
    # Chains need not converge.
    budget = BudgetPolicy(least_gradients=300, most_gradients=300, patience=1, patient_seconds=0.0)
    options = {"seed": 0, "progress": False}
    short = FitPolicy(budget=budget, training=TrainingPolicy(mean_field_steps=200))
    results = [fit(model, policy=short, **options) for model in (in_a_plate, in_a_loop)]
    draws = [result.sample(1000) for result in results]
    for name, values in draws[0].items():
        torch.testing.assert_close(values.mean(0), draws[1][name].mean(0), atol=0.15, rtol=0)
    predicted = Predictive(in_a_plate, guide=results[0].posterior, num_samples=7)(None)
    assert predicted["y_2"].shape == (7, 3)
    # Many latents begin with a mean field of Pyro's.
    monkeypatch.setattr("pyro_implicit.fitting.refinement.MAX_DENSE_DIM", 1)
    many = fit(in_a_plate, policy=short, **options)
    assert "mean-field" in [stage.name for stage in many.stages]
    assert many.refined is not None and many.diagnose(progress=False).verdict != "do not trust"
