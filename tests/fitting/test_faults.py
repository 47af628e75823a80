# SPDX-License-Identifier: Apache-2.0
"""``fit`` where it once broke: one latent, flat directions, parameters, raw units, the store."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import nn

from pyro_implicit.diagnostics import diagnose
from pyro_implicit.fitting import ChoicePolicy, FitPolicy, Schedule, TrainingPolicy, fit, train
from pyro_implicit.fitting.stages import Stages, still_falls
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.infer import ImplicitELBO, InjectiveELBO
from pyro_implicit.mcmc import refine
from pyro_implicit.runtime.clock import TimeLimit

#: For tests that do not depend on the values of bounds, which are expensive.
FEW = FitPolicy(choice=ChoicePolicy(num_weighed=100))


def quick(model, *args, num_steps=60, **kwargs):
    options = {"num_particles": 16, "progress": False, "seed": 0, "refine": False} | kwargs
    return fit(model, "auto", *args, num_steps=num_steps, **options)


def spiked():
    """One latent, and no injective guide of few steps fits it."""
    x = pyro.sample("x", dist.StudentT(1.5, 0.0, 1.0))
    pyro.factor("spike", torch.logaddexp(-20 * (x - 1) ** 2, -0.5 * x.abs()))


def test_one_latent_with_a_second_candidate():
    result = quick(spiked, num_steps=4, policy=FEW)
    assert set(result.bounds) >= {"gaussian", "injective", "semi-implicit"}
    assert all(math.isfinite(bound) for bound in result.bounds.values())
    assert not any(stage.error for stage in result.stages)


def test_rows_that_obs_mask_leaves_out():
    """Seen rows have no effect on their latents, and unseen rows none on the others."""
    mask = torch.tensor([True, True, False])

    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y, obs_mask=mask)

    result = fit(model, "auto", torch.tensor([1.0, 2.0, 9.0]), seed=0, progress=False)
    draws = result.sample(20_000)
    loc, y = draws["loc"], draws["y_unobserved"]
    assert loc.mean().item() == pytest.approx(1.0, abs=0.02)
    assert loc.std().item() == pytest.approx(3**-0.5, rel=0.02)
    expected = torch.full((3,), 4 / 3).sqrt()
    torch.testing.assert_close(y.mean(0), torch.ones(3), rtol=0, atol=0.04)
    torch.testing.assert_close(y.std(0), expected, rtol=0.02, atol=0)


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    with pyro.plate("two", 2):
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))


def test_a_candidate_that_fails_leaves_the_others(monkeypatch):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("of the second")

    monkeypatch.setattr("pyro_implicit.fitting.stages.AutoSemiImplicit", fails)
    result = quick(funnel, num_steps=8)
    assert result.chosen in ("gaussian", "injective")
    failed = {stage.name: stage for stage in result.stages if stage.error}
    assert list(failed) == ["semi-implicit"]
    assert "failed: ZeroDivisionError: of the second" in str(result)
    assert result.guide.sample_posterior(3)["v"].isfinite().all()


def test_a_training_that_fails_leaves_the_gaussian(monkeypatch):
    def fails(*args, name, **kwargs):
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr("pyro_implicit.fitting.stages.train", fails)
    with pytest.warns(
        UserWarning, match="initial Gaussian.*failed: RuntimeError: no injective"
    ) as caught:
        result = quick(funnel)
    assert caught[0].filename == __file__
    assert result.chosen == "gaussian" and set(result.bounds) == {"gaussian"}


def test_failed_trainings_need_no_warning_if_the_draws_are_corrected():
    stages = Stages(funnel, (), {}, 4, lr=0.01, num_particles=8, limit=TimeLimit(None))
    with stages.result.attempt("injective"):
        raise RuntimeError("no injective")
    stages.result.bounds = {"gaussian": -1.0}
    with pytest.warns(UserWarning, match="initial Gaussian.*no injective"):
        stages.warn_if_untrained()
    stages.result.correction = 0.9
    stages.warn_if_untrained()


def two_modes():
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    left, right = dist.Normal(-1.5, 0.1).log_prob(x), dist.Normal(1.0, 0.2).log_prob(x)
    pyro.factor("modes", torch.stack([left + math.log(0.3), right + math.log(0.7)]).logsumexp(0))


def test_a_component_that_fails_stays_a_gaussian(monkeypatch):
    trained = train

    def fails(*args, name, **kwargs):
        if name == "mode-1":
            raise RuntimeError("of one mode")
        return trained(*args, name=name, **kwargs)

    monkeypatch.setattr("pyro_implicit.fitting.stages.train", fails)
    policy = FitPolicy(schedule=Schedule(max_gap=0.0))
    result = quick(two_modes, num_steps=40, policy=policy)
    assert "mode-1 stays a Gaussian (RuntimeError: of one mode)" in str(result)
    x = result.guide.sample_posterior(4000)["x"]
    assert (x < 0).float().mean().item() == pytest.approx(0.3, abs=0.04)


@pytest.mark.filterwarnings("ignore:fit returns its initial Gaussian")
@pytest.mark.parametrize("model", [funnel, two_modes])
def test_no_training_ends_below_its_start(model):
    """Steps so large that they lead away."""
    result = quick(model, num_steps=30, lr=30.0, policy=FEW)
    start = result.bounds["gaussian"]
    assert result.bounds[result.chosen] >= start - 0.001
    assert math.isfinite(start)


def line(x, y):
    zero = x.new_zeros(())
    intercept = pyro.sample("intercept", dist.Normal(zero, 100.0))
    slope = pyro.sample("slope", dist.Normal(zero, 10.0))
    sigma = pyro.sample("sigma", dist.LogNormal(zero, 1.0))
    with pyro.plate("years", len(x)):
        pyro.sample("y", dist.Normal(intercept + slope * x, sigma), obs=y)


def test_a_line_on_uncentred_years():
    """Correlation -.99999, and a conditional sd of the slope of 1e-5."""
    x = torch.linspace(1952, 2013, 62, dtype=torch.float64)
    noise = torch.randn(62, dtype=torch.float64)
    result = quick(line, x, 10 + 0.01 * (x - 1980) + 0.05 * noise, num_steps=60)
    draws = result.guide.sample_posterior(4000)
    precision = torch.stack([torch.ones_like(x), x]).T
    expected = torch.linalg.lstsq(precision, 10 + 0.01 * (x - 1980) + 0.05 * noise).solution
    sigma = 0.05 * noise.std()
    sd = sigma / (x - x.mean()).norm()
    assert abs(draws["slope"].mean() - expected[1]) < 0.15 * sd
    assert draws["slope"].std().item() == pytest.approx(sd.item(), rel=0.2)
    center = draws["intercept"] + draws["slope"] * x.mean()
    assert center.std().item() == pytest.approx(sigma.item() / math.sqrt(62), rel=0.2)
    assert result.bounds[result.chosen] >= result.bounds["gaussian"] - 0.001


Z = torch.tensor([-3.1, 4.2, 1.7, -2.8, 0.4, 5.0, -1.2, 2.6])
BEST_SCALE = math.sqrt(Z.square().mean().item() - 1)  # of the evidence N(0, scale^2 + 1)


def hierarchy(z):
    scale = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
    with pyro.plate("rows", len(z)):
        x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("z", dist.Normal(x, 1.0), obs=z)


def test_parameters_of_the_model_are_those_of_the_greatest_evidence():
    """The guide is exact at every step, so that an exact guide is no reason to stop."""
    result = quick(hierarchy, Z, num_steps=120, lr=0.03)
    names = [stage.name for stage in result.stages]
    assert names[:3] == ["search", "parameters", "search"] and "scale = " in str(result)
    scale = pyro.param("scale").item()
    assert scale == pytest.approx(BEST_SCALE, rel=0.02)
    evidence = dist.Normal(0.0, math.sqrt(scale**2 + 1)).log_prob(Z).sum().item()
    assert result.bounds[result.chosen] == pytest.approx(evidence, abs=0.02)
    assert list(pyro.get_param_store()) == ["scale"]


def test_an_exact_guide_does_not_stop_parameters():
    guide = AutoImplicit(hierarchy, AutoregressiveGenerator, frame=None)
    schedule = Schedule(num_steps=30, max_gap=1e9)
    losses = train(hierarchy, guide, InjectiveELBO(4), Z, schedule=schedule, progress=False)
    assert len(losses) == 30


def shifted_modes():
    """Two modes, and a shift that moves the data, not the modes."""
    shift = pyro.param("shift", torch.tensor(0.3))
    x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
    left, right = dist.Normal(-1.5, 0.1).log_prob(x), dist.Normal(1.5, 0.1).log_prob(x)
    pyro.factor("modes", torch.stack([left, right]).logsumexp(0) - 5 * (shift - 0.5) ** 2)


def test_candidates_and_components_leave_parameters_alone(monkeypatch):
    seen = {}
    trained = train

    def spy(*args, name, **kwargs):
        losses = trained(*args, name=name, **kwargs)
        seen[name] = pyro.param("shift").item()
        return losses

    monkeypatch.setattr("pyro_implicit.fitting.stages.train", spy)
    policy = FitPolicy(
        schedule=Schedule(max_gap=0.0), choice=ChoicePolicy(near=0.0, num_weighed=100)
    )
    result = quick(shifted_modes, num_steps=60, lr=0.02, policy=policy)
    assert set(seen) >= {"parameters", "mode-0", "mode-1", "semi-implicit"}
    assert len(set(seen.values())) == 1 and seen["parameters"] == pytest.approx(0.5, abs=0.03)
    assert pyro.param("shift").unconstrained().grad is None
    assert result.num_modes == 2


def test_the_first_few_of_many_parameters_are_named_apart():
    networks = {"x_nn": nn.Linear(1, 1), "t_nn": nn.Linear(1, 1), "last": nn.Bilinear(1, 1, 1)}

    def far():
        x = pyro.sample("x", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        for name, network in networks.items():
            pyro.module(name, network)
        out = networks["x_nn"](x) + networks["t_nn"](x) + networks["last"](x, x)
        pyro.factor("pull", -((out.sum() - 100.0) ** 2))

    with pytest.warns(UserWarning, match="still rising") as caught:
        result = quick(far, num_steps=20)
    message = next(str(one.message) for one in caught if "still rising" in str(one.message))
    names = ["x_nn.weight", "x_nn.bias", "t_nn.weight", "t_nn.bias"]
    assert f"({', '.join(names)} and 2 more) ended after 20 steps" in message
    line = str(result).split("learnt parameters: ")[1].splitlines()[0]
    assert [part.split(" = ")[0] for part in line.split(", ")] == names
    assert line.endswith(" and 2 more") and "$$$" not in str(result)


def test_parameters_that_have_not_settled():
    def far():
        pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))
        pyro.factor("pull", -((pyro.param("loc") - 100.0) ** 2))

    message = r"still rising .*\(loc\) ended after 20 steps, by num_steps. Cure: a larger num_steps"
    with pytest.warns(UserWarning, match=message):
        result = quick(far, num_steps=20)
    assert "not settled" in str(result)
    found = result.diagnose()
    assert found.verdict == "check" and "still rising when the training of loc ended" in str(found)
    # The policy may accept any fall; warnings are errors.
    policy = FitPolicy(training=TrainingPolicy(least_fall=1e9))
    assert "not settled" not in str(quick(far, num_steps=20, policy=policy))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_a_loss_that_falls_with_the_rate_alone_has_settled(slope, seed):
    """Noise of one nat that shrinks with the learning rate, and with it ten nats of the loss."""
    step = torch.arange(2000.0)
    rate = 0.5 * (1 + torch.cos(math.pi * ((step - 1000) / 1000).clamp(0.0, 1.0)))
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(seed))
    losses = 10 * rate + rate * noise - 0.01 * slope * step
    assert still_falls(losses.tolist(), 2000) == (slope > 0)
    assert not still_falls(losses[:12].tolist(), 12)  # too few to tell


def test_what_lengthens_a_training_is_named():
    def far(y):
        x = pyro.sample("x", dist.Normal(0.0, 1000.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = 100.0 + torch.zeros(40)
    short = {"progress": False, "lr": 0.01, "compile": False}
    narrow = AutoNormal(far, init_scale=0.01)
    result = fit(far, narrow, batches=y.split(4), epochs=5, **short)
    assert "; not settled, as the loss was still falling: more epochs, or a larger" in str(result)
    result = fit(far, narrow, y, num_steps=50, **short)
    assert "still falling: more num_steps, or a larger lr" in str(result)
    near = AutoNormal(far, init_loc_fn=init_to_value(values={"x": y[0]}), init_scale=0.158)
    result = fit(far, own_names(near), batches=y.split(4), epochs=20, **short)
    assert "settled" not in str(result)


@pytest.mark.parametrize("model", [funnel, two_modes])
def test_the_store_is_left_alone(model):
    pyro.param("mine", torch.tensor(1.0))
    quick(model, num_steps=5, policy=FEW)
    assert list(pyro.get_param_store()) == ["mine"]


def test_the_store_is_left_alone_by_a_fit_that_fails(monkeypatch):
    def fails(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("pyro_implicit.fitting.stages.choose", fails)
    with pytest.raises(ZeroDivisionError):
        quick(funnel, num_steps=5, policy=FEW)
    assert not list(pyro.get_param_store())


def test_many_latents_and_the_store():
    result = quick(
        lambda: pyro.sample("x", dist.Normal(torch.zeros(101), 1.0).to_event(1)), num_steps=2
    )
    assert isinstance(result.guide, AutoSemiImplicit) and not list(pyro.get_param_store())


def test_training_without_parameters():
    with pytest.raises(
        ValueError, match="neither model nor guide has a parameter. *to train. Cure"
    ):
        guide = lambda: pyro.sample("v", dist.Normal(0.0, 1.0))  # noqa: E731
        model = lambda: pyro.sample("v", dist.Normal(0.0, 2.0))  # noqa: E731
        train(model, guide, ImplicitELBO(2), progress=False)


def test_gradients_of_others_are_left_alone():
    frozen = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
    train(
        pyro.poutine.block(hierarchy, hide_types=["param"]), AutoNormal(hierarchy),
        ImplicitELBO(2), Z, schedule=Schedule(num_steps=3), progress=False,
    )  # fmt: skip
    assert frozen.unconstrained().grad is None


def shifted(shift):
    x = pyro.sample("x", dist.Normal(shift, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=2 * shift)


def losses_of(shift):
    return quick(shifted, shift, num_steps=1, compile=False).losses


def test_inference_mode_is_left():
    shift = torch.tensor(1.0)
    with torch.inference_mode():
        losses = losses_of(shift)
    assert losses == losses_of(shift)


@pytest.mark.parametrize("what", [fit, refine, diagnose])
def test_outer_plates_and_handlers_are_refused(what):
    message = f"{what.__name__} is called inside plate 'outer'.*Cure: .*outside of the plate"
    with pyro.plate("outer", 3), pytest.raises(ValueError, match=message):
        what(spiked, AutoNormal(spiked), progress=False)
    message = f"{what.__name__} is called inside poutine.scale, .*Cure: wrap the model"
    with poutine.scale(scale=0.5), pytest.raises(ValueError, match=message):
        what(spiked, AutoNormal(spiked), progress=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scale", {"scale": 0.5}),
        ("mask", {"mask": torch.tensor(True)}),
        ("condition", {"data": {"x": torch.tensor(1.0)}}),
        ("do", {"data": {"x": torch.tensor(1.0)}}),
        ("reparam", {"config": {}}),
        ("infer_config", {"config_fn": lambda site: {}}),
        ("equalize", {"sites": ["x", "y"]}),
    ],
)
def test_a_handler_around_fit_is_refused(name, options):
    message = rf"inside poutine.{name}, .*Cure: wrap the model, as in fit\(poutine.{name}\(model"
    with getattr(poutine, name)(**options), pytest.raises(ValueError, match=message):
        losses_of(torch.tensor(1.0))


def test_handlers_of_a_user_have_the_name_of_their_base():
    class Tempered(poutine.handlers.ScaleMessenger):
        pass

    with Tempered(0.5), pytest.raises(ValueError, match=r"inside poutine.scale, .*poutine.scale\("):
        losses_of(torch.tensor(1.0))


def test_a_block_that_cannot_be_asked_hides_nothing():
    block = poutine.block(hide_fn=lambda site: site["fn"].has_rsample)
    message = "inside poutine.scale, "
    with poutine.scale(scale=0.5), block, pytest.raises(ValueError, match=message):
        losses_of(torch.tensor(1.0))


def test_handlers_around_fit_that_do_not_change_the_model_are_allowed():
    hidden = poutine.scale(scale=0.5), poutine.block()
    with ExitStack() as stack:
        for handler in (*hidden, poutine.trace(), poutine.seed(rng_seed=0)):
            stack.enter_context(handler)
        result = fit(shifted, "auto", torch.tensor(1.0), seed=0, progress=False)
    assert result.sample(1000, seed=0)["x"].mean().item() == pytest.approx(1.5, abs=0.1)


def test_results_inside_a_handler():
    earlier = fit(shifted, "auto", torch.tensor(1.0), seed=0, progress=False)
    message = r"sample is called inside poutine.scale, .*Cure: call it outside of the handler"
    with poutine.scale(scale=0.5), pytest.raises(ValueError, match=message):
        earlier.sample(1)

    def later(y):
        loc = earlier.sample(1, seed=0)["x"].squeeze()
        pyro.sample("y", dist.Normal(pyro.sample("z", dist.Normal(loc, 1.0)), 1.0), obs=y)

    y = torch.tensor(1.0)
    found = fit(later, "auto", y, seed=0, progress=False).sample(1000, seed=0)
    loc = earlier.sample(1, seed=0)["x"].item()
    assert list(found) == ["z"]
    assert found["z"].mean().item() == pytest.approx((loc + 1) / 2, abs=0.1)


def test_threads_take_turns():
    """Handlers, parameters and random numbers are the process's."""
    shifts = [torch.tensor(shift) for shift in (-3.0, 5.0)]
    alone = [losses_of(shift) for shift in shifts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(losses_of, shifts))
    assert alone == together
