# SPDX-License-Identifier: Apache-2.0
"""Early stopping on held-out rows."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value

from pyro_implicit import fit
from pyro_implicit.fitting import HeldOut, Schedule, train
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.runtime.minibatches import BatchStream

QUIET = {"seed": 0, "progress": False}
TRAIN, HELD_OUT = torch.full((40,), 3.0), torch.full((6,), 1.0)


def model(y, temperature=1.0):
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    plate = pyro.plate("rows", 40, subsample_size=len(y))
    with poutine.scale(scale=1 / temperature), plate:
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def at_zero():
    return AutoDelta(model, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_score_of_a_wide_guide(temperature):
    """By hand: the mean over eight draws within the logarithm, each row once."""
    guide = AutoNormal(model, init_scale=0.7)
    rows = torch.arange(7.0)
    guide(rows[:3])
    held_out = HeldOut(model, rows.split(3), kwargs={"temperature": temperature})  # 3, 3, 1
    before = torch.get_rng_state()
    found = held_out(guide)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    x = draw(guide, 8, rows[:3])["x"].double()
    density = dist.Normal(x[:, None], 1.0).log_prob(rows.double()).exp()
    assert found == pytest.approx(-density.mean(0).log().mean().item(), rel=1e-6)
    assert x.std() > 0.1 and held_out(guide) == found


def masked_by_handler(y, mask):
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", 40, subsample_size=len(y)), poutine.mask(mask=mask):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def masked_distribution(y, mask):
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", 40, subsample_size=len(y)):
        fn = dist.Normal(x, 1.0).expand([len(y), 2]).mask(mask.unsqueeze(-1)).to_event(1)
        pyro.sample("y", fn, obs=y.unsqueeze(-1).expand(-1, 2))


def observed_in_part(y, mask):
    x = pyro.sample("x", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0).expand([len(y)]).mask(mask), obs=y)


@pytest.mark.parametrize("masked", [masked_by_handler, masked_distribution, observed_in_part])
def test_masked_rows_are_not_counted(masked):
    """Rows at 0 under N(0, 1), which half of the rows are."""
    y, mask = torch.tensor([0.0, 7.0, 0.0, 7.0]), torch.tensor([True, False, True, False])
    batches = list(zip(y.split(2), mask.split(2), strict=True))
    guide = AutoDelta(masked, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))
    expected = 0.5 * math.log(2 * math.pi) * (2 if masked is masked_distribution else 1)
    assert HeldOut(masked, batches)(guide) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="every observation is masked. Cure: rows with observed"):
        HeldOut(masked, [(y, torch.zeros(4).bool())])(guide)


def stopped_early(guide, folder=None, y=TRAIN, epochs=40):
    pyro.clear_param_store()
    return fit(
        model, guide, batches=y.split(10), validation=HELD_OUT.split(4), epochs=epochs, lr=0.05,
        checkpoint=folder, checkpoint_every=3, **QUIET,
    )  # fmt: skip


@pytest.mark.parametrize(("most", "patience"), [(40, 5), (80, 8)])
def test_training_ends_where_held_out_rows_are_likeliest(most, patience):
    """The guide walks from 0 to the mode at 3, past 1, by 0.2 an epoch."""
    result = stopped_early(at_zero(), epochs=most)
    assert result.guide.median()["x"].item() == pytest.approx(1.0, abs=0.11)
    epochs = len(result.losses) / 4
    assert epochs - patience in (4, 5, 6)
    assert f"epoch {epochs - patience:.0f}, the best of {epochs:.0f}" in result.stages[0].outcome
    assert "held-out NLL 0.9" in result.stages[0].outcome  # 0.919 at 1


def test_resumed_it_is_the_same(tmp_path):
    expected = stopped_early(at_zero())
    left = 40  # runs of the model

    class Dying(AutoDelta):
        def forward(self, *args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise SystemExit
            return super().forward(*args, **kwargs)

    dying = Dying(model, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))
    with pytest.raises(SystemExit):
        stopped_early(dying, tmp_path)
    left = -1
    dying = Dying(model, init_loc_fn=init_to_value(values={"x": torch.tensor(0.0)}))
    result = stopped_early(dying, tmp_path)
    assert result.losses == expected.losses and len(expected.losses) > 30
    assert result.guide.median()["x"] == expected.guide.median()["x"]
    assert result.stages[0].outcome == expected.stages[0].outcome


def test_what_is_left_of_an_epoch_counts():
    """A training that ends within its first epoch."""
    held_out = HeldOut(model, [TRAIN])
    guide = at_zero()
    batches = BatchStream(TRAIN.split(1))
    train(
        model, guide, ImplicitELBO(1), batches=batches, held_out=held_out, progress=False,
        schedule=Schedule(num_steps=10, lr=0.1),
    )  # fmt: skip
    assert len(held_out.scores) == 1 and guide.median()["x"] > 0.3
    assert held_out.scores[0] == held_out(guide)


def test_scores_in_intervals_of_steps():
    """The last interval is shorter."""
    held_out = HeldOut(model, [HELD_OUT], interval=4)
    train(
        model, at_zero(), ImplicitELBO(1), TRAIN, held_out=held_out, progress=False,
        schedule=Schedule(num_steps=10, lr=0.01),
    )  # fmt: skip
    assert len(held_out.scores) == 3
    assert "the best held-out score after 10 steps, still rising" == str(held_out)
    again = HeldOut(model, [HELD_OUT], interval=4)
    again.restore(held_out.state())
    assert str(again) == str(held_out)


def test_rows_that_cannot_be_scored_are_never_the_best(monkeypatch):
    scores = [math.nan, 2.0, 3.0]
    monkeypatch.setattr(HeldOut, "_score", lambda self, guide: (scores[len(self.scores)], "cpu", 1))
    held_out, parameter = HeldOut(model, [HELD_OUT]), torch.zeros(())
    for value in scores:
        held_out.judge(at_zero(), {"x": parameter.fill_(value)})
    held_out.take_best({"x": parameter})
    assert held_out.best_epoch == 2 and parameter == 2.0


def test_refused():
    with pytest.raises(ValueError, match="validation is scored after each epoch.*Cure: batches"):
        fit(model, at_zero(), TRAIN, validation=[HELD_OUT], **QUIET)
    with pytest.raises(ValueError, match="belong to single rows. Cure: leave validation out"):
        fit(model, batches=[TRAIN], validation=[HELD_OUT], amortize="auto", **QUIET)
    with pytest.raises(ValueError, match="validation is empty"):
        fit(model, at_zero(), batches=[TRAIN], validation=[], **QUIET)
