# SPDX-License-Identifier: Apache-2.0
"""refine: exact posteriors, where it stops, what it returns, and what it refuses."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import (
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    compare,
    diagnose,
    fit,
)
from pyro_implicit.density import SubsampledError, Target
from pyro_implicit.generators import Generator
from pyro_implicit.mcmc import ChainPolicy, refine, refine_by_minibatches
from pyro_implicit.mcmc import chains as chains_module
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.kernels.hmc import ChEES
from pyro_implicit.mcmc.policy import DEFAULT, SlicePolicy, StoppingPolicy
from pyro_implicit.mcmc.refine import chains_in_time
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.runtime.clock import TimeLimit

X = torch.tensor([[1.0, -2.0], [1.0, 0.5], [1.0, 1.0], [1.0, 3.0]])
Y = torch.tensor([-1.0, 0.3, 0.8, 2.0])


def regression(x, y):
    """A conjugate regression, and a gamma that the data do not touch."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
    pyro.sample("rate", dist.Gamma(x.new_tensor(3.0), 2.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)


def exact(x, y):
    precision = x.T @ x / 0.25 + torch.eye(2).to(x) / 4
    return torch.linalg.solve(precision, x.T @ y / 0.25), torch.linalg.inv(precision)


def short(guide, *args, model=regression, **options):
    options = {"num_chains": 32, "max_gradients": 120, "seed": 0, "progress": False} | options
    return refine(model, guide, *(args or (X, Y)), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_a_conjugate_posterior(dtype):
    x, y = X.to(dtype), Y.to(dtype)
    result = refine(regression, AutoNormal(regression), x, y, seed=1, progress=False)
    draws = result.get_samples()
    mean, covariance = exact(x, y)
    assert result.stopped == "converged" and result.num_gradients < 4000
    assert draws["weight"].dtype == draws["rate"].dtype == dtype
    sd = covariance.diagonal().sqrt()
    # The chains give some 10,000 effective draws: five standard errors.
    assert ((draws["weight"].mean(0) - mean) / sd).abs().max() < 0.05
    scaled = draws["weight"].T.cov() / sd / sd.unsqueeze(-1)
    assert (scaled - covariance / sd / sd.unsqueeze(-1)).abs().max() < 0.07
    assert abs(draws["rate"].mean() - 1.5) < 0.05 * 0.75**0.5
    assert abs(draws["rate"].var() / 0.75 - 1) < 0.1


def test_draws_go_on_while_they_are_cheap():
    def run(enough, share):
        policy = ChainPolicy(stopping=StoppingPolicy(enough=enough, least_share=share))
        options = {"seed": 0, "max_gradients": 300, "progress": False, "policy": policy}
        return refine(normal, AutoNormal(normal), **options)

    def normal():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    few, some, all_of_it = run(0, 0.5), run(10**9, 0.5), run(10**9, 100.0)
    assert few.stopped == some.stopped == "converged"
    assert few.num_gradients < 1.4 * few.warmup_gradients
    assert some.num_gradients >= 1.5 * some.warmup_gradients
    # Where the budget ends it, chains that had converged have.
    assert all_of_it.num_gradients >= 300 and all_of_it.stopped == "converged"


def injective(model):
    return AutoImplicit(model, AutoregressiveGenerator, frame=None)


@pytest.mark.parametrize("frame", ["noise", "full"])
def test_noise_space_and_latent_space_agree(frame):
    """The generator is untrained and bent: its Jacobian matters."""
    guide = injective(regression)
    guide(X, Y)
    with torch.no_grad():
        for parameter in guide.generator.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    result = refine(
        regression,
        guide,
        X,
        Y,
        frame=frame,
        seed=0,
        progress=False,
        num_chains=64,
        max_gradients=400,
    )
    assert result.space == ("noise" if frame == "noise" else "latent") and result.kernel == "hmc"
    mean, covariance = exact(X, Y)
    error = (result.get_samples()["weight"].mean(0) - mean) / covariance.diagonal().sqrt()
    assert error.abs().max() < 0.15
    assert abs(result.get_samples()["rate"].var() / 0.75 - 1) < 0.3
    assert all(parameter.requires_grad for parameter in guide.generator.parameters())


@pytest.mark.parametrize("frame", ["diagonal", "low-rank", "full"])
def test_every_frame_is_exact(frame):
    result = refine(
        regression,
        AutoNormal(regression),
        X,
        Y,
        frame=frame,
        seed=0,
        progress=False,
        num_chains=128,
        max_gradients=300,
    )
    mean, covariance = exact(X, Y)
    error = (result.get_samples()["weight"].mean(0) - mean) / covariance.diagonal().sqrt()
    assert result.frame == frame or (frame, result.frame) == ("low-rank", "diagonal")
    assert error.abs().max() < 0.25


def hand_written(x, y):
    pyro.sample("weight", dist.Normal(torch.zeros(2), 0.1).to_event(1))
    pyro.sample("rate", dist.Gamma(3.0, 2.0))


def particles(count):
    return {"weight": torch.randn(count, 2), "rate": torch.rand(count) + 0.5}


@pytest.mark.parametrize(
    "guide",
    [
        AutoSemiImplicit(regression, frame=None),
        hand_written,
        particles(5),
    ],
    ids=["semi-implicit", "hand-written", "draws"],
)
def test_any_guide_and_draws(guide):
    result = short(guide)
    samples = result.get_samples(group_by_chain=True)
    assert samples["weight"].shape[0] == 32 and samples["weight"].shape[2:] == (2,)
    assert (samples["rate"] > 0).all()


@pytest.fixture(scope="module")
def walked():
    """A short run of chains."""
    return short(AutoNormal(regression))


def test_what_is_returned(walked):
    result = walked
    grouped, flat = result.get_samples(group_by_chain=True), result.get_samples()
    num_chains, num_draws = grouped["weight"].shape[:2]
    assert num_chains == result.num_chains == 32 and num_draws >= 8
    assert result.stopped == "max_gradients"
    assert flat["weight"].equal(grouped["weight"].flatten(0, 1))
    assert result.get_samples(7)["weight"].shape == (7, 2)
    assert result.diagnostics()["weight"]["r_hat"].shape == (2,)
    assert Predictive(regression, flat)(X, None)["y"].shape == (num_chains * num_draws, 4)
    assert compare(None, flat, grouped | flat).floor_ratio < 1
    assert "max_gradients" in str(result) and "mode" in str(result)
    assert 0.5 < result.acceptance < 1 and result.warmup_gradients < result.num_gradients


def test_summary_prints(walked, capsys):
    walked.summary()
    assert "weight[0]" in capsys.readouterr().out


def test_seeds_give_equal_bits():
    options = {"max_gradients": 60, "num_chains": 8}
    first, second, other = (short(injective(regression), seed=s, **options) for s in (3, 3, 4))
    assert first.get_samples()["weight"].equal(second.get_samples()["weight"])
    assert not first.get_samples()["weight"].equal(other.get_samples()["weight"])


class Killed(Exception):
    pass


@pytest.mark.parametrize("kill_at", [3, 30])  # in the warm-up, and after it
def test_killed_and_resumed_gives_equal_bits(walked, tmp_path, monkeypatch, kill_at):
    file = tmp_path / "run" / "chains.pt"
    options = {"checkpoint_every": 2}
    advance = WindowedChains.advance

    def dying(self, *args, **kwargs):
        if self.transitions == kill_at:
            raise Killed
        advance(self, *args, **kwargs)

    monkeypatch.setattr(WindowedChains, "advance", dying)
    with pytest.raises(Killed):
        short(AutoNormal(regression), checkpoint=file, **options)
    monkeypatch.undo()
    resumed = short(AutoNormal(regression), checkpoint=file, **options)
    again = short(AutoNormal(regression), checkpoint=file, **options)
    for result in (resumed, again):
        assert result.get_samples()["weight"].equal(walked.get_samples()["weight"])
        assert result.num_gradients == walked.num_gradients
    with pytest.raises(ValueError, match="Cure: another file"):
        short(AutoNormal(regression), checkpoint=file, max_gradients=300)


@pytest.mark.parametrize("phase", ["warm-up", "sampling"])
def test_interrupted_it_keeps_the_draws_so_far(monkeypatch, phase):
    """All of ``fit`` too, which then has them in place of the guide's."""
    advance = WindowedChains.advance

    def pressed(self, *args, **kwargs):
        if self.phase == phase and (phase == "warm-up" or self.history.seen == 20):
            raise KeyboardInterrupt
        advance(self, *args, **kwargs)

    monkeypatch.setattr(WindowedChains, "advance", pressed)
    if phase == "warm-up":
        with pytest.raises(KeyboardInterrupt):
            short(AutoNormal(regression))
        return
    result = short(AutoNormal(regression), max_gradients=400)
    assert result.stopped == "interrupted" and len(result.get_samples()["rate"]) > 64
    assert result.drift is None or result.as_guide().drift == result.drift
    pyro.clear_param_store()
    whole = fit(regression, AutoNormal(regression), X, Y, refine=True, num_steps=5, progress=False)
    assert whole.interrupted and whole.refined.stopped == "interrupted"


@pytest.mark.filterwarnings("ignore:fit's chains")
def test_a_limit_that_ends_the_warm_up():
    """The last positions are the draws; nothing trusts them, and the chains can go on."""
    result = short(AutoNormal(regression), max_gradients=10**6, max_seconds=1e-9)
    assert result.stopped == "max_seconds" and result.num_gradients < 100
    assert (result.num_chains, result.num_draws, result.warmup_gradients) == (32, 1, 0)
    assert result.drift is None and not result.settled and result.get_samples()["rate"].std() > 0
    assert "max_seconds" in str(result) and result.stuck == 0
    found = diagnose(regression, result, X, Y, progress=False)
    assert found.verdict != "trust" and "max_seconds" in str(found)
    more, again = (result.refine_more(max_gradients=400, progress=False) for _ in range(2))
    assert more.warmup_gradients > 0 and more.num_draws >= 12
    assert more.get_samples()["rate"].equal(again.get_samples()["rate"])


class Clock:
    """A clock that only runs of the model advance."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, x, y):
        self.now += self.seconds
        return regression(x, y)


@pytest.mark.parametrize("max_seconds", [3.0, 30.0])
def test_slow_models_end_in_time(monkeypatch, max_seconds):
    """No trajectory is longer than the time that is left."""
    clock = Clock(monkeypatch, 0.1)
    options = {"max_gradients": 10**6, "max_seconds": max_seconds, "compile": False}
    result = short({"weight": torch.zeros(4, 2), "rate": torch.ones(4)}, model=clock, **options)
    assert result.stopped == "max_seconds" or result.settled
    assert 0.8 * max_seconds < clock.now <= 1.1 * max_seconds
    assert result.num_draws == 1 if max_seconds == 3 else result.num_draws > 12


def test_fewer_chains_if_time_is_short():
    target, limit = Target(regression, X, Y), TimeLimit(1e4)
    assert chains_in_time(target, 256, TimeLimit(None)) == chains_in_time(target, 256, limit) == 256
    target.__dict__["_seconds"] = lambda number: number / 10  # of a gradient of so many chains
    assert chains_in_time(target, 256, TimeLimit(200.0)) == 16
    assert chains_in_time(target, 256, TimeLimit(1.0)) == 0


def standing_chains(**changes):
    state = SimpleNamespace(position=torch.zeros(64, 2))
    options = {"kernel": "hmc", "frame": None, "frame_kind": "full", "history": History(10)}
    return WindowedChains(state=state, adaptation=ChEES(), **(options | changes))


@pytest.mark.parametrize("max_seconds, longest", [(1000.0, 64), (60.0, 17), (40.0, 1), (9.0, 1)])
def test_trajectories_are_as_long_as_the_time_that_is_left(max_seconds, longest):
    """Of 29 transitions that are to come, at 25 gradients a second."""
    done = {"seconds": 40.0, "gradients": 1000, "max_gradients": 2000}
    now = standing_chains(max_seconds=max_seconds, **done)
    assert now._ends_early()
    now._shorten_trajectories()
    assert now.adaptation.max_leapfrogs == longest


def test_a_second_warm_up_without_budget_goes_on_for_one_transition():
    now = standing_chains(gradients=100, max_gradients=100)
    now.warmup.gradients = 100
    assert not now._ends_early()
    now.gradients += 2
    assert now._ends_early()


def test_memory_is_bounded():
    result = short(AutoNormal(regression), max_draws=10, max_gradients=400, num_chains=8)
    assert result.get_samples(group_by_chain=True)["rate"].shape[1] <= 10


def bimodal():
    x = pyro.sample("x", dist.Normal(1.0, 100.0))
    pyro.factor("modes", torch.logaddexp(-0.5 * (x - 9) ** 2, -0.5 * (x + 9) ** 2))


def test_separate_modes_keep_the_guides_weights_and_do_not_converge():
    def model():  # no mirror images, which images of the draws would weigh
        pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        x = pyro.sample("x", dist.Normal(1.0, 100.0).expand([2]).to_event(1))[1]
        pyro.factor("modes", torch.logaddexp(-0.5 * (x - 25) ** 2, -0.5 * (x + 9) ** 2))

    x = torch.tensor([[0.0, -9.0], [100.0, -9.1], [0.0, -8.9], [50.0, 25.0]])
    start = {"scale": torch.ones(4), "x": x}
    result = refine(model, start, num_chains=64, max_gradients=600, seed=0, progress=False)
    assert result.stopped == "max_gradients" and result.drift.r_hat > 2
    assert result.drift.slowest == "`x[1]`" and "(slowest: `x[1]`)" in str(result)
    assert (result.get_samples()["x"][:, 1] < 0).double().mean() == 0.75


def test_quantities_decide_when_to_stop():
    """Of a function that forgets the modes, the chains converge."""
    start = {"x": torch.tensor([-9.0, 9.0])}
    result = refine(
        bimodal, start, quantities=lambda d: d["x"].abs(), num_chains=256, seed=0, progress=False
    )
    assert result.stopped == "converged" and abs(result.get_samples()["x"].abs().mean() - 9) < 0.1


@pytest.mark.parametrize(
    "quantities, message",
    [
        (lambda d: d["rate"].mean(), r"quantities gave \(\) of 32 chains. Cure: .*for each chain"),
        (lambda d: {"of": d["weight"].mT}, r"quantities\['of'\] gave \(2, 32\) of 32 chains. C"),
        (lambda d: 1.0, "quantities gave float of 32 chains. Cure"),
    ],
)
def test_quantities_of_other_shapes(quantities, message, monkeypatch):
    monkeypatch.setattr(WindowedChains, "advance", lambda *args: pytest.fail("they walk"))
    with pytest.raises(ValueError, match=message):
        short(particles(8), quantities=quantities)


def test_quantities_that_are_not_finite():
    with pytest.warns(UserWarning, match="not finite in .* of 32 chains: .*Cure") as caught:
        result = short(particles(8), quantities=lambda d: (d["rate"] - 0.5).log())
    assert result.stopped == "max_gradients"
    assert len(caught) == 1 and caught[0].filename == __file__


def test_quantities_may_raise_where_the_chains_start():
    def picky(draws):
        assert draws["rate"].max() < 50
        return draws["rate"]

    start = {"weight": torch.zeros(1, 2), "rate": torch.full((1,), 60.0)}
    assert short(start, quantities=picky).space == "latent"


def test_starts_without_a_finite_density_are_replaced():
    draws = particles(64)
    draws["weight"][:5] = 1e30
    draws["weight"][5] = torch.nan
    with pytest.warns(UserWarning, match="not finite at 6 of 64") as caught:
        result = short(draws, num_chains=64)
    assert caught[0].filename == __file__
    assert result.replaced == 6 and result.get_samples()["weight"].abs().max() < 100
    with pytest.raises(ValueError, match="observation of site 'y' is NaN in 4 of 4.*Cure"):
        short(AutoNormal(regression), X, torch.full_like(Y, torch.nan))
    draws["weight"][:] = torch.nan
    with pytest.raises(ValueError, match="finite at none of 64 given draws: .*'weight'.*Cure"):
        short(draws, num_chains=64)


def share():
    pyro.sample("share", dist.Uniform(0.0, 1.0))
    pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rate": -torch.ones(4, 2)}, "'rate' are -1, outside of its support (4 of them)"),
        ({"rate": torch.zeros(4, 2)}, "'rate' are 0, on the boundary of its support (4 of them)"),
        ({"share": torch.arange(2.0, 6.0)}, "'share' are outside of its support (4 of them)"),
        ({"rate": torch.full((4, 2), torch.nan)}, "'rate' are not finite (4 of them)"),
        (
            {"share": torch.tensor([2.0, 2.0, 0.5, 0.5]), "rate": torch.tensor([[1.0], [0.0]] * 2)},
            "'share' are 2, outside of its support (2 of them); those of 'rate' are 0, on the "
            "boundary of its support (2 of them)",
        ),
    ],
)
def test_given_draws_outside_of_a_support_are_named(change, message):
    draws = {"share": torch.full((4,), 0.5), "rate": torch.ones(4, 2)} | change
    draws["rate"] = draws["rate"].expand(4, 2)
    if len(change) == 2:  # at each draw one of the two
        draws["rate"] = draws["rate"].sort(0, descending=True).values
    message = f"none of 4 given draws: those of {message}. Cure: finite draws inside of"
    with pytest.raises(ValueError, match=re.escape(message)):
        refine(share, draws, progress=False)


def test_some_draws_outside_of_a_support_are_replaced():
    """Also where torch's transform would clamp them."""
    draws = {"share": torch.linspace(0.1, 1.5, 64), "rate": torch.ones(64, 2)}
    with pytest.warns(UserWarning, match="not finite at 23 of 64 given draws"):
        assert short_walk(draws).replaced == 23
    inside = {"share": torch.tensor([0.0, 1.0] * 32), "rate": torch.ones(64, 2)}
    assert short_walk(inside).replaced == 0


def short_walk(draws):
    return refine(share, draws, num_chains=64, max_gradients=200, seed=0, progress=False)


def test_proposals_without_a_finite_density_are_rejected():
    def half_line():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.where(x > 0, 0.0, -torch.inf))

    policy = replace(DEFAULT, slice=SlicePolicy(max_dim=0))
    starts = {"x": torch.rand(50) + 0.1}
    result = refine(half_line, starts, max_gradients=800, policy=policy, seed=0, progress=False)
    draws = result.get_samples()["x"]
    assert (draws > 0).all() and abs(draws.mean() - (2 / torch.pi) ** 0.5) < 0.05
    assert result.failed > 0.01


def test_model_keywords_that_share_a_name():
    def model(*, seed, init_loc_fn, scale):
        pyro.sample("x", dist.Normal(torch.tensor(seed), init_loc_fn * scale))

    result = refine(
        model,
        {"x": torch.zeros(8)},
        num_chains=64,
        max_gradients=400,
        progress=False,
        seed=0,
        model_kwargs={"seed": 5.0, "init_loc_fn": 1.0},
        scale=0.1,
    )
    assert abs(result.get_samples()["x"].mean() - 5) < 0.1


def test_a_model_that_vmap_refuses_runs_one_by_one_with_a_warning():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0 if x.item() > 0 else -0.1, 1.0), obs=torch.tensor(0.0))

    with pytest.warns(UserWarning, match="one particle at a time"):
        refine(model, {"x": torch.zeros(4)}, num_chains=8, max_gradients=20, progress=False)


def test_the_guide_and_the_callers_trace_are_left_alone():
    guide = injective(regression)
    guide(X, Y)
    before = [p.detach().clone() for p in guide.parameters()]
    with poutine.trace() as trace:
        short(guide)
    assert not trace.trace.nodes
    assert all(a.equal(b) for a, b in zip(before, guide.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_chains": 1}, "at least 8.*Cure"),
        ({"frame": "round"}, "frame must be one of"),
        ({"frame": "noise"}, "not an AutoImplicit"),
        ({"max_gradients": 0}, "max_gradients must be at least 1"),
        ({"max_leapfrogs": 0}, "max_leapfrogs must be at least 1"),
        ({"max_draws": 3}, "max_draws must be at least 4"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"max_seconds": -1.0}, "max_seconds must be positive, but got -1.0"),
        ({"kernel": "gibbs"}, "kernel must be one of .*'hmc', 'mams', 'mclmc'"),
    ],
)
def test_refuses_settings(change, message):
    with pytest.raises(ValueError, match=message):
        short(AutoNormal(regression), **change)


def test_refuses_a_guide_of_another_model():
    def other(x, y):
        pyro.sample("slope", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"no draws of \['rate', 'weight'\].*\['slope'\].*Cure"):
        short(AutoNormal(other))
    with pytest.raises(ValueError, match=r"'weight'.*\('num_draws', 2\)"):
        short({"weight": torch.zeros(9, 3), "rate": torch.ones(9)})
    with pytest.warns(UserWarning, match=r"\['other'\], which the model does not sample") as caught:
        short({**particles(8), "other": torch.ones(8)})
    assert caught[0].filename == __file__


@pytest.mark.parametrize("by_minibatches", [False, True])
@pytest.mark.parametrize(
    "weight, message",
    [
        (torch.zeros(9, 3), r"site 'weight' have shape \(9, 3\), but .*'num_draws', 2.*: draws of"),
        (
            torch.zeros(0, 2),
            r"given draws of site 'weight' have shape \(0, 2\).*Cure: at least",
        ),
        (torch.zeros(2), r"given draws of site 'weight' have shape \(2,\).*Cure: .unsqueeze\(0\)"),
        (torch.zeros(8, 2), "given draws have different numbers .*: 8 of 'weight', 9 of 'rate'.*C"),
        (None, r"given draws have no draws of \['weight'\].*Cure: draws of this model"),
    ],
)
def test_refuses_draws_of_other_shapes(weight, message, by_minibatches):
    draws = {"rate": torch.ones(9)} | ({} if weight is None else {"weight": weight})
    with pytest.raises(ValueError, match=message):
        if by_minibatches:
            refine_by_minibatches(regression, draws, batches=[(X, Y)], progress=False)
        else:
            short(draws)


def test_draws_may_be_arrays_and_lists():
    draws = particles(8)
    others = {"weight": draws["weight"].double().numpy(), "rate": draws["rate"].tolist()}
    one, other = short(draws).get_samples(), short(others).get_samples()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(TypeError, match="draws of site 'rate' are a str that is not an.*Cure"):
        short({**draws, "rate": "many"})


def test_refuses_subsampled_data():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4, subsample_size=2) as index:
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[index])

    with pytest.raises(SubsampledError, match="subsamples 2 of 4"):
        refine(model, AutoNormal(model), Y, progress=False)


def test_a_folded_generator_is_reported():
    class Fold(Generator):
        injective = True  # it says

        def forward(self, noise, context=None):
            return noise.square() / 2 + 0.1 * noise

    with pytest.warns(UserWarning, match="another sign"):
        short(AutoImplicit(regression, Fold(3, 3), frame=None), frame="noise", max_gradients=40)
    result = short(AutoImplicit(regression, Fold(3, 3), frame=None), max_gradients=40)
    assert result.space == "latent" and "folds" in str(result)


def spike():
    """So narrow that no trajectory leaves it."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("spike", 2e6 * torch.exp(-0.5 * ((x - 4) / 1e-6) ** 2) / 1e3)


def test_a_chain_without_a_way_out_goes_on_from_others():
    start = {"x": torch.cat([torch.randn(63), torch.full((1,), 4.0)])}
    result = refine(spike, start, num_chains=64, max_gradients=300, seed=0, progress=False)
    assert result.replaced == 1 and abs(result.get_samples()["x"].std() - 1) < 0.15
    assert result.stuck == 0 and "never moved" not in str(result)


def test_a_chain_where_there_is_no_mass_goes_on_from_others():
    def model():
        pyro.sample("x", dist.Laplace(0.0, 1.0))

    start = {"x": torch.cat([torch.randn(63), torch.full((1,), 1e5)])}  # months away
    result = refine(model, start, num_chains=64, seed=0, progress=False)
    assert result.stopped == "converged" and result.replaced == 1
    assert abs(result.get_samples()["x"].std() - 2**0.5) < 0.15


def test_chains_that_start_on_a_thin_sheet_leave_it():
    """A frame of their covariance would make the way out as long as the sheet is thin."""
    torch.set_default_dtype(torch.float64)

    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("c", dist.Laplace(a + b, 1.0))

    a, b, off = torch.randn(3, 512)
    result = refine(model, {"a": a, "b": b, "c": a + b + 1e-5 * off}, seed=0, progress=False)
    draws = result.get_samples()
    spread = (draws["c"] - draws["a"] - draws["b"]).std()
    assert result.stopped == "converged" and result.num_gradients < 1000
    assert spread.item() == pytest.approx(2**0.5, rel=0.1)


@pytest.mark.parametrize(("frame", "first"), [("low-rank", "low-rank"), ("full", "diagonal")])
def test_frames_while_draws_spread(frame, first, monkeypatch):
    """Scores make a low-rank frame right even for draws on a thin sheet; a covariance is not."""
    torch.set_default_dtype(torch.float64)
    kinds, original = [], chains_module.frame_at

    def frame_at(draws, kind, *args):
        kinds.append(kind)
        return original(draws, kind, *args)

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        pyro.factor("ridge", -0.5 * (x.sum(-1) / 0.01) ** 2)

    monkeypatch.setattr(chains_module, "frame_at", frame_at)
    start = {"x": 1e-3 * torch.randn(64, 8)}
    refine(model, start, frame=frame, num_chains=16, max_gradients=100, seed=0, progress=False)
    assert kinds[0] == "diagonal"  # how far the draws have spread
    assert kinds[1] == first


def test_what_a_later_check_sees_counts_against_an_earlier_one():
    """Chains that had settled, and went on because draws are cheap, drift after all."""
    looks = [Drift(0.01, 0.01, 1.09), Drift(0.3, 0.3, 1.8)]
    walked = standing_chains(history=SimpleNamespace(seen=1000), phase="sampling")
    walked.history.drift = lambda *_: looks.pop(0)
    walked.warmup_gradients, walked.gradients = 1000, 1100
    assert walked.check() is None and walked.convergence.settled == "converged"
    walked.history.seen = 5000
    assert walked.check() is None and walked.convergence.settled is None


def test_chains_that_never_moved_are_counted():
    """After a warm-up too short to see them."""
    start = {"x": torch.cat([torch.randn(62), torch.full((2,), 4.0)])}
    with pytest.warns(UserWarning, match="2 of 64 chains never moved.*Cure") as caught:
        result = refine(spike, start, num_chains=64, max_gradients=10, seed=0, progress=False)
    assert caught[0].filename == __file__
    assert result.stuck == 2 and "chains that never moved" in str(result)


@pytest.mark.parametrize("length, is_at_limit", [(3.0, False), (3.01, True), (9.0, True)])
def test_trajectories_at_their_limit(length, is_at_limit):
    """Seven steps of half a unit reach 3.5, six reach 3."""
    found = ChEES(max_leapfrogs=7, step_size=0.5, trajectory_length=length)
    assert found.is_at_limit == is_at_limit
    assert not found.limited(19).is_at_limit
