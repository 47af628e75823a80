# SPDX-License-Identifier: Apache-2.0
"""``fit(amortize="conditional")`` against exact marginal posteriors."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import distributed

from pyro_implicit import diagnose, fit
from pyro_implicit.density.groups import Groups
from pyro_implicit.density.marginal_target import MarginalTarget
from pyro_implicit.density.modes import Modes
from pyro_implicit.fitting import BudgetPolicy, Fit, FitPolicy, passes
from pyro_implicit.fitting.hierarchy import _choose_rule
from pyro_implicit.fitting.passes import PassStages, _log_weights, _moved
from pyro_implicit.fitting.policy import HierarchyPolicy
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides import AutoHierarchical
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.matrices import lower_factor
from pyro_implicit.ops.quadrature import NormalRule
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import seeded
from tests.two_processes import in_two_processes

NUM_GROUPS = 2000
QUICK = FitPolicy(
    hierarchy=HierarchyPolicy(
        num_pilot=25,
        num_starts=1,
        search_rounds=1,
        search_iterations=1,  # the passes go on
        near_normal=0.9,
        cheap_evaluations=0,
        weighed_per_dim=64,
    )
)


def counts(y, num_groups=NUM_GROUPS):
    shape = pyro.sample("shape", dist.LogNormal(y.new_zeros(()), 1.0))
    rate = pyro.sample("rate", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("groups", num_groups, subsample_size=len(y)):
        z = pyro.sample("z", dist.Gamma(shape, rate))
        pyro.sample("y", dist.Poisson(z).mask(y >= 0), obs=y.clamp(min=0))


def data():
    with seeded(3):
        return torch.poisson(dist.Gamma(2.0, 0.5).sample((NUM_GROUPS,)))


def schools(y, sd):
    """Few groups: the posterior of the scale is far from normal."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 10.0))
    scale = pyro.sample("scale", dist.HalfCauchy(y.new_ones(()) * 5.0))
    with pyro.plate("groups", 8, subsample_size=len(y)):
        z = pyro.sample("z", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(z, sd), obs=y)


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def moments_on_grid(log_prob, ranges, size=400):
    """Means and sds of exp(u) under a density on a grid, each (2,)."""
    axes = [torch.linspace(*one, size, dtype=torch.float64) for one in ranges]
    points = torch.cartesian_prod(*axes)
    weights = log_prob(points).softmax(0)
    mean = weights @ points.exp()
    return mean, (weights @ (points.exp() - mean).square()).sqrt(), points, weights


def counts_log_prob(y):
    values, numbers = y.double().unique(return_counts=True)

    def log_prob(point):
        shape, rate = point.exp().unsqueeze(-1).unbind(1)
        rows = dist.NegativeBinomial(shape, 1 / (1 + rate)).log_prob(values)
        return (rows * numbers).sum(-1) - 0.5 * point.square().sum(-1)

    return log_prob


@pytest.fixture(scope="module")
def fitted():
    few_starts = HierarchyPolicy(num_pilot=100, num_starts=2, search_rounds=1)  # of one mode
    return fit(
        counts, batches=[(y,) for y in data().split(700)], amortize="conditional", seed=0,
        policy=FitPolicy(hierarchy=few_starts), progress=False,
    )  # fmt: skip


def fit_quickly(rank=None):
    """Fit 100 groups, or every second of four minibatches, and return the draws."""
    parts = data()[:100].split(25)
    mine = parts if rank is None else parts[rank::2]
    result = fit(
        lambda y: counts(y, 100), batches=[(y,) for y in mine], amortize="conditional",
        seed=1 if rank is None else None, policy=QUICK, progress=False,
    )  # fmt: skip
    return result.guide.rest.samples


@pytest.fixture(scope="module")
def quick_draws():
    return fit_quickly()


def test_gamma_poisson_against_the_exact_posterior(fitted):
    mean, sd, *_ = moments_on_grid(counts_log_prob(data()), [(0.3, 1.1), (-1.1, -0.3)])
    assert [stage.name for stage in fitted.stages] == ["search", "marginal", "correct"]
    assert isinstance(fitted.guide, AutoHierarchical) and fitted.minibatches
    draws = fitted.sample(8192)
    assert draws.keys() == {"shape", "rate"}
    for name, one, width in zip(("shape", "rate"), mean, sd, strict=True):
        assert draws[name].mean().item() == pytest.approx(one.item(), abs=0.05 * width.item())
        assert draws[name].std().item() == pytest.approx(width.item(), rel=0.02)
    few = fitted.sample(256)  # evenly spaced points of a Sobol sequence would lie in one corner
    for name, one, width in zip(("shape", "rate"), mean, sd, strict=True):
        assert few[name].mean().item() == pytest.approx(one.item(), abs=0.25 * width.item())
        assert few[name].std().item() == pytest.approx(width.item(), rel=0.2)


def test_cheap_weights_replace_even_ones_of_skewed_posteriors():
    """With 50 groups, 32 even weights give standard deviations up to 8% too small."""
    y = data()[:50]
    mean, sd, *_ = moments_on_grid(counts_log_prob(y), [(-1.5, 3.5), (-3.0, 2.5)])
    policy = replace(QUICK.hierarchy, cheap_evaluations=1.5e7, weighed_per_dim=16)
    result = fit(
        lambda y: counts(y, 50), batches=[(y,)], amortize="conditional", seed=0,
        policy=FitPolicy(hierarchy=policy), progress=False,
    )  # fmt: skip
    assert result.stages[-1].outcome.startswith("8192 weights")
    for name, one, width in zip(("shape", "rate"), mean, sd, strict=True):
        draws = result.guide.rest.samples[name]
        assert draws.mean().item() == pytest.approx(one.item(), abs=0.04 * width.item())
        assert draws.std().item() == pytest.approx(width.item(), rel=0.03)


def test_points_are_mirrored_pairs_that_seeds_scramble():
    modes = Modes(torch.zeros(1, 2), torch.eye(2).unsqueeze(0), torch.zeros(1))
    torch.manual_seed(0)
    first, second = passes._sobol(modes, 64)[0], passes._sobol(modes, 64)[0]
    assert not torch.isclose(first, second).any()
    torch.testing.assert_close(first[::2], -first[1::2])


def test_diagnose_takes_its_draws_as_they_are(fitted):
    rows = data()[:100]
    options = {"num_samples": 200, "num_transitions": 0, "modes": None}
    found = diagnose(lambda y: counts(y, 100), fitted.guide, rows, **options)
    assert found.no_density == "stored draws" and "refine" in found.cures[0]
    assert "event_dim" not in str(found)


def test_locals_of_new_groups_and_of_groups_without_data(fitted):
    draws = fitted.sample(4000, torch.tensor([4.0, -1.0]))
    shape, rate, z = draws["shape"], draws["rate"], draws["z"]
    assert z.shape == (4000, 2)
    given, prior = (shape + 4) / (rate + 1), shape / rate
    error = (given / (rate + 1)).sqrt().mean().item() / 4000**0.5
    assert z[:, 0].mean().item() == pytest.approx(given.mean().item(), abs=4 * error)
    error = (prior / rate).sqrt().mean().item() / 4000**0.5
    assert z[:, 1].mean().item() == pytest.approx(prior.mean().item(), abs=4 * error)
    predictive = Predictive(counts, guide=fitted.guide, num_samples=3)
    assert predictive(torch.zeros(5))["z"].shape == (3, 5)


def test_the_same_seed_repeats_the_result_and_files_keep_it(fitted, quick_draws, tmp_path):
    torch.manual_seed(99)  # another place in the random stream than that of the fixture
    outside = torch.get_rng_state()
    again = fit_quickly()
    assert torch.equal(outside, torch.get_rng_state())
    assert torch.equal(quick_draws["rate"], again["rate"])
    fitted.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", counts)
    new = torch.zeros(3)
    with seeded(0):
        first = fitted.sample(7, new)["z"]
    with seeded(0):
        assert torch.equal(first, loaded.sample(7, new)["z"])


def test_draws_are_moved_to_the_weighted_moments():
    """Of the points themselves the result has mean and covariance of the weighted points."""
    points = torch.randn(500, 2, dtype=torch.float64)
    weights = (points @ torch.tensor([0.8, -0.3]).double()).softmax(0)
    moved = _moved(points, points, weights)
    mean = weights @ points
    covariance = torch.einsum("n,ni,nj->ij", weights, points - mean, points - mean)
    torch.testing.assert_close(moved.mean(0), mean)
    torch.testing.assert_close((moved - mean).mT @ (moved - mean) / 500, covariance)


def test_the_error_of_a_pilot_grows_with_the_root_of_the_number_of_groups():
    y, shifts = data()[:40], []
    policy = FitPolicy(hierarchy=HierarchyPolicy(num_nodes=(5, 9), max_shift=0.0))
    modes = Modes(torch.tensor([[0.7, -0.7]]), torch.eye(2).unsqueeze(0), torch.zeros(1))
    for size in (40, 4000):
        groups = Groups(lambda y, size=size: counts(y, size), (y,))
        pilot = MarginalTarget(groups, [(y,)], NormalRule(5), has_all=False)
        shifts.append(_choose_rule(pilot, modes, SimpleNamespace(policy=policy))[1])
    assert shifts[1] == pytest.approx(10 * shifts[0], rel=1e-3) and shifts[0] > 0


@pytest.mark.usefixtures("double")
def test_the_error_of_random_nodes_is_that_of_the_exact_density():
    """Of counts with four latents each; of normal data the smallest rule is exact."""

    def counts_of_four(y, is_normal=False):
        shape, rate = (pyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("shape", "rate"))
        prior = dist.Gamma(shape * torch.arange(1.0, 5.0), rate).to_event(1)
        with pyro.plate("groups", len(y)):
            if is_normal:
                prior = dist.Normal(shape.unsqueeze(-1), rate.unsqueeze(-1)).expand([4]).to_event(1)
            z = pyro.sample("z", prior)
            fn = dist.Normal(z, 1.0) if is_normal else dist.Poisson(z)
            pyro.sample("y", fn.to_event(1), obs=y)

    with seeded(0):
        y = dist.Poisson(dist.Gamma(2.0 * torch.arange(1.0, 5.0), 0.8).sample((100,))).sample()
    at = torch.tensor([0.7, -0.2], requires_grad=True)
    shape, rate = at.exp()
    exact = dist.NegativeBinomial(shape * torch.arange(1.0, 5.0), 1 / (1 + rate)).log_prob(y).sum()
    (score,) = torch.autograd.grad(exact - 0.5 * at.square().sum(), at, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(part, at, retain_graph=True)[0] for part in score])
    root = lower_factor(torch.linalg.cholesky(torch.linalg.inv(-hessian)))
    modes = Modes(at.detach().unsqueeze(0), root.unsqueeze(0), torch.zeros(1))

    policy = FitPolicy(hierarchy=HierarchyPolicy(num_nodes=(9, 25)))
    stages = SimpleNamespace(policy=policy)
    pilot = MarginalTarget(Groups(counts_of_four, (y,)), [(y,)])
    rule, estimate = _choose_rule(pilot, modes, stages)
    others = [pilot.with_rule(rule._replace(seed=seed)) for seed in range(8)]
    found = torch.cat([other.score(at.detach().unsqueeze(0))[1] for other in others])
    error = ((found - score) @ root).square().sum(-1).mean().sqrt().item()
    assert rule.scale > 1
    assert 0.5 * estimate < 2**0.5 * error < 2 * estimate < 1

    def normal(y):
        counts_of_four(y, is_normal=True)

    rule, estimate = _choose_rule(MarginalTarget(Groups(normal, (y,)), [(y,)]), modes, stages)
    assert rule == NormalRule(9) and estimate < 1e-6


def test_modes_far_below_the_best_are_dropped():
    def model(y):
        theta = pyro.sample("theta", dist.Normal(2.0, 0.5))
        with pyro.plate("groups", 3, subsample_size=len(y)):
            z = pyro.sample("z", dist.Normal(theta**2, 0.5))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    y = torch.full((3,), 4.0)
    target = MarginalTarget(Groups(model, (y,)), [(y,)])
    modes = Modes(torch.tensor([[1.9], [-1.9]]), torch.ones(2, 1, 1), torch.zeros(2))
    stages = SimpleNamespace(limit=TimeLimit(None))
    found = PassStages(stages, target, HierarchyPolicy(), "x").climb_all(modes)
    assert found.loc.shape == (1, 1) and found.loc.item() == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_chains_of_the_global_variables_that_fail_or_are_interrupted(is_interrupted, monkeypatch):
    def refine_target(plan):
        if not is_interrupted:
            raise RuntimeError("no chains")
        draws = plan.sampler.target.constrain(plan.sampler.draw(50))
        known = {"stopped": "interrupted", "settled": False, "drift": None, "num_gradients": 9}
        return SimpleNamespace(get_samples=lambda: draws, **known)

    monkeypatch.setattr(passes, "refine_target", refine_target)
    quick = {
        "num_starts": 1,
        "search_rounds": 1,
        "search_iterations": 1,
        "num_weighed": 32,
        "num_samples": 32,
    }
    policy = FitPolicy(hierarchy=HierarchyPolicy(max_khat=-1.0, **quick))  # weights never suffice
    options = {"amortize": "conditional", "seed": 0, "progress": False, "policy": policy}
    expected = contextlib.nullcontext()
    if not is_interrupted:
        expected = pytest.warns(UserWarning, match="did not refine its draws: RuntimeError: no ch")
    with expected:
        result = fit(schools, batches=[(EFFECTS, ERRORS)], **options)
    outcome = "interrupted after 9 gradients" if is_interrupted else "failed: RuntimeError"
    assert result.stages[-1].outcome.startswith(outcome)
    assert result.interrupted is is_interrupted
    assert result.sample(5)["mean"].shape == (5,)


@pytest.mark.parametrize(("drift", "is_small"), [(0.05, True), (0.3, False)])
def test_chains_that_a_budget_ended_warn_if_their_errors_are_large(drift, is_small, monkeypatch):
    chains = SimpleNamespace(stopped="max_gradients", settled=False, num_gradients=9)
    chains.drift = Drift(drift, drift, 1.02)
    monkeypatch.setattr(passes, "refine_target", lambda plan: chains)
    target = MarginalTarget(Groups(schools, (EFFECTS, ERRORS)), [(EFFECTS, ERRORS)])
    stages = Stages(schools, (), {}, 1, lr=0.1, num_particles=1, limit=TimeLimit(None))
    draws = torch.tensor([5.0, 1.0]) + torch.randn(50, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = PassStages(stages, target, HierarchyPolicy(), "x").refine(draws, LogWeights(draws))
    assert found is chains
    outcome = stages.result.stages[-1].outcome
    assert outcome.startswith("max_gradients after 9 gradients; means may be off by")
    assert ("within the limits" in outcome) == is_small
    assert any("stopped at max_gradients" in str(one.message) for one in caught) != is_small


@pytest.mark.parametrize("by_chains", [False, True])
def test_a_skewed_posterior_of_eight_groups(by_chains):
    policy, options = FitPolicy(), {"amortize": "conditional", "seed": 0, "progress": False}
    if by_chains:
        budget = BudgetPolicy(
            most_chains=32, least_gradients=50, most_gradients=50, patient_seconds=0.0
        )
        few = HierarchyPolicy(max_khat=-1.0, num_starts=2, search_rounds=1, num_samples=64)
        policy = FitPolicy(hierarchy=few, budget=budget)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "chains of the global variables stopped at max_gradients")
        result = fit(schools, batches=[(EFFECTS, ERRORS)], policy=policy, **options)
    assert [stage.name for stage in result.stages][-1] == ("refine" if by_chains else "correct")
    assert result.stages[-1].error is None

    def log_prob(point):
        mean, log_scale = point.unbind(-1)
        scale = log_scale.exp()
        rows = dist.Normal(mean[:, None], (scale[:, None] ** 2 + ERRORS.double() ** 2).sqrt())
        prior = dist.Normal(0.0, 10.0).log_prob(mean) + dist.HalfCauchy(5.0).log_prob(scale)
        return rows.log_prob(EFFECTS.double()).sum(-1) + prior + log_scale

    axes = torch.linspace(-25, 35, 400).double(), torch.linspace(-8, 6, 400).double()
    points = torch.cartesian_prod(*axes)
    weights = log_prob(points).softmax(0)
    draws, error = result.sample(8192), 0.3 if by_chains else 0.05
    for column, draw in enumerate((draws["mean"], draws["scale"].log())):
        exact = weights @ points[:, column]
        sd = (weights @ (points[:, column] - exact).square()).sqrt().item()
        assert draw.mean().item() == pytest.approx(exact.item(), abs=error * sd)
        assert draw.std().item() == pytest.approx(sd, rel=error)


class Clock(TimeLimit):
    """Has time for a number of questions."""

    def __init__(self, number):
        super().__init__(None)
        self.number = number

    def left(self, share=1.0):
        self.number -= 1
        return math.inf if self.number >= 0 else -1.0


@pytest.mark.parametrize(("doublings", "number"), [(0, 8), (2, 32), (9, 64)])
def test_weights_double_while_there_is_time(doublings, number):
    target = MarginalTarget(Groups(schools, (EFFECTS, ERRORS)), [(EFFECTS, ERRORS)])
    modes = Modes(torch.tensor([[5.0, 1.0]]), torch.eye(2).unsqueeze(0), torch.zeros(1))
    points, found = _log_weights(target, modes, 8, 64, Clock(doublings))
    assert len(points) == len(found) == number
    near = dist.MultivariateNormal(modes.loc, scale_tril=modes.scale_tril)
    expected = target.log_prob(points) - near.log_prob(points)
    torch.testing.assert_close(found.values, expected, atol=1e-4, rtol=0)


def test_weights_that_max_seconds_ends_are_named():
    target = MarginalTarget(Groups(schools, (EFFECTS, ERRORS)), [(EFFECTS, ERRORS)])
    modes = Modes(torch.tensor([[5.0, 1.0]]), 3 * torch.eye(2).unsqueeze(0), torch.zeros(1))
    stages = SimpleNamespace(limit=Clock(3), result=Fit())
    with pytest.warns(UserWarning, match="after 64 weights of 8192 .* as good as .* max_seconds"):
        draws, found = PassStages(stages, target, HierarchyPolicy(), "x").weigh(modes)
    assert len(draws) == HierarchyPolicy().num_samples and found is None
    assert target.num_evaluations == 8 * 9
    stages.limit = Clock(3)
    with pytest.warns(UserWarning, match="after 64 weights .* may be wrong. Cure: a larger max_s"):
        PassStages(stages, target, HierarchyPolicy(max_khat=-9.0), "x").weigh(modes)


@pytest.mark.parametrize(("questions", "number"), [(0, 0), (1, 32)])
def test_without_time_for_weights_the_draws_are_those_of_the_gaussian(questions, number):
    target = MarginalTarget(Groups(schools, (EFFECTS, ERRORS)), [(EFFECTS, ERRORS)])
    modes = Modes(torch.tensor([[5.0, 1.0]]), 3 * torch.eye(2).unsqueeze(0), torch.zeros(1))
    stages = SimpleNamespace(limit=Clock(questions), result=Fit())
    with pytest.warns(
        UserWarning, match="left no time for importance weights.* larger max_seconds"
    ):
        draws, found = PassStages(stages, target, HierarchyPolicy(), "x").weigh(modes)
    assert found is None and target.num_passes == (2 if number else 0)  # one passes to centre
    torch.testing.assert_close(draws.mean(0), modes.loc[0], atol=0.01, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.full((2,), 3.0), atol=0.01, rtol=0)
    (line,) = stages.result.stages
    assert line.outcome.endswith("no time left: the draws are those of the Gaussian")
    assert (f"{number} weights" in line.outcome) == (number > 0)


def test_the_number_of_weights_depends_on_nodes_and_groups():
    policy = HierarchyPolicy(most_evaluations=8 * 9 * 256.0)
    modes = Modes(torch.tensor([[5.0, 1.0]]), 3 * torch.eye(2).unsqueeze(0), torch.zeros(1))
    for num_nodes, number in ((9, 256), (18, 128)):
        rule = NormalRule(num_nodes)
        target = MarginalTarget(Groups(schools, (EFFECTS, ERRORS)), [(EFFECTS, ERRORS)], rule)
        stages = SimpleNamespace(limit=Clock(99), result=Fit())
        assert len(PassStages(stages, target, policy, "x").weigh(modes)[1]) == number


def test_a_model_of_groups_alone_is_refused():
    def model(y):
        with pyro.plate("groups", 8, subsample_size=len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"all latents \(z\) lie in plate 'groups'"):
        fit(model, batches=[(EFFECTS,)], amortize="conditional", seed=0, progress=False)


def test_inexact_integrals_are_named():
    y = torch.zeros(60)
    y[::3] = 5.0
    # Of so inexact a density the weights are uneven by chance; chains are of no interest here.
    coarse = {"num_nodes": (2, 3), "max_shift": 1e-3, "least_effective": 1.0, "max_khat": math.inf}
    coarse |= {"num_weighed": 32, "num_samples": 64, "max_passes": 3}
    policy = FitPolicy(hierarchy=replace(QUICK.hierarchy, **coarse))
    with pytest.warns(UserWarning, match="integrals over the latents of groups are inexact"):
        fit(
            lambda y: counts(y, 60), batches=[(y,)], amortize="conditional", seed=0, policy=policy,
            progress=False,
        )  # fmt: skip


def with_param(y):
    with pyro.plate("groups", 10, subsample_size=len(y)):
        z = pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)
    pyro.sample("x", dist.Normal(0.0, 1.0))


def test_refusals(tmp_path):
    y, options = torch.zeros(5), {"amortize": "conditional", "progress": False}
    with pytest.raises(ValueError, match=r"passes over minibatches.*batches=\[\(x,\)\]"):
        fit(counts, "auto", y, **options)
    with pytest.raises(ValueError, match="writes no checkpoints"):
        fit(counts, batches=[(y,)], checkpoint=tmp_path, **options)
    with pytest.raises(ValueError, match=r"does not train parameters of the model \(loc\)"):
        fit(with_param, batches=[(y,), (y,)], **options)
    missing = [(y,), (torch.full((5,), math.nan),)]
    with pytest.raises(ValueError, match="'y' of a minibatch is NaN"):
        fit(lambda y: with_param_free(y), batches=missing, **options)
    too_few = [(y,), (y[:2],)]
    with pytest.warns(UserWarning, match=r"have 7 groups, but plate 'groups' has 10.*Cure"):
        fit(with_param_free, batches=too_few, seed=0, **options)


def with_param_free(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", 10, subsample_size=len(y)):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def _work(rank, folder):
    torch.manual_seed(1 + rank)  # the first process decides, with the seed of the single one
    torch.save(fit_quickly(rank), folder / f"{rank}.pt")


@pytest.mark.skipif(not distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_have_the_result_of_one(quick_draws, tmp_path):
    in_two_processes(_work, tmp_path)
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, draws in quick_draws.items():
        assert torch.equal(both[0][name], both[1][name])
        sd = draws.std().item()
        # Other draws: four standard errors of two times 8,192, of which weights leave 70 %.
        assert both[0][name].mean().item() == pytest.approx(draws.mean().item(), abs=0.075 * sd)
        assert both[0][name].std().item() == pytest.approx(sd, rel=0.055)
