# SPDX-License-Identifier: Apache-2.0
"""The frame of a guide: what is trained moves in its units, what is saved comes back."""

from __future__ import annotations

import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_implicit import (
    GPVI_ELBO,
    LIVI_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    InjectiveELBO,
)
from pyro_implicit.density import Target, find_modes
from pyro_implicit.fitting.parameters import guide_parameters
from pyro_implicit.guides import Frame

both = pytest.mark.parametrize("make_guide", [AutoImplicit, AutoSemiImplicit])
LOC = torch.tensor([1900.0, -0.5])
FACTOR = torch.tensor([[30.0, 0.0], [-2e-3, 1e-4]])
FRAMES = {"diagonal": Frame(LOC, scale=FACTOR.diag().abs()), "full": Frame(LOC, scale_tril=FACTOR)}
frames = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)


def pair():
    pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def in_units(frame, draws):
    factor = frame.scale.diag() if frame.scale_tril is None else frame.scale_tril
    return torch.linalg.solve_triangular(factor, (draws - frame.loc).T, upper=False).T


@both
@frames
def test_a_guide_starts_at_the_frame(make_guide, frame):
    guide = make_guide(pair, frame=frame)
    draws = guide.sample_posterior(20_000)["x"]
    units = in_units(frame, draws)
    torch.testing.assert_close(units.mean(0), torch.zeros(2), atol=0.03, rtol=0)
    torch.testing.assert_close(units.T.cov(), torch.eye(2), atol=0.04, rtol=0)
    assert (guide.loc == 0).all() and (guide.scale == 1).all()


@frames
def test_loc_and_scale_are_in_units_of_the_frame(frame):
    torch.set_default_dtype(torch.float64)
    frame = Frame(*(value if value is None else value.double() for value in frame))
    guide = AutoImplicit(pair, lambda size: nn.Identity(), 2, frame=frame)
    guide()
    guide.loc.data = torch.tensor([0.5, -2.0])
    guide.scale = torch.tensor([0.1, 3.0])
    units = in_units(frame, guide.sample_posterior(20_000)["x"])
    torch.testing.assert_close(
        (units.mean(0) - guide.loc) / guide.scale, torch.zeros(2), atol=0.03, rtol=0
    )
    torch.testing.assert_close(units.std(0), guide.scale.detach(), rtol=0.02, atol=0)


def test_one_step_from_the_right_gaussian_stays_there():
    """A straight line on an uncentred year: given the other, each latent is known to 1e-5."""
    torch.set_default_dtype(torch.float64)
    x = torch.arange(1952.0, 2014.0)
    y = -20 + 0.01 * x + 1.1 * torch.randn(62)

    def line():
        a, b = (pyro.sample(name, dist.Normal(0.0, 100.0)) for name in "ab")
        sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
        pyro.sample("y", dist.Normal(a + b * x, sigma).to_event(1), obs=y)

    modes = find_modes(Target(line))
    frame = Frame(modes.loc[0], scale_tril=modes.scale_tril[0])
    guide = AutoImplicit(line, AutoregressiveGenerator, frame=frame)
    exact = InjectiveELBO(1000)
    svi = SVI(line, guide, Adam({"lr": 0.01}), InjectiveELBO(64, compile="trace"))
    before = exact.loss(line, guide)
    svi.step()
    assert exact.loss(line, guide) < before + 0.1
    for _ in range(300):
        svi.step()
    assert exact.loss(line, guide) < before


@both
@frames
@pytest.mark.parametrize("way", ["state_dict", "whole", "store"])
def test_the_frame_is_saved_and_never_trained(make_guide, frame, way, tmp_path):
    guide = make_guide(pair, frame=frame)
    elbo = LIVI_ELBO(2) if make_guide is AutoSemiImplicit else GPVI_ELBO(2)
    SVI(pair, guide, Adam({"lr": 0.1}), elbo).step()
    for name, value in frame._asdict().items():
        kept = getattr(guide, f"frame_{name}")
        assert kept is None if value is None else torch.equal(kept, value)
    assert (guide.loc != 0).all()
    other = Frame(*(value if value is None else 2 * value for value in frame))
    fresh = make_guide(pair, frame=other)
    if way == "store":
        pyro.get_param_store().save(tmp_path / "store.pt")
        pyro.clear_param_store()
        pyro.get_param_store().load(tmp_path / "store.pt")
        fresh()
    else:
        content = io.BytesIO()
        torch.save(guide if way == "whole" else guide.state_dict(), content)
        pyro.clear_param_store()
        content.seek(0)
        loaded = torch.load(content, weights_only=way != "whole")
        if way == "whole":
            fresh = loaded
        else:
            fresh()
            fresh.load_state_dict(loaded)
    pyro.set_rng_seed(1)
    expected = guide.sample_posterior(3)["x"]
    pyro.set_rng_seed(1)
    torch.testing.assert_close(fresh.sample_posterior(3)["x"], expected, rtol=0, atol=0)


def test_what_was_given_is_copied():
    loc, scale = torch.zeros(2), torch.ones(2)
    guide = AutoImplicit(pair, frame=Frame(loc, scale))
    guide()
    loc += 1.0
    scale += 1.0
    assert (guide.frame_loc == 0).all() and (guide.frame_scale == 1).all()


@both
@pytest.mark.parametrize("frame", [Frame(LOC, torch.tensor([2.0, 0.5])), Frame(LOC, None, FACTOR)])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_nothing_trains_a_frame(make_guide, frame, is_loaded):
    guide = make_guide(pair, frame=frame)
    guide()
    if is_loaded:
        state = guide.state_dict()
        pyro.clear_param_store()
        guide = make_guide(pair, frame=None)
        guide()
        guide.load_state_dict(state)
        guide()
    before = {name: one.detach().clone() for name, one in guide.named_parameters()}
    sum((one - 3.0).square().sum() for one in guide.parameters()).backward()
    torch.optim.AdamW(guide.parameters(), weight_decay=0.5).step()
    moved = {name for name, one in guide.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if not name.startswith("frame_")} != before.keys()


@both
@pytest.mark.parametrize("base", [AutoNormal, AutoMultivariateNormal])
def test_a_frame_and_the_guide_it_was_taken_from_are_the_same(make_guide, base):
    gaussian = base(pair)
    gaussian()
    if base is AutoNormal:
        scale, factor = torch.tensor([2.0, 0.5]), None
        gaussian.locs.x.data, gaussian.scales.x = LOC, scale
    else:
        gaussian.loc.data, scale, factor = LOC, None, FACTOR.abs()
        gaussian.scale = factor.diag()
        gaussian.scale_tril = factor / factor.diag()[:, None]
    draws = []
    for frame in (gaussian, Frame(LOC, scale, factor)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        draws.append(make_guide(pair, frame=frame).sample_posterior(3)["x"])
    torch.testing.assert_close(*draws)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(torch.zeros(3), torch.ones(3)), r"loc has shape \(3,\), but the model has 2"),
        (Frame(torch.zeros(2)), "either scale or scale_tril.*Cure"),
        (Frame(torch.zeros(2), torch.ones(2), torch.eye(2)), "either scale or scale_tril.*Cure"),
        (
            Frame(torch.zeros(2), torch.ones(3)),
            r"scale has shape \(3,\), but must have shape \(2,\)",
        ),
        (Frame(torch.zeros(2), scale_tril=torch.ones(2)), r"scale_tril has shape .* \(2, 2\)"),
        (Frame(torch.zeros(2), scale_tril=torch.ones(2, 2)), "lower triangular.*Cure"),
        (Frame(torch.zeros(2), torch.tensor([1.0, 0.0])), "positive"),
        (Frame(torch.zeros(2), scale_tril=-torch.eye(2)), "positive diagonal.*Cure"),
        (Frame(torch.tensor([0.0, torch.nan]), torch.ones(2)), "not finite.*Cure"),
        (Frame(torch.zeros(2), torch.tensor([1.0, torch.inf])), "not finite.*Cure"),
    ],
)
def test_bad_frames(frame, message):
    with pytest.raises(ValueError, match=message):
        AutoImplicit(pair, frame=frame)()


def test_neither_frame_nor_guide():
    with pytest.raises(TypeError, match="a Gaussian autoguide, a Frame.*but got.*AutoNormal"):
        AutoImplicit(pair, frame=AutoNormal)()


def test_a_function_around_a_guide_keeps_the_frame():
    guide = AutoImplicit(pair, frame=Frame(LOC, None, FACTOR))
    names = {name.rpartition(".")[2] for name in guide_parameters(lambda: guide())}
    assert {"loc", "frame_loc", "frame_scale_tril"} <= names
