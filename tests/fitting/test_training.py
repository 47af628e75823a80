# SPDX-License-Identifier: Apache-2.0
"""The schedule in closed form, and training on posteriors that are known."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal, init_to_value

from pyro_implicit import fit
from pyro_implicit.fitting import FitPolicy, TrainingPolicy
from pyro_implicit.fitting import stages as stages_module
from pyro_implicit.fitting.parameters import trained_parameters
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, Frame
from pyro_implicit.infer import ImplicitELBO, InjectiveELBO
from pyro_implicit.infer.engine import recording
from pyro_implicit.runtime import progress as progress_module
from pyro_implicit.runtime.policy import DisplayPolicy

Y = torch.tensor([1.0, 2.0, 4.5])


def conjugate(y=Y):
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def test_the_rate_falls_along_a_cosine():
    schedule = Schedule(num_steps=200, lr=0.4, decay=0.25)
    assert schedule.rate(0, 200) == schedule.rate(70, 70) == 0.4
    assert schedule.rate(80, 70) == pytest.approx(0.2 * (1 + math.cos(math.pi / 5)))
    assert schedule.rate(95, 70) == pytest.approx(0.2)
    assert schedule.rate(120, 70) == schedule.rate(150, 70) == 0.0
    assert Schedule(num_steps=4, decay=0.0).rate(3, 4) == 0.01


def rates(schedule, monkeypatch):
    """The learning rates that a whole training has used, and its losses."""
    found = []
    step = torch.optim.Adam.step

    def spy(self):
        found.append(self.param_groups[0]["lr"])
        return step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    losses = train(conjugate, AutoNormal(conjugate), ImplicitELBO(2), schedule=schedule)
    return found, losses


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_the_last_steps_decay_without_a_plateau(decay, monkeypatch):
    schedule = Schedule(num_steps=20, lr=0.02, decay=decay)
    found, losses = rates(schedule, monkeypatch)
    start = 20 - round(20 * decay)
    assert found == [schedule.rate(step, start) for step in range(20)]
    assert found[max(start - 1, 0)] == 0.02 and len(losses) == 20


def test_a_plateau_starts_the_decay(monkeypatch):
    monkeypatch.setattr(Schedule, "stands_still", lambda self, losses: len(losses) in (6, 9))
    schedule = Schedule(num_steps=40, lr=0.02, decay=0.25)
    found, losses = rates(schedule, monkeypatch)
    assert len(losses) == 16  # six, then ten of decay
    assert found == [schedule.rate(step, 6) for step in range(16)]


def noisy(trend):
    noise = torch.randn(len(trend), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (torch.tensor(trend, dtype=torch.float64) + noise).tolist()


def test_made_losses_stand_still_or_fall():
    schedule = Schedule(window=50)
    falling = noisy([-0.05 * step for step in range(400)])
    assert not any(schedule.stands_still(falling[:end]) for end in range(401))
    flat = noisy([-0.05 * step for step in range(200)] + [-10.0] * 200)
    never = Schedule(window=50, plateau=False)
    assert not any(never.stands_still(flat[:end]) for end in range(401))
    # Not before two whole windows lie in the plateau.
    still = [end for end in range(401) if schedule.stands_still(flat[:end])]
    assert still and still[0] in (300, 350) and all(end % 50 == 0 for end in still)
    rising = noisy([0.05 * step for step in range(400)])
    assert [end for end in range(401) if schedule.stands_still(rising[:end])] == [
        200, 250, 300, 350, 400,
    ]  # fmt: skip


def test_a_plateau_is_judged_by_its_standard_error():
    """The last two windows' mean against the lowest before, at one standard error of 8 losses."""
    schedule = Schedule(window=4)
    spread = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    error = spread.std().item() / math.sqrt(8)
    for gap, still in [(1.01 * error, False), (0.99 * error, True)]:
        losses = [5.0] * 4 + [1.0] * 4 + (1.0 - gap + spread).tolist()
        assert schedule.stands_still(losses) == still
        assert not schedule.stands_still(losses[:-1])


def test_skipped_steps_do_not_hide_a_plateau():
    losses = noisy([0.0] * 200)
    losses[::10] = [math.nan] * 20
    assert Schedule(window=50).stands_still(losses)
    falling = noisy([-0.05 * step for step in range(200)])
    falling[::10] = [math.nan] * 20
    assert not Schedule(window=50).stands_still(falling)


def test_exactness_by_the_spread_of_losses():
    losses = [3.0, 3.2] * 12 + [3.1]
    variance = torch.tensor(losses, dtype=torch.float64).var().item()
    gap = 0.5 * 8 * variance
    assert Schedule(max_gap=1.01 * gap).is_exact(losses, 8)
    assert not Schedule(max_gap=0.99 * gap).is_exact(losses, 8)
    schedule = Schedule(max_gap=1e9)
    assert [end for end in range(80) if schedule.is_exact((losses * 4)[:end], 8)] == [25, 50, 75]
    assert Schedule(max_gap=1.01 * gap).is_exact([100.0] * 25 + losses, 8)
    assert not schedule.is_exact([math.nan] + losses[1:], 8)


def exact_guide():
    precision = 0.25 + 3
    loc, scale_tril = torch.tensor([7.5 / precision]), torch.tensor([[precision**-0.5]])
    frame = Frame(loc, scale_tril=scale_tril)
    return AutoImplicit(conjugate, AutoregressiveGenerator, frame=frame)


def test_an_exact_density_stops_at_the_posterior():
    torch.set_default_dtype(torch.float64)
    losses = train(conjugate, exact_guide(), InjectiveELBO(16))
    assert len(losses) == 25
    covariance = torch.eye(3) + 4
    evidence = dist.MultivariateNormal(torch.zeros(3), covariance).log_prob(Y.double())
    assert losses[-1] == pytest.approx(-evidence.item(), abs=0.02)
    # No other loss says how far the guide is.
    assert len(train(conjugate, AutoNormal(conjugate), ImplicitELBO(2),
                     schedule=Schedule(num_steps=30, max_gap=1e9))) == 30  # fmt: skip
    never = Schedule(num_steps=30, max_gap=0.0)
    assert len(train(conjugate, exact_guide(), InjectiveELBO(16), schedule=never)) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", [Trace_ELBO(16, vectorize_particles=True), ImplicitELBO(16)])
def test_a_conjugate_posterior(loss, dtype):
    torch.set_default_dtype(dtype)
    guide = AutoNormal(conjugate)
    losses = train(conjugate, guide, loss, Y.to(dtype), schedule=Schedule(num_steps=300, lr=0.1))
    assert len(losses) <= 300
    assert guide.locs.x.item() == pytest.approx(7.5 / 3.25, abs=0.15)
    assert guide.scales.x.item() == pytest.approx(3.25**-0.5, rel=0.12)
    assert guide.locs.x.dtype == dtype


def with_param(y):
    loc = pyro.param("loc", torch.tensor(3.0))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("rows", len(y)):
        x = pyro.sample("x", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.Normal(x, scale), obs=y)


def test_parameters_of_the_model_are_learnt():
    y = torch.tensor([3.0, 3.5, 6.5, 7.0])
    train(with_param, AutoNormal(with_param), ImplicitELBO(8), y, schedule=Schedule(300, lr=0.1))
    # The greatest evidence: y ~ N(loc, 1 + scale^2)
    assert pyro.param("loc").item() == pytest.approx(5.0, abs=0.25)
    assert pyro.param("scale").item() == pytest.approx(math.sqrt(3.125 - 1), abs=0.25)


def test_guide_and_model_may_have_parameters_of_one_name():
    """The autoguide's loc is not the model's."""
    guide = AutoImplicit(with_param, AutoregressiveGenerator, frame=None)
    train(with_param, guide, InjectiveELBO(2), Y, schedule=Schedule(num_steps=2))
    start = guide.loc.detach().clone(), pyro.param("loc").item()
    train(with_param, guide, InjectiveELBO(2), Y, schedule=Schedule(num_steps=2))
    assert (guide.loc != start[0]).all() and pyro.param("loc").item() != start[1]


class Flaky:
    """The conjugate model, not finite at some of its runs."""

    def __init__(self, is_bad, bad=math.nan):
        self.num_runs, self.is_bad, self.bad = 0, is_bad, bad

    def __call__(self):
        self.num_runs += 1
        x = pyro.sample("x", dist.Normal(0.0, 2.0))
        term = self.bad if self.is_bad(self.num_runs) else 0.0
        pyro.sample("y", dist.Normal(x, 1.0).expand([3]).to_event(1), obs=Y)
        with pyro.validation_enabled(False):
            pyro.factor("term", torch.tensor(term))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_steps_without_a_finite_loss_leave_the_guide_alone(bad):
    seen = []
    model = Flaky(lambda run: run > 10 and run % 3 == 0, bad)
    guide = AutoNormal(model)

    class Spy(ImplicitELBO):
        def differentiable_loss(self, *args, **kwargs):
            seen.append([p.detach().clone() for p in guide.parameters()])
            return super().differentiable_loss(*args, **kwargs)

    loss = Spy(4, nonfinite="skip")  # recorded, it would not count its runs
    losses = train(model, guide, loss, schedule=Schedule(num_steps=60), compile=False)
    skipped = [math.isnan(loss) for loss in losses]
    assert len(losses) == 60 and 10 < sum(skipped) < 25
    # The first evaluation was before the first step.
    after = seen[2:] + [[p.detach() for p in guide.parameters()]]
    for left, right, skip in zip(seen[1:], after, skipped, strict=True):
        same = [torch.equal(a, b) for a, b in zip(left, right, strict=True)]
        assert all(same) if skip else not any(same)


def test_fit_passes_the_limit_of_its_policy(monkeypatch):
    seen = []

    def spy(*args, max_nonfinite, **kwargs):
        seen.append(max_nonfinite)
        return [0.0]

    monkeypatch.setattr(stages_module, "train", spy)
    policy = FitPolicy(training=TrainingPolicy(max_nonfinite=3))
    model = Flaky(lambda run: False)
    fit(model, AutoNormal(model), policy=policy, refine=False, progress=False)
    assert seen == [3]


def test_fifty_bad_steps_in_a_row_are_too_many():
    model = Flaky(lambda run: run > 15)
    guide = AutoNormal(model)
    message = r"not finite for 50 steps in a row, up to step \d+ \(.* is .*\)\. Cure: a model whose"
    loss = ImplicitELBO(2, nonfinite="skip")
    with pytest.raises(RuntimeError, match=message) as error:
        train(model, guide, loss, schedule=Schedule(200), compile=False)
    assert "a lower lr" in str(error.value)
    assert model.num_runs < 70
    # Fewer are, if they are all.
    model = Flaky(lambda run: run > 4)
    with pytest.raises(RuntimeError, match="not finite for 8 steps in a row, up to st"):
        train(model, AutoNormal(model), loss, schedule=Schedule(8), compile=False)
    model = Flaky(lambda run: run > 4)
    with pytest.raises(RuntimeError, match="not finite for 3 steps in a row"):
        train(model, AutoNormal(model), loss, schedule=Schedule(9), compile=False, max_nonfinite=3)
    # 49 are not
    model = Flaky(lambda run: run > 15 and (run - 15) % 50)
    train(model, AutoNormal(model), loss, schedule=Schedule(120), compile=False)


def test_infinite_gradients_leave_the_guide_alone():
    """sqrt has one at 0, where its value is finite."""
    runs = []

    def model():
        runs.append(0)
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if len(runs) % 2:
            pyro.factor("cusp", (x - x.detach()).abs().sqrt())

    guide = AutoNormal(model)
    loss = Trace_ELBO()
    losses = train(model, guide, loss, schedule=Schedule(num_steps=40))
    assert sum(map(math.isnan, losses)) == 20  # of the steps that were left out
    assert all(p.isfinite().all() for p in guide.parameters())
    assert guide.locs.x != 0


def test_a_guide_that_never_moves_is_an_error():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("cusp", (x - x.detach()).abs().sqrt())

    message = "the loss or its gradient was not finite for 50 steps in a row"
    with pytest.raises(RuntimeError, match=message):
        train(model, AutoNormal(model), Trace_ELBO(), schedule=Schedule(num_steps=100))


def test_a_training_ends_at_the_look_that_says_so():
    """Other looks leave the training as it is, though they draw."""

    def losses(answers):
        pyro.set_rng_seed(1)
        pyro.clear_param_store()

        def look():
            torch.randn(3)
            return next(answers)

        schedule = Schedule(num_steps=20, first_look=3)
        loss = ImplicitELBO(2)
        return train(conjugate, AutoNormal(conjugate), loss, schedule=schedule, is_enough=look)

    whole = losses(iter([False] * 3))  # after 3, 6 and 12 steps
    assert len(whole) == 20 and losses(iter([False, False, True])) == whole[:12]
    pyro.set_rng_seed(1)
    pyro.clear_param_store()
    schedule = Schedule(num_steps=20)
    assert whole == train(conjugate, AutoNormal(conjugate), ImplicitELBO(2), schedule=schedule)


def test_fit_looks_twice_before_steps_are_recorded(monkeypatch):
    def refuse(*args):
        raise AssertionError("recorded")

    def look():
        looks.append(0)
        return len(looks) == 2

    monkeypatch.setattr(recording.TracedSteps, "_record", refuse)
    looks, loss, guide = [], ImplicitELBO(2), AutoNormal(conjugate)
    loss.compile = "auto"
    loss.differentiable_loss(conjugate, guide)  # the estimate of a step's cost
    assert len(train(conjugate, guide, loss, is_enough=look)) == 2 * Schedule.first_look
    with pytest.raises(AssertionError, match="recorded"):
        train(conjugate, guide, loss, schedule=Schedule(num_steps=10))


def test_gradients_are_cut(monkeypatch):
    norms = []
    step = torch.optim.Adam.step

    def spy(self):
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        norms.append(torch.cat(gradients).norm().item())
        return step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    far = torch.tensor([1e4])
    for clip_norm in (0.5, 1e9):
        pyro.clear_param_store()
        schedule = Schedule(num_steps=3, clip_norm=clip_norm)
        train(conjugate, AutoNormal(conjugate), ImplicitELBO(2), far, schedule=schedule)
    assert norms[:3] == pytest.approx([0.5] * 3) and min(norms[3:]) > 1e3


@pytest.mark.parametrize("progress", [False, True])
def test_the_bar_can_be_off(progress, capsys, monkeypatch):
    monkeypatch.setattr("pyro_implicit.runtime.progress._is_watched", lambda: True)
    monkeypatch.setattr(progress_module, "DISPLAY", DisplayPolicy(0.0, 0.0))
    schedule = Schedule(num_steps=5)
    guide = AutoNormal(conjugate)
    train(conjugate, guide, ImplicitELBO(2), schedule=schedule, progress=progress, name="my run")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("my run: 100%" in err and "5/5" in err and "loss " in err) if progress else err == ""


def test_errors_pass_through():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        runs.append(x)
        if len(runs) > 12:
            raise ZeroDivisionError("of the model")

    runs: list = []
    with pytest.raises(ZeroDivisionError, match="of the model"):
        train(model, AutoNormal(model), ImplicitELBO())
    assert len(runs) == 13


def test_seeds():
    found = []
    for seed in (1, 1, 2):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guide = AutoNormal(conjugate)
        found.append(train(conjugate, guide, ImplicitELBO(2), schedule=Schedule(num_steps=9)))
    assert found[0] == found[1] != found[2]


def test_parameters_that_a_guide_shares_are_trained_once():
    """``AutoIAFNormal`` holds its network under two names, of which Adam would warn."""

    def model():
        pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    guide = AutoIAFNormal(model)
    guide()
    parameters = trained_parameters(model, guide, Trace_ELBO(), (), {})
    assert len({id(value) for value in parameters.values()}) == len(parameters) > 0
    assert len(fit(model, guide, num_steps=2, progress=False).losses) == 2


def test_weights_that_a_prior_pulls_to_zero_do_not_become_denormal():
    """Products with denormal numbers take ten times as long."""
    start = torch.tensor([1e-39, 1e-33, 1.0])  # the last has data

    def model():
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1e3).to_event(1))
        pyro.sample("y", dist.Normal(weight[-1], 1.0), obs=torch.tensor(2.0))

    guide = AutoDelta(model, init_loc_fn=init_to_value(values={"weight": start}))
    schedule = Schedule(num_steps=100, lr=1e-3)
    train(model, guide, ImplicitELBO(1), schedule=schedule)
    found = guide.median()["weight"]
    assert (found[:2] == 0).all() and 1.05 < found[2] < 1.1


def test_a_parameter_that_is_a_view_of_a_column():
    """The fused kernel of Adam ignores strides, and would write beyond the column."""
    weights = torch.zeros(3, 2)
    module = torch.nn.Module()
    module.column = torch.nn.Parameter(weights[:, 0])

    def target():
        pyro.sample("x", dist.Normal(torch.tensor([1.0, 2.0, 3.0]), 1.0).to_event(1))

    def guide():
        pyro.module("module", module)
        pyro.sample("x", dist.Normal(module.column, 1.0).to_event(1))

    schedule = Schedule(num_steps=200, lr=0.1)
    train(target, guide, ImplicitELBO(4), schedule=schedule, progress=False, seed=0)
    torch.testing.assert_close(
        module.column.detach(), torch.tensor([1.0, 2.0, 3.0]), atol=0.1, rtol=0
    )
    assert torch.equal(weights[:, 1], torch.zeros(3))
