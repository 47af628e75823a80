# SPDX-License-Identifier: Apache-2.0
"""refine with minibatches: conjugate posteriors, what is returned, resumed, and refused."""

from __future__ import annotations

import math
import time

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from pyro_implicit.density import Target
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc import ChainPolicy, Refined, refine, refine_by_minibatches
from pyro_implicit.mcmc import minibatch_chains as module
from pyro_implicit.mcmc.frame import estimate_frame, minibatch_frame
from pyro_implicit.mcmc.policy import LangevinPolicy
from pyro_implicit.runtime.minibatches import BatchStream

ROWS = 100
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 2, generator=GENERATOR, dtype=torch.float64) @ torch.tensor(
    [[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64
)
Y = X.sum(-1) + 0.5 * torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
PRECISION = X.T @ X / 0.25 + torch.eye(2) / 4
MEAN = torch.linalg.solve(PRECISION, X.T @ Y / 0.25)
COVARIANCE = torch.linalg.inv(PRECISION)
SD = COVARIANCE.diagonal().sqrt()


def regression(x, y):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
    with pyro.plate("rows", ROWS, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)


def loader(batch_size=20):
    return DataLoader(TensorDataset(X, Y), batch_size, shuffle=True)


def exact(count, spread=1.0):
    """Draws of the posterior, or of one narrower or wider."""
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"weight": MEAN + spread * noise @ torch.linalg.cholesky(COVARIANCE).T}


def short(guide=None, model=regression, batches=None, **options):
    options = {"max_epochs": 4, "seed": 0, "progress": False} | options
    batches = loader() if batches is None else batches
    guide = exact(64) if guide is None else guide
    return refine_by_minibatches(model, guide, batches=batches, **options)


@pytest.fixture(scope="module")
def whole():
    """A run that is neither killed nor stored."""
    return short()


def test_moments_of_a_conjugate_posterior():
    """From starts half as wide, in a frame that is half as wide."""
    start = exact(400, 0.5)
    result = short(start, num_chains=256, max_epochs=80)
    draws = result.get_samples()["weight"]
    assert result.choice.limit == "balance" and result.choice.heat < 0.12
    assert draws.dtype == torch.float64
    # 256 chains and some four relaxation times: five standard errors, and the heat.
    assert ((draws.mean(0) - MEAN) / SD).abs().max() < 0.15
    assert (draws.std(0) / SD - 1).abs().max() < 0.12
    assert abs(draws.T.corrcoef()[0, 1] - COVARIANCE[0, 1] / SD.prod()) < 0.1


def test_long_steps_heat_by_as_much_as_is_said():
    data = TensorDataset(X, Y)  # rows drawn independently: shuffled ones err by less
    drawn = DataLoader(data, 5, sampler=RandomSampler(data, True, ROWS))
    result = short(exact(400), batches=drawn, num_chains=256, max_epochs=15, step_size=0.06)
    assert result.choice.limit == "user" and result.choice.step_size == 0.06
    # Noise of 20, as 5 of 100 rows of a posterior that is 1 in the frame: found by 16 minibatches.
    assert abs(result.choice.heat - 0.6) < 0.25
    assert abs(result.temperature - 1.6) < 0.4


def test_all_rows_count_alike():
    """Rows are not shuffled, and those of the smaller minibatch differ from the others."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.0), 1.0))
        with pyro.plate("rows", 100, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y[90:] += 1
    start = {"mean": y.mean() + 0.1 * torch.randn(400, dtype=torch.float64)}
    result = short(start, model, [y[:90], y[90:]], num_chains=256, max_epochs=400)
    draws = result.get_samples()["mean"]
    # With equal weights of the minibatches, the mean is off by 4 sds.
    assert abs(draws.mean() - y.sum() / 101) * 101**0.5 < 0.15
    assert abs(draws.std() * 101**0.5 - 1) < 0.12


def test_what_is_returned():
    result = short(max_draws=10)
    grouped, flat = result.get_samples(group_by_chain=True), result.get_samples()
    assert isinstance(result, Refined)
    assert result.num_chains == 8 and grouped["weight"].shape == (8, result.num_draws, 2)
    assert 6 <= result.num_draws <= 10
    assert flat["weight"].equal(grouped["weight"].flatten(0, 1))
    assert result.get_samples(7)["weight"].shape == (7, 2)
    assert result.get_samples(7, group_by_chain=True)["weight"].shape == (8, 7, 2)
    parts = list(result.stream(13))
    assert [len(part["weight"]) for part in parts[:-1]] == [13] * (len(parts) - 1)
    by_snapshot = grouped["weight"].transpose(0, 1).flatten(0, 1)
    assert torch.cat([part["weight"] for part in parts]).equal(by_snapshot)
    assert result.diagnostics()["weight"]["r_hat"].shape == (2,)
    assert result.epochs == 4 and result.stopped == "max_epochs"
    assert "step, bounded by" in str(result) and "full" in str(result)
    assert result.num_gradients > 20 and result.replaced == 0


def test_summary_prints(whole, capsys):
    whole.summary()
    assert "weight[0]" in capsys.readouterr().out


def test_draws_on_disk_are_those_in_memory(whole, tmp_path):
    torch.manual_seed(99)  # another place in the random stream
    second = short(store=tmp_path / "draws")
    assert whole.get_samples()["weight"].equal(second.get_samples()["weight"])
    assert len(list((tmp_path / "draws").iterdir())) == second.num_draws
    with pytest.raises(ValueError, match="snapshots of another run.*Cure"):
        short(store=tmp_path / "draws")


def test_other_seeds_give_other_draws(whole):
    """``test_draws_on_disk_are_those_in_memory`` checks that equal seeds give equal bits."""
    other = short(seed=4).get_samples()["weight"]
    assert not whole.get_samples()["weight"].equal(other)


MAY_BE_SHORT = pytest.mark.filterwarnings("ignore:the chains ran for only")


class Killed(Exception):
    pass


@MAY_BE_SHORT
@pytest.mark.parametrize("kill_at", [4, 13])  # in the warm-up, and after it
def test_killed_and_resumed_gives_equal_bits(whole, tmp_path, monkeypatch, kill_at):
    file = tmp_path / "run" / "chains.pt"
    options = {"checkpoint_every": 3}
    advance = module.MinibatchChains.advance

    def dying(self, *args):
        if self.transitions == kill_at:
            raise Killed
        return advance(self, *args)

    monkeypatch.setattr(module.MinibatchChains, "advance", dying)
    with pytest.raises(Killed):
        short(checkpoint=file, **options)
    monkeypatch.undo()
    for _ in range(2):  # to the end, and after it
        result = short(checkpoint=file, **options)
        assert result.get_samples()["weight"].equal(whole.get_samples()["weight"])
        assert result.num_gradients == whole.num_gradients
        assert result.choice == whole.choice
    with pytest.raises(ValueError, match="Cure: another file"):
        short(checkpoint=file, max_epochs=9)


def test_killed_before_the_second_checkpoint(whole, tmp_path, monkeypatch):
    """Draws are there that the checkpoint knows nothing of."""
    file, append = tmp_path / "chains.pt", module.DrawStore.append

    def dying(self, draws):
        append(self, draws)
        if len(self) == 3:
            raise Killed

    monkeypatch.setattr(module.DrawStore, "append", dying)
    with pytest.raises(Killed):
        short(checkpoint=file)
    monkeypatch.undo()
    assert short(checkpoint=file).get_samples()["weight"].equal(whole.get_samples()["weight"])


def test_interrupted_it_keeps_the_draws_so_far(monkeypatch):
    advance = module.MinibatchChains.advance

    def pressed(self, *args, **kwargs):
        if self.transitions == self.schedule.steps - 1:
            raise KeyboardInterrupt
        return advance(self, *args, **kwargs)

    monkeypatch.setattr(module.MinibatchChains, "advance", pressed)
    result = short()
    assert result.stopped == "interrupted" and len(result.get_samples()["weight"]) > 0


@MAY_BE_SHORT
def test_seconds_end_warm_up_and_run():
    began = time.perf_counter()
    result = short(max_epochs=10**4, max_seconds=1.0)
    assert result.stopped == "max_seconds" and result.num_draws >= 1
    assert time.perf_counter() - began < 20.0
    assert result.warmup_gradients < result.num_gradients


def test_warns_of_draws_that_are_still_those_of_the_start():
    with pytest.warns(
        UserWarning,
        match=r"ran for only 0\.\d+ relaxation.*Cure: more max_epochs \(about \d+\)",
    ) as caught:
        result = short(step_size=0.02, max_epochs=10)
    assert caught[0].filename == __file__ and result.choice.relaxations < 1
    epochs = int(str(caught[0].message).split("(about ")[1].split(")")[0])
    assert 1.5 < short(step_size=0.02, max_epochs=epochs).choice.relaxations < 3


def test_a_run_cut_short_tells_of_its_own_relaxations(monkeypatch):
    whole = short(max_epochs=20).choice.relaxations
    advance = module.MinibatchChains.advance

    def pressed(self, *args):
        if self.transitions == 65:  # half-way after the warm-up
            raise KeyboardInterrupt
        return advance(self, *args)

    monkeypatch.setattr(module.MinibatchChains, "advance", pressed)
    assert short(max_epochs=20).choice.relaxations == pytest.approx(whole / 2)


@MAY_BE_SHORT
def test_no_seconds_at_all_leave_a_few_steps():
    result = short(max_epochs=10**3, max_seconds=1e-9)
    assert result.stopped == "max_seconds" and result.num_draws >= 1


def test_a_point_has_scales_of_prior_and_information():
    """The posterior's precision, by how much the gradients of sixteen minibatches differ."""
    stream = BatchStream(loader())
    density = Target.of_minibatches(regression, batch=stream.probed[0])
    point = {"weight": MEAN.unsqueeze(0)}
    frame = minibatch_frame(density, Sampler(density, point), stream)
    torch.testing.assert_close(frame.scale, PRECISION.diagonal().rsqrt(), rtol=0.4, atol=0)
    result = short(point)
    white = PRECISION * PRECISION.diagonal().rsqrt().outer(PRECISION.diagonal().rsqrt())
    largest = torch.linalg.eigvalsh(white).max()
    assert result.frame == "diagonal"
    assert 0.5 < result.choice.curvature / largest < 3  # of minibatches

    all_rows = BatchStream([(X, Y)])  # one minibatch tells nothing: the prior's
    density = Target.of_minibatches(regression, batch=(X, Y))
    frame = minibatch_frame(density, Sampler(density, point), all_rows)
    torch.testing.assert_close(frame.scale, torch.full_like(frame.scale, 2.0), rtol=0.3, atol=0)


def with_free_elements(x, y):
    """The data say nothing of them."""
    regression(x, y)
    pyro.sample("free", dist.Normal(x.new_zeros(3), 1.0).to_event(1))


def test_draws_far_too_narrow_in_some_directions():
    """Two are nearly constant, and one depends on another coordinate."""
    start = exact(30)
    noise = torch.randn(2, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start["free"] = torch.stack([1e-12 * noise[0], 0.02 * noise[1], start["weight"][:, 0]], -1)
    result = short(start, with_free_elements, max_epochs=60)
    draws = result.get_samples()
    assert (draws["free"].mean(0).abs() < 0.5).all()
    assert ((draws["free"].std(0) - 1).abs() < 0.3).all()
    assert ((draws["weight"].std(0) / SD).log().abs() < 0.3).all()
    assert result.choice.curvature < 10  # the others keep their scales


@pytest.mark.parametrize("num_batches", [1, 5])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_draws_that_are_near_keep_their_covariance(num_batches, spread):
    """Though they are far narrower than the prior, and correlated."""
    stream = BatchStream(loader(ROWS // num_batches))
    density = Target.of_minibatches(regression, batch=stream.probed[0])
    start = exact(64, spread)
    outside = torch.get_rng_state()
    frame = minibatch_frame(density, Sampler(density, start), stream)
    assert torch.get_rng_state().equal(outside)
    expected = estimate_frame(start["weight"], "full")
    assert frame.scale.equal(expected.scale) and frame.scale_tril.equal(expected.scale_tril)


def test_information_is_that_at_the_members_and_not_between_them():
    """Half-way between (1, 1) and (-1, -1) their product does not change with one of them."""

    def product(x, y):
        factors = pyro.sample("factors", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(factors.prod() * x[:, 0], 0.5), obs=y)

    y = X[:, 0] + 0.5 * torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
    stream = BatchStream(DataLoader(TensorDataset(X, y), 20, shuffle=True))
    density = Target.of_minibatches(product, batch=stream.probed[0])
    members = {"factors": torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)}
    frame = minibatch_frame(density, Sampler(density, members), stream)
    ratio = frame.scale * (1 + X[:, 0].square().sum() / 0.25).sqrt()
    assert ((0.5 < ratio) & (ratio < 2)).all()  # sixteen minibatches; between the members it is 20


def test_many_dimensions_have_a_diagonal_frame():
    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(150), 1.0).to_event(1))
        with pyro.plate("rows", 8, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x.mean(), 1.0), obs=y)

    guide = AutoNormal(model, init_scale=0.3)
    result = short(guide, model, [torch.zeros(4), torch.ones(4)], max_epochs=20)
    assert result.frame == "diagonal" and result.get_samples()["x"].shape[-1] == 150


def test_arguments_of_model_and_guide():
    def model(shift, y, *, seed):
        x = pyro.sample("x", dist.Normal(torch.tensor(seed), 1.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x + shift, 1.0), obs=y)

    result = refine_by_minibatches(
        model,
        {"x": 2.0 + 0.2 * torch.randn(20, generator=torch.Generator().manual_seed(0))},
        5.0,
        batches=[torch.full((20,), 7.0)] * 2,
        max_epochs=100,
        seed=0,
        progress=False,
        model_kwargs={"seed": 2.0},
    )
    assert abs(result.get_samples()["x"].mean() - 2.0) < 0.3


def test_a_model_that_draws_its_own_rows():
    def model():
        weight = pyro.sample("weight", dist.Normal(X.new_zeros(2), 2.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=20) as rows:
            pyro.sample("y", dist.Normal(X[rows] @ weight, 0.5), obs=Y[rows])

    first, second = (short(model=model, batches=[()] * 5) for _ in range(2))
    assert first.get_samples()["weight"].equal(second.get_samples()["weight"])
    assert first.choice.noise > 0 and first.choice.curvature < 10


@MAY_BE_SHORT
def test_lost_chains_go_on_from_others():
    def truncated(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.where(x > 0, 0.0, -torch.inf))
        with pyro.plate("rows", 2, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    random = torch.Generator().manual_seed(0)  # of other starts, none may be lost in time
    start = {"x": torch.rand(50, generator=random) + 0.1}
    with pytest.warns(UserWarning, match="became non-finite after the warm-up.*Cure") as caught:
        result = short(start, truncated, [torch.zeros(1)] * 2, max_epochs=100, num_chains=16)
    assert caught[0].filename == __file__
    assert result.replaced > 0 and (result.get_samples()["x"] > 0).all()


def test_chains_from_far_away_arrive():
    """They are hot while they fall, which no shorter step would cure."""
    far = {"weight": exact(64)["weight"] + 4 * SD}
    result = short(far, num_chains=16, max_epochs=160)
    assert result.choice.limit == "balance" and result.temperature < 2
    standard = (result.get_samples()["weight"] - MEAN) / SD
    assert standard.mean(0).abs().max() < 2


@pytest.mark.parametrize("too_long", [4.0, 1e30])
def test_a_step_that_is_too_long_at_first_is_taken_back(monkeypatch, too_long):
    """Too hot at the end of a window, or out of the finite numbers before."""
    choose, count = module.choose_step, 0

    def misled(*args):
        nonlocal count
        count += 1
        choice = choose(*args)
        return choice._replace(step_size=too_long) if count == 1 else choice

    monkeypatch.setattr(module, "choose_step", misled)
    monkeypatch.setattr(module, "stable_step", lambda curvature: math.inf)
    result = short(num_chains=16, max_epochs=40)
    standard = (result.get_samples()["weight"] - MEAN) / SD
    assert standard.abs().max() < 8 and result.temperature < 1.5
    assert (result.replaced > 0) == (too_long > 100)


def test_starts_without_a_finite_density():
    start = exact(16)
    start["weight"][:3] = torch.nan
    with pytest.warns(UserWarning, match="not finite at 3 of 16"):
        assert short(start, num_chains=16).replaced == 3
    start["weight"][:] = torch.nan
    with pytest.raises(ValueError, match="finite at none of 16 given draws: .*Cure"):
        short(start, num_chains=16)


def test_a_step_that_is_far_too_long():
    with pytest.raises(RuntimeError, match="all 8 chains left.*Cure"):
        short(step_size=1e3, max_epochs=100)


def test_minibatches_of_arrays():
    batches = [(x.numpy(), y.numpy()) for x, y in zip(X.split(20), Y.split(20), strict=True)]

    def converting(x, y):
        regression(torch.from_numpy(x), torch.from_numpy(y))

    assert short(model=converting, batches=batches).num_gradients > 20
    with pytest.raises(TypeError, match="argument 1 is a NumPy array.*Cure: torch.as_tensor"):
        short(model=lambda x, y: regression(x @ torch.eye(2), y), batches=batches)


@pytest.mark.parametrize("place", [0, 3, 20])
def test_nan_in_a_minibatch(place):
    """The first, one that the step is chosen by, and a later one."""
    y = Y.clone()
    y[4 * place] = torch.nan
    batches = list(zip(X.split(4), y.split(4), strict=True))
    where = f" in minibatch {place + 1} " if place else " "
    with pytest.raises(ValueError, match=f"site 'y'{where}.*NaN in 1 of 4 elements. Cure"):
        short(batches=batches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "batches is empty.*Cure"),
        ({"num_chains": 0}, "num_chains must be at least 1"),
        ({"max_epochs": 0}, "max_epochs must be at least 1"),
        ({"step_size": -1.0}, "step_size must be positive"),
        ({"max_seconds": 0.0}, "max_seconds must be positive, but got 0.0"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
    ],
)
def test_refuses_settings(change, message):
    with pytest.raises(ValueError, match=message):
        short(**change)


def test_the_policy_reaches_the_kernel():
    policy = ChainPolicy(langevin=LangevinPolicy(friction=4.0), num_minibatch_chains=3)
    result = short(policy=policy, max_epochs=20)
    assert result.num_chains == 3
    # Heat is noise times step size over twice the friction.
    choice = result.choice
    assert choice.heat == pytest.approx(choice.noise * choice.step_size / 8)


def test_refine_names_the_function_for_minibatches():
    with pytest.raises(ValueError, match="slice'\\); with minibatches, refine_by_minibatches"):
        refine(regression, exact(8), X, Y, kernel="sghmc", progress=False)


def test_refuses_a_model_that_takes_a_minibatch_for_all_data():
    def unscaled(x, y):
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)

    with pytest.raises(ValueError, match="each of 5 minibatches for all data.*Cure"):
        short(model=unscaled)
    assert short(model=unscaled, batches=loader(100), max_epochs=20).choice.noise < 1e-9


@MAY_BE_SHORT
def test_warns_of_another_number_of_rows():
    few = DataLoader(TensorDataset(X[:60], Y[:60]), 20)
    with pytest.warns(UserWarning, match="100 rows in all, but 3 minibatches of 20.*1.67 times"):
        short(batches=few)


@MAY_BE_SHORT
def test_minibatches_of_unequal_sizes_are_counted_by_all_of_them():
    parts = [1, 98, 1]
    result = short(batches=list(zip(X.split(parts), Y.split(parts), strict=True)), max_epochs=100)
    assert result.epochs == 100


@MAY_BE_SHORT
@pytest.mark.parametrize("num_batches", [1, 3])
def test_refuses_too_few_steps_to_warm_up(num_batches):
    with pytest.raises(ValueError, match=f"1 epochs of {num_batches} minibatches.*least 4. Cure"):
        short(batches=loader(-(-ROWS // num_batches)), max_epochs=1)
    assert short(batches=loader(ROWS), max_epochs=4).num_draws == 3
