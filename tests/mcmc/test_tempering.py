# SPDX-License-Identifier: Apache-2.0
"""Weights of separate modes and the evidence by annealing, against closed forms."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import AutoSemiImplicit, fit
from pyro_implicit.density import Target, find_modes
from pyro_implicit.density.modes import Modes
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc import ChainPolicy, refine
from pyro_implicit.mcmc.driver import run
from pyro_implicit.mcmc.policy import DEFAULT, SlicePolicy, StoppingPolicy, TemperingPolicy
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.mcmc.spaces.space import Space
from pyro_implicit.mcmc.stopping import Drift, Tracker
from pyro_implicit.mcmc.tempering import Cloud, Evaluated, ModeLabels, _settle, temper
from pyro_implicit.ops.annealing import NormalMixture

refine_module = importlib.import_module("pyro_implicit.mcmc.refine")  # not the function

WEIGHTS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
CORNERS = torch.tensor([[-6.0, -6.0], [6.0, -6.0], [-6.0, 6.0], [6.0, 6.0]], dtype=torch.float64)


def normals(loc, scale, weights, log_evidence=0.0):
    """A mixture of normals, whose prior is only the region of the search."""
    dim = loc.shape[-1]

    def model():
        anywhere = dist.Normal(torch.zeros(dim, dtype=loc.dtype), 8.0).to_event(1)
        x = pyro.sample("x", anywhere.mask(False))
        parts = dist.Normal(loc, scale.unsqueeze(-1)).to_event(1).log_prob(x)
        pyro.factor("modes", log_evidence + (weights.log() + parts).logsumexp(-1))

    return model


def four(log_evidence=0.0):
    scale = torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    return normals(CORNERS, scale, WEIGHTS, log_evidence)


def curved():
    """Two curves of weights .7 and .3, each 4 wide and bent down by 5, at 12 and -12."""
    anywhere = dist.Normal(torch.zeros(2), 8.0).to_event(1)
    x = pyro.sample("x", anywhere.mask(False))
    along = dist.Normal(0.0, 2.0).log_prob(x[0])
    middle = 12 - 0.3 * x[0] ** 2
    across = [dist.Normal(sign * middle, 0.5).log_prob(x[1]) for sign in (1, -1)]
    weighted = [math.log(weight) + part for weight, part in zip((0.7, 0.3), across, strict=True)]
    pyro.factor("curves", along + torch.stack(weighted).logsumexp(0))


def quick(model, **options):
    options = {"guide": AutoNormal(model), "seed": 0, "progress": False} | options
    return refine(model, options.pop("guide"), temper=True, **options)


@pytest.fixture(autouse=True)
def _no_values():
    pyro.clear_param_store()


def test_four_modes_and_the_evidence():
    result = quick(four(log_evidence=-50.0))
    assert result.stopped == "converged" and result.modes_weighed
    torch.testing.assert_close(result.weights.weights, WEIGHTS, rtol=0, atol=0.01)
    errors = (result.weights.weights - WEIGHTS).abs() / result.weights.errors
    assert errors.max() < 4 and result.weights.errors.max() < 0.004
    assert abs(result.weights.log_evidence + 50) < 4 * result.weights.log_evidence_error < 0.1
    draws = result.get_samples()["x"]
    shares = torch.cdist(draws, CORNERS).argmin(-1).bincount(minlength=4) / len(draws)
    torch.testing.assert_close(shares.double(), WEIGHTS, rtol=0, atol=0.02)
    mean, sd = WEIGHTS @ CORNERS, draws[(draws < 0).all(-1)].std(0)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.4)  # 4 errors
    torch.testing.assert_close(sd, torch.ones(2).double(), rtol=0, atol=0.1)
    assert "0.400" in str(result) or "0.39" in str(result) or "0.40" in str(result)


def test_fit_anneals_modes_that_weights_cannot_correct():
    result = fit(curved, "auto", seed=0, progress=False)
    names = [stage.name for stage in result.stages]
    assert names == ["search", "gaussian", "choose", "correct", "refine"] and not result.losses
    found = result.diagnose()
    assert found.verdict == "trust", found
    refined = result.refined
    assert refined.stopped == "converged"
    assert DEFAULT.tempering.num_chains == refined.num_chains
    assert refined.weights.weights.tolist() == pytest.approx([0.7, 0.3], abs=0.012)
    assert refined.weights.log_evidence == pytest.approx(0.0, abs=0.04)
    x = refined.get_samples()["x"]
    bent = torch.stack([x[:, 1], -x[:, 1]]) + 0.3 * x[:, 0] ** 2  # 12 on one of the two curves
    bent = bent.gather(0, (bent - 12).abs().argmin(0, keepdim=True))[0]
    assert bent.mean().item() == pytest.approx(12.0, abs=0.05)
    assert bent.std().item() == pytest.approx(0.5, abs=0.05)
    assert x[:, 0].std().item() == pytest.approx(2.0, abs=0.15)


def test_an_asymmetric_pair_in_many_dimensions():
    dim = 50
    loc = torch.zeros(2, dim)
    loc[:, 0] = torch.tensor([-10.0, 10.0])
    model = normals(loc, torch.ones(2), torch.tensor([0.9, 0.1]))
    result = quick(model, guide=AutoSemiImplicit(model))
    found = result.weights
    assert abs(found.weights[0] - 0.9) < max(0.01, 4 * found.errors[0]) <= 0.016
    assert abs(found.log_evidence) < 4 * found.log_evidence_error < 0.1
    draws = result.get_samples()["x"]
    assert (draws[:, 0] < 0).double().mean() == pytest.approx(0.9, abs=0.016)
    assert draws[:, 1:].std(0).mean().item() == pytest.approx(1.0, abs=0.03)


def temper_from(model, modes, **policy):
    target = Target(model)
    space = Space(target)
    sampler = Sampler(target, {"x": torch.zeros(1, target.latent_dim).to(target.init_loc)})
    settings = ChainPolicy(tempering=TemperingPolicy(**policy))
    plan = ChainSetup(sampler, 1024, 2000, policy=settings)
    return temper(space, modes, Tracker(target, None), plan)


def test_a_mode_that_the_search_missed_is_found_from_the_prior():
    modes = find_modes(Target(four()))
    some = Modes(*(part[:3] for part in modes))
    found = temper_from(four(), some)
    assert found.weights.log_evidence == pytest.approx(0.0, abs=0.05)
    x = found.draws.flatten(0, 1)
    shares = torch.cdist(x, CORNERS).argmin(-1).bincount(minlength=4) / len(x)
    torch.testing.assert_close(shares.double(), WEIGHTS, rtol=0, atol=0.03)


def test_the_policy_sets_the_width_of_labels():
    """``test_seeds_repeat_and_quantities_decide`` has equal draws for equal settings."""
    modes, draws = find_modes(Target(four()), starts=CORNERS), []
    for width in (2.0, 1.0):
        torch.manual_seed(0)
        policy = {"num_particles": 64, "share": 0.5, "max_error": 1.0, "label_width": width}
        draws.append(temper_from(four(), modes, **policy).draws)
    assert not torch.equal(*draws)


def test_errors_are_those_of_repetitions():
    """Of one cloud of 256 particles after the first, so that errors are large."""
    modes, z, errors = find_modes(Target(four()), starts=CORNERS), [], []
    for _ in range(12):
        found = temper_from(four(), modes, num_particles=256, max_error=1.0)
        first = found.weights
        z.append((first.weights - WEIGHTS) / first.errors)
        errors.append(first.log_evidence / first.log_evidence_error)
    # The mean of 48 squares, each of mean 1, which are dependent in fours.
    assert 0.4 < torch.stack(z).square().mean() < 2.2
    assert 0.2 < torch.tensor(errors).square().mean() < 2.8


@pytest.mark.parametrize(("dim", "gap"), [(2, 7.0), (30, 16.0)])
def test_parts_of_one_mode_are_joined_and_separate_modes_are_not(dim, gap):
    """Two normals describe halves of the first mode, one the second, and one has no points.

    In 30 dimensions, lines between points of modes that are 7 sds apart may show no dip.
    """
    places = [-0.7, 0.7, gap, 50.0]
    loc = torch.zeros(4, dim)
    loc[:, 0] = torch.tensor(places)
    model = normals(loc[[0, 2]] * (loc[[0, 2]] > 0), torch.ones(2), torch.tensor([0.8, 0.2]))
    points = torch.randn(1000, dim)
    points[800:, 0] += gap
    eye = torch.eye(dim).expand(4, dim, dim)
    labels = ModeLabels(NormalMixture.of(torch.zeros(4), loc, eye), torch.arange(4))
    labels.join(Space(Target(model)), points)
    first, second, other, empty = labels.group.tolist()
    assert first == second and first != other and empty == other


def test_seeds_repeat_and_quantities_decide():
    model, tempering = four(), TemperingPolicy(num_particles=64, share=0.5, max_error=1.0)
    policy = ChainPolicy(tempering=tempering)
    options = {"guide": {"x": CORNERS}, "seed": 3, "policy": policy}
    first, again = (quick(model, **options) for _ in range(2))
    assert torch.equal(first.get_samples()["x"], again.get_samples()["x"])
    with pytest.raises(ValueError, match="quantities gave"):
        quick(model, guide={"x": CORNERS}, quantities=lambda draws: draws["x"].mean())


def test_a_budget_ends_it_and_the_verdict_says_so():
    stopping = StoppingPolicy(max_error=1e-6, max_usable_error=1e-6)
    policy = ChainPolicy(stopping=stopping)
    result = quick(four(), max_gradients=60, policy=policy)
    assert result.stopped == "max_gradients" and not result.settled
    result = quick(four(), max_seconds=0.01, policy=policy)
    assert result.stopped == "max_seconds"
    with pytest.raises(ValueError, match="cannot continue"):
        result.refine_more()


def test_unknown_weights_are_no_known_weights():
    strict = ChainPolicy(stopping=StoppingPolicy(max_weight_error=1e-9))
    assert not quick(four(), policy=strict).modes_weighed


@pytest.mark.parametrize("option", [{"kernel": "mclmc"}, {"frame": "full"}, {"checkpoint": "x"}])
def test_options_that_it_does_not_have(option):
    with pytest.raises(ValueError, match="temper=True has a kernel and frames of its own"):
        quick(four(), **option)


def test_too_many_latents_are_refused():
    def wide():
        pyro.sample("x", dist.Normal(torch.zeros(101), 1.0).to_event(1))

    with pytest.raises(ValueError, match="at most 100 latent variables, but the model has 101"):
        quick(wide)


def steps():
    """The probabilities of the 20 parts of an interval fall by exp(-4) from one to the next."""
    x = pyro.sample("x", dist.Uniform(0.0, 20.0))
    pyro.factor("steps", -4.0 * (x.floor() - 10.0).abs())


def walk_apart():
    pyro.set_rng_seed(0)
    target, draws = Target(steps), {"x": torch.linspace(0.5, 19.5, 256)}
    policy = replace(
        DEFAULT, stopping=StoppingPolicy(stuck_gradients=300), slice=SlicePolicy(max_dim=0)
    )
    sampler = Sampler(target, draws)
    return refine_target(ChainSetup(sampler, 256, 2000, policy=policy, anneals_apart=True))


def test_slices_cross_steps_without_annealing():
    sampler = Sampler(Target(steps), {"x": torch.linspace(0.5, 19.5, 256)})
    found = refine_target(ChainSetup(sampler, 256, 6000, anneals_apart=True))
    assert found.kernel == "slice" and found.settled and not found.modes_weighed
    x = found.get_samples()["x"]
    shares = torch.tensor([(x.floor() == part).double().mean() for part in (9.0, 10.0, 11.0)])
    weights = torch.exp(-4.0 * torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(shares.float(), weights / weights.sum(), rtol=0, atol=0.015)


def test_chains_that_stay_apart_are_annealed(monkeypatch):
    """No gradient leads to the middle, where exp(-4) and less lies in the next parts.

    The chains end before their budget of 2,000 gradients.
    """
    seen = []

    def noting(chains, file):
        run(chains, file)
        seen.append(chains.gradients)

    monkeypatch.setattr(refine_module, "run", noting)
    found = walk_apart()
    assert len(seen) == 1 and seen[0] < 2000
    assert found.modes_weighed and found.settled and found.drift.is_annealed
    x = found.get_samples()["x"]
    shares = torch.tensor([(x.floor() == part).double().mean() for part in (9.0, 10.0, 11.0)])
    weights = torch.exp(-4.0 * torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(shares.float(), weights / weights.sum(), rtol=0, atol=0.015)


def test_chains_go_on_if_annealing_is_no_better(monkeypatch):
    def fails(*args):
        raise ValueError("no modes")

    monkeypatch.setattr(refine_module, "temper_modes", fails)
    found = walk_apart()
    assert not found.modes_weighed and not found.settled
    assert found.stopped == "max_gradients" and found.num_gradients >= 2000
    assert found.drift.r_hat > StoppingPolicy().stuck_r_hat
    assert not found.chains.ends_apart


@pytest.mark.parametrize(
    ("r_hat", "lower", "is_better"), [(1.1, 2.0, True), (2.0, 0.0, False), (1.1, 4.0, False)]
)
def test_annealed_draws_that_replace_chains(r_hat, lower, is_better):
    """They have small errors, and reach a log-density within 3 nats of the chains'."""

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    annealed = SimpleNamespace(
        drift=Drift(0.0, 0.0, r_hat),
        get_samples=lambda: {"x": torch.full((9,), math.sqrt(2 * lower))},
        num_draws=3,
    )
    found = refine_module._better_than(torch.zeros(3, 1), annealed, Target(model), DEFAULT)
    assert found is (annealed if is_better else None)


def test_particles_without_weight_have_no_part_in_the_drift():
    target, number = Target(lambda: pyro.sample("x", dist.Normal(0.0, 1.0))), torch.arange(8)
    here = Evaluated(torch.randn(8, 1), torch.randn(8), torch.zeros(8, 1))
    weights = torch.zeros(8, dtype=torch.float64)
    track, stratum = Tracker(target, None), torch.zeros(8, dtype=torch.long)
    weights[0] = here.log_density[0] = -math.inf
    found = Cloud(here, weights, number, stratum).drift(track, 64, StoppingPolicy())
    here.log_density[0] = 0.0
    assert found == Cloud(here, weights, number, stratum).drift(track, 64, StoppingPolicy())
    assert math.isfinite(found.mean)


def test_lost_particles_end_annealing() -> None:
    points = torch.zeros(4, 1)
    here = Evaluated(points, torch.zeros(4), points)
    cloud = Cloud(here, torch.zeros(4).double(), torch.arange(4), torch.zeros(4))
    ratio = torch.tensor([math.nan, math.inf, 1.0, 2.0]).double()
    assert cloud.reweighted(ratio, 0.0, 0.5) > 0 and cloud.shares[:2].equal(torch.zeros(2).double())
    with pytest.raises(ValueError, match="lost all particles.*Cure: a model that is exact there"):
        cloud.reweighted(torch.full((4,), math.nan).double(), 0.5, 0.5)


@dataclass
class Growing:
    """Walkers that raise the sds of points by a tenth until these are 1."""

    num_moves: int = 0

    def moved(self, space, here):
        self.num_moves += 1
        factor = (1 / here.points.std(0)).clamp(max=1.1)
        return self, here._replace(points=factor * here.points)


@pytest.mark.parametrize(("start", "num_moves"), [(1.0, 16), (0.5, 32), (1e-6, 128)])
def test_particles_move_until_their_spread_is_still(start, num_moves):
    points = start * torch.randn(200, 2)
    modes = NormalMixture.of(torch.zeros(1), torch.zeros(1, 2), torch.eye(2).unsqueeze(0))
    here = Evaluated(points, points[:, 0], points)
    walkers, pool = _settle(None, Growing(), here, modes, DEFAULT.tempering)
    assert walkers.num_moves == num_moves
    assert len(pool) == 200 * (num_moves // 4)  # the second half of the last block
    if num_moves < 128:
        torch.testing.assert_close(pool.std(0), torch.ones(2), rtol=0.02, atol=0)
