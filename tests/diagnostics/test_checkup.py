# SPDX-License-Identifier: Apache-2.0
"""The verdict, on guides whose errors are known."""

from __future__ import annotations

import dataclasses
import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
    AutoNormalMessenger,
)
from torch import nn
from torch.distributions import constraints

from pyro_implicit import LIVI_ELBO, MLP, AutoImplicit, AutoSemiImplicit
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics import Thresholds, VerdictPolicy, examination
from pyro_implicit.diagnostics.checks import DriftCheck, SteinCheck
from pyro_implicit.diagnostics.checkup import diagnose, plan_effort, seconds_of_weights
from pyro_implicit.diagnostics.moments import MomentErrors, Resolution
from pyro_implicit.diagnostics.verdict import SMALL_ENOUGH, Diagnosis
from pyro_implicit.fitting import Fit
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.infer.bound import EvidenceBound
from pyro_implicit.mcmc import Refined
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.refined import SitesOf
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.ops.score_estimators import SteinTest

pytestmark = pytest.mark.usefixtures("double")

CORRELATION = torch.tensor([[1.0, 0.99, 0.0], [0.99, 1.0, 0.0], [0.0, 0.0, 1.0]])


def gaussian():
    """Two correlated latents on scales of their own, and a positive one: log x is N(0, 1)."""
    scales = torch.tensor([0.01, 100.0])
    factor = scales.unsqueeze(-1) * torch.linalg.cholesky(CORRELATION[:2, :2].double())
    pyro.sample("w", dist.MultivariateNormal(torch.ones(2), scale_tril=factor))
    pyro.sample("x", dist.LogNormal(0.0, 1.0))


def exact_guide(width: float = 1.0, shift: float = 0.0):
    guide = AutoMultivariateNormal(gaussian)
    guide()
    sds = torch.tensor([0.01, 100.0, 1.0])
    guide.loc.data.copy_(torch.tensor([1.0, 1.0, 0.0]) + shift * sds)
    factor = sds.unsqueeze(-1) * torch.linalg.cholesky(CORRELATION.double())
    guide.scale = width * factor.diagonal()
    guide.scale_tril = factor / factor.diagonal().unsqueeze(-1)
    return guide


def test_the_posterior_is_trusted_and_the_guide_left_alone():
    guide = exact_guide()
    before = {name: p.clone() for name, p in guide.named_parameters()}
    found = diagnose(gaussian, guide, loss=Trace_ELBO(4))
    for name, p in guide.named_parameters():
        assert p.equal(before[name]) and p.grad is None
    assert found.verdict == "trust" and found.findings == () and found.cures == ()
    assert found.bound.value == pytest.approx(0.0, abs=1e-6)
    assert found.gap[0] == pytest.approx(0.0, abs=1e-6)
    assert found.importance.sd_ratios == (1.0, 1.0)
    assert found.latent_dim == 3


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    ("width", "verdicts"),
    [
        (0.9, {"check"}),  # test_a_policy_moves_the_limits has a width of 1.15
        (1.35, {"do not trust"}),  # test_report has one of 0.5
    ],
)
def test_wrong_widths(width, verdicts, seed):
    pyro.set_rng_seed(seed)
    found = diagnose(gaussian, exact_guide(width), modes=None)
    assert found.verdict in verdicts
    # The KL of each of three dimensions is known, and so is the bound.
    kl = 3 * (0.5 * (width**2 - 1) - math.log(width))
    assert found.bound.value == pytest.approx(-kl, abs=5 * found.bound.standard_error)


def test_report():
    found = diagnose(gaussian, exact_guide(0.5), loss=Trace_ELBO(4), modes=torch.zeros(1, 3))
    lines = str(found).splitlines()
    assert lines[0] == "Diagnosis of 2000 draws in 3 dimensions"
    names = [line[2:22].strip() for line in lines[1:]]
    names = [name for name in names if name != "would correct"]  # too uneven weights hide the line
    assert names[:3] == ["importance weights", "log evidence", "Stein's identities"]
    assert {"kernel Stein test", "short HMC", "objective", "modes"} <= set(names)
    (verdict,) = (line for line in lines if line.startswith("Verdict"))
    # Which finding comes first depends on the estimate of k-hat.
    assert verdict.startswith("Verdict: do not trust: ") and "too narrow somewhere" in str(found)
    (ratio,) = re.findall(r"  also: the sd of .* is (.*?) times .*Stein's identities", str(found))
    assert float(ratio) == pytest.approx(0.5, abs=0.03)
    assert lines[-1].startswith("  try: a more flexible guide") and lines[-1].endswith("NUTS")
    assert len(set(lines)) == len(lines)


def test_says_where():
    pyro.set_rng_seed(0)
    guide = exact_guide()
    guide.loc.data[2] -= 0.4
    found = diagnose(gaussian, guide, num_transitions=0, modes=None)
    assert found.verdict == "do not trust"
    assert "the mean of log `x` is 0.4" in str(found) and "sd too low" in str(found)
    assert "`w" not in str(found)
    guide = exact_guide()
    guide.scale = torch.tensor([1.0, 1.0, 0.67]) * guide.scale
    found = str(diagnose(gaussian, guide, num_transitions=0, modes=None))
    assert "the sd of log `x` is 0.6" in found and "times what it should be" in found


def test_few_weights_cannot_tell():
    """Of many latents that are all a little too wide, weights are few, and short HMC is skipped."""

    def wide():
        pyro.sample("x", dist.Normal(torch.zeros(60), 1.0).to_event(1))

    def guide():
        pyro.sample("x", dist.Normal(torch.zeros(60), 1.15).to_event(1))

    options = {"num_transitions": 0, "modes": None}
    found = diagnose(wide, guide, num_samples=1000, **options)
    assert found.bound.khat < 0.7 and found.efficiency < 0.2
    (reason,) = (f.reason for f in found.findings if f.reason.startswith("cannot tell"))
    assert "the weights are worth" in reason and "errors below" in reason
    # Whatever Stein's identities make of it: a guide that was trained by them fulfils them.
    silent = dataclasses.replace(found, stein=None, importance=MomentErrors(0.0, (1.0, 1.0)))
    assert not any("cannot tell" in f.reason for f in silent.findings)


def test_more_latents_than_draws():
    def wide():
        pyro.sample("x", dist.Normal(torch.zeros(600), 1.0).to_event(1))
        pyro.sample("tau", dist.LogNormal(0.0, 1.0))

    def guide():
        pyro.sample("x", dist.Normal(torch.zeros(600), 1.0).to_event(1))
        pyro.sample("tau", dist.LogNormal(0.5, 1.0))

    found = diagnose(wide, guide, num_samples=500, num_transitions=2)
    assert found.verdict == "do not trust" and found.latent_dim == 601
    assert "the mean of log `tau` is 0." in str(found) and "sd too high" in str(found)


def test_a_budget_spares_what_is_dear():
    def costly():
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        for _ in range(100):
            x = x + 0.0
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(0.0))

    guide = AutoNormal(costly)
    found = diagnose(costly, guide, num_samples=200, max_core_seconds=0.05)
    assert found.drift is None and found.coverage is None and found.num_samples == 200
    assert "0 transitions of HMC of 20" in str(found) and "no search for modes" in str(found)
    assert plan_effort(Target(costly), 200, 200, 20, True, 1000, 0.05).seconds < 0.05
    whole = diagnose(costly, guide, num_samples=200, num_transitions=2, modes=None)
    assert whole.spared == () and whole.drift is not None


def test_weights_beyond_the_budget_are_left_out():
    """Those of a semi-implicit guide take Gauss-Newton steps, which the budget counts."""

    def model():
        pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    guide = AutoSemiImplicit(model, frame=None)
    guide()
    options = {"num_samples": 100, "num_transitions": 0, "modes": None}
    found = diagnose(model, guide, max_core_seconds=0.1, **options)
    assert found.bound is None and found.spared == ("importance weights",)
    assert "would take" in found.no_density
    target = Target(model)
    weight = seconds_of_weights(Sampler(target, guide), 100)
    for max_core_seconds, is_less in [(0.1, True), (60.0, False)]:
        plan = plan_effort(target, 100, 100, 0, False, 500, max_core_seconds, weight=weight)
        assert (plan.seconds < 0.1) is is_less
    whole = diagnose(model, guide, **options)
    assert whole.bound is not None and whole.spared == ()


@pytest.mark.parametrize(
    ("khat", "efficiency", "verdict"),
    [
        (0.45, 0.5, "trust"),
        (0.6, 0.5, "check"),
        (0.8, 0.5, "do not trust"),
        (math.inf, 0.5, "do not trust"),
        (0.6, 0.95, "trust"),
        (0.8, 0.95, "trust"),
        (1.1, 0.95, "check"),
        (math.inf, 0.995, "trust"),
    ],
)
def test_limits_of_khat(khat, efficiency, verdict):
    bound = EvidenceBound(0.0, 0.0, khat, 1000 * efficiency)
    assert Diagnosis(1000, 2, bound).verdict == verdict


@pytest.mark.parametrize("judged", ["", "predictions"])
@pytest.mark.parametrize(("efficiency", "tells"), [(0.9, False), (0.95, True), (0.99, True)])
def test_even_weights_tell_whatever_a_test_resolves(efficiency, tells, judged):
    """No mean is off by more than the weights' coefficient of variation, in sds: here .23, .1."""
    bound = EvidenceBound(0.0, 0.0, 0.7, 1000 * efficiency)
    blind = MomentErrors(0.0, (1.0, 1.0), (), Resolution(0.05, 1.4))
    found = Diagnosis(1000, 2, bound, importance=blind, judged=judged)
    assert found.verdict == ("trust" if tells else "check")
    assert ("cannot tell" in str(found)) != tells


def test_a_check_without_power_does_not_contradict_trust():
    """Draws of settled chains need no check of power."""
    blind = DriftCheck(0.0, (1.0, 1.0), 0.9, (), Resolution(0.4, 1.4))
    found = Diagnosis(1000, 2, settled=True, drift=blind)
    assert found.verdict == "trust" and "cannot tell" not in str(found)
    assert "would not show, and other checks decide the verdict" in str(found)
    telling = dataclasses.replace(found, drift=blind._replace(resolution=Resolution(0.1, 1.1)))
    assert "would not show" in str(telling) and "other checks" not in str(telling)
    nothing = blind._replace(resolution=Resolution(31.0, math.inf))
    assert "errors below 31 sd in means or of any size in sds would not show" in str(
        dataclasses.replace(found, drift=nothing)
    )


def test_weights_by_which_draws_were_resampled_are_repeated():
    found = Diagnosis(1000, 2, settled=True, weighed="k-hat 0.37, effective sample size 96%")
    assert "the draws were resampled by them: k-hat 0.37, effective" in str(found)


def test_doubts_of_chains():
    """Those that had settled are trusted, if their trajectories did not fail."""

    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    store = DrawStore()
    for snapshot in torch.randn(5, 100, 1):
        store.append(snapshot)
    done = {"store": store, "constrain": SitesOf.of(Target(model)), "num_chains": 100}
    done |= {"kernel": "hmc", "frame": "full"}
    numbers = ("acceptance", "step_size", "trajectory_length", "seconds")
    counts = ("num_gradients", "warmup_gradients", "replaced", "stuck")
    done |= {"stopped": "converged", "failed": 0.001}
    refined = Refined(**done, **dict.fromkeys(numbers, 1.0), **dict.fromkeys(counts, 0))

    def found(**changes):
        result = Fit(refined=dataclasses.replace(refined, **changes), source=(model, (), {}))
        return result.diagnose(num_samples=500, num_transitions=0, modes=None)

    assert found().verdict == found(failed=0.03).verdict == "trust"
    for changes, words in (
        ({"failed": 0.06}, "6.0% of the chains' trajectories failed"),
        ({"stopped": "max_seconds"}, "stopped by max_seconds, before they settled"),
        ({"stopped": "interrupted"}, "interrupted, before they settled"),
        ({"stuck": 7}, "7 of 100 chains never moved"),
    ):
        doubted = found(**changes)
        assert doubted.verdict == "check" and "refine" in doubted.cures[0]
        assert [finding.reason for finding in doubted.findings] == [doubted.doubts[0]]
        assert words in str(doubted)
    for drift, verdict in (
        (Drift(0.09, 0.07, 1.19), "trust"),
        (Drift(0.11, 0.07, 1.1), "check"),
        (Drift(0.05, 0.09, 1.1), "check"),
        (Drift(0.05, 0.05, 1.21), "check"),
        (Drift(0.05, 0.05, 1.13, num_chains=64), "check"),  # 231 effective draws
        (Drift(0.05, 0.05, 1.05, num_chains=64), "trust"),
        (Drift(0.05, 0.05, 1.64), "check"),
        (Drift(0.05, 0.05, 1.66), "do not trust"),
        (Drift(math.nan, math.nan, math.nan), "do not trust"),
        (Drift(0.05, 0.05, 1.1, failed=0.255), "do not trust"),
    ):
        judged = found(stopped="max_gradients", drift=drift)
        assert judged.verdict == verdict
        assert (SMALL_ENOUGH in str(judged)) == (verdict == "trust")
        if verdict != "trust":
            assert str(drift) in judged.findings[0].reason and "refine_more" in judged.cures[0]
    steady = found(drift=Drift(0.05, 0.05, 1.66))
    assert steady.verdict == "trust" and SMALL_ENOUGH not in str(steady)


def test_given_draws_outside_of_a_support_are_refused():
    def model():
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        pyro.sample("size", dist.LogNormal(torch.zeros(2), share).to_event(1))

    share, size = torch.linspace(0.1, 0.9, 200), torch.rand(200, 2) + 0.1
    options = {"num_transitions": 0, "modes": None}
    right = diagnose(model, {"share": share.double(), "size": size}, **options)
    assert not right.broken

    def wide():
        pyro.sample("x", dist.Uniform(torch.tensor(-1e5).float(), torch.tensor(1e5).float()))

    assert not diagnose(wide, {"x": torch.linspace(-1.0, 1.0, 200).float()}, **options).broken
    for draws, name in (({"share": share + 0.15}, "share"), ({"size": size.log()}, "size")):
        with pytest.raises(ValueError, match=f"draws of '{name}' are outside .* Cure: constrained"):
            diagnose(model, {"share": share, "size": size} | draws, **options)
    lost = diagnose(model, {"share": share, "size": size * math.nan}, **options)
    assert lost.broken and "training" not in str(lost.cures) and "steps" not in str(lost.cures)


def test_symmetries_and_cures_are_named():
    drift = Drift(0.5, 0.5, 3.4)
    lost = Diagnosis(1000, 2, chains=drift)
    assert lost.verdict == "do not trust" and "refine_more" in lost.cures[0]
    wrong = SteinCheck(2.0, (1.0, 1.0), SteinTest(0.0, 0.0, 0.5))
    both = Diagnosis(1000, 2, chains=drift, stein=wrong)
    settled = Diagnosis(1000, 2, settled=True, chains=drift)
    assert settled.verdict == "trust" and "R-hat 3.400" in str(settled)
    assert len(both.cures) == 2 and str(both.cures).count("refine_more") == 1
    doubtful = Diagnosis(1000, 2, chains=Drift(0.2, 0.2, 1.3), doubts=("7 chains never moved",))
    assert len(doubtful.cures) == 2 and str(doubtful.cures).count("refine_more") == 1
    bound = EvidenceBound(0.0, 0.0, 0.6, 500.0)
    by_hand, automatic = (Diagnosis(1000, 2, bound, automatic=made) for made in (False, True))
    assert "learning rate" in by_hand.cures[0] and "learning rate" not in automatic.cures[0]


def test_dependent_draws_are_not_taken_for_independent_ones():
    """150 draws, each 40 times in a row, of a perfect guide: repeated noise is no error."""

    def model():
        pyro.sample("x", dist.Normal(torch.zeros(10), 1.0).to_event(1))

    pyro.set_rng_seed(0)
    draws = {"x": torch.randn(150, 10).repeat_interleave(40, 0)}
    options = {"num_transitions": 0, "modes": None, "progress": False}
    worth = StoredDraws(draws, settled=True, num_independent=150)
    found = diagnose(model, worth, **options)
    assert found.num_samples == 150 and found.verdict == "trust"
    head = "Diagnosis of 150 of 6000 stored draws in 10 dimensions, thinned because they depend"
    assert str(found).startswith(head)
    as_independent = diagnose(model, StoredDraws(draws, settled=True), **options)
    assert as_independent.verdict != "trust" and as_independent.num_stored == 0
    asked = diagnose(model, worth, num_samples=2000, **options)
    assert asked.num_samples == 2000 and asked.num_stored == 0


@pytest.mark.parametrize(
    ("mean_error", "sd_ratios", "p_value", "verdict"),
    [
        (0.05, (0.95, 1.05), 0.01, "trust"),
        (0.15, (1.0, 1.0), 0.01, "check"),
        (0.3, (1.0, 1.0), 0.01, "do not trust"),
        (0.0, (0.9, 1.0), 0.01, "check"),
        (0.0, (1.0, 1.1), 0.01, "check"),
        (0.0, (0.75, 1.0), 0.01, "do not trust"),
        (0.0, (1.0, 1.3), 0.01, "do not trust"),
        (0.0, (0.0, 1.0), 0.01, "do not trust"),
        (0.0, (1.0, math.inf), 0.01, "do not trust"),
        (math.nan, (1.0, 1.0), 0.01, "do not trust"),
        (0.0, (1.0, 1.0), 0.001, "check"),
    ],
)
def test_limits_of_moments(mean_error, sd_ratios, p_value, verdict):
    bound = EvidenceBound(0.0, 0.0, 0.3, 500.0)
    stein = SteinCheck(mean_error, sd_ratios, SteinTest(0.0, 0.0, p_value))
    assert Diagnosis(1000, 2, bound, stein=stein).verdict == verdict


@pytest.mark.parametrize("seed", [0])
def test_mean_field_on_correlation(seed):
    """The best mean-field guide: its standard deviations are those given all other latents."""
    pyro.set_rng_seed(seed)
    guide = AutoNormal(gaussian)
    guide()
    sds = torch.tensor([0.01, 100.0]) * (1 - 0.99**2) ** 0.5
    guide.locs.w.data.fill_(1.0)
    guide.scales.w = sds
    guide.locs.x.data.fill_(0.0)
    guide.scales.x = torch.tensor(1.0)
    found = diagnose(gaussian, guide)
    assert found.verdict == "do not trust"
    assert found.stein.sd_ratios == pytest.approx((0.1, 1.41), rel=0.2)


class Mixture(dist.MixtureSameFamily):
    support = constraints.real_vector


LOCS = torch.tensor([[-10.0, 0.0], [40.0, 3.0]])  # no mirror images


def two_modes():
    normal = dist.Normal(LOCS.double(), 1.0).to_event(1)
    pyro.sample("x", Mixture(dist.Categorical(torch.tensor([0.7, 0.3])), normal))


def test_a_lost_mode_is_found():
    def guide():
        pyro.sample("x", dist.Normal(LOCS[0].double(), 1.0).to_event(1))

    pyro.set_rng_seed(1)  # 0 is one of the 1 % that are found guilty by chance
    alone = diagnose(two_modes, guide, modes=None)
    assert alone.verdict == "trust"  # nothing else can see it
    assert alone.coverage is None and "not looked for" in str(alone)
    assert alone.importance.sd_ratios == (1.0, 1.0)  # weights that are all the same have no k-hat
    found = diagnose(two_modes, guide)
    assert found.verdict == "do not trust"
    assert found.coverage.uncovered.sum() == 1 and len(found.coverage.mass) == 2
    assert "1 of 2 without draws" in str(found)
    assert "no draws at a mode" in str(found) and "a mixture of guides" in found.cures[0]
    given = diagnose(two_modes, guide, modes=LOCS.double(), num_transitions=0).coverage
    assert given.uncovered.tolist() == [False, True]
    lost = given.mass[1].item()
    assert lost == pytest.approx(0.3, abs=0.01)
    assert lost == pytest.approx(found.coverage.mass[found.coverage.uncovered].item(), abs=1e-6)


def test_one_lost_mode_of_many():
    """A Gaussian around the others would hold most of its volume between them."""
    corners = torch.cartesian_prod(*[torch.tensor([-20.0, 0.0, 20.0])] * 2).double()

    def model():
        anywhere = dist.Normal(torch.zeros(2), 20.0).to_event(1).mask(False)
        x = pyro.sample("x", anywhere)
        normal = dist.Normal(corners, 1.0).to_event(1)
        pyro.sample("y", Mixture(dist.Categorical(torch.ones(9)), normal), obs=x)

    def guide(num_modes):
        normal = dist.Normal(corners[:num_modes], 1.0).to_event(1)
        pyro.sample("x", Mixture(dist.Categorical(torch.ones(num_modes)), normal))

    def verdict(num_modes):
        return diagnose(model, lambda: guide(num_modes))

    whole = verdict(9)
    # With about one seed in ten, the search misses one of the nine modes.
    assert whole.verdict == "trust" and len(whole.coverage.mass) >= 7
    assert not whole.coverage.uncovered.any()
    lost = verdict(8)
    assert lost.verdict == "do not trust" and lost.coverage.uncovered.sum() == 1
    share = 1 / len(lost.coverage.mass)
    assert lost.coverage.mass[lost.coverage.uncovered].item() == pytest.approx(share, abs=0.01)


def test_a_mode_out_of_the_priors_reach_is_lost():
    far = torch.tensor([0.0, 1e4])

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).mask(False))
        normal = dist.Normal(far.double(), 1.0)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), normal), obs=x)

    found = diagnose(model, lambda: pyro.sample("x", dist.Normal(0.0, 1.0)))
    assert found.verdict == "trust" and len(found.coverage.mass) == 1


def test_a_funnel_lacks_no_mode():
    """The search ends at a Gaussian that is no mode."""
    pyro.set_rng_seed(0)

    def funnel(loc=0.0, scale=3.0):
        v = pyro.sample("v", dist.Normal(loc, scale))
        with pyro.plate("coordinates", 9):
            pyro.sample("x", dist.Normal(0.0, torch.exp(v / 2)))

    found = diagnose(funnel, funnel)
    assert found.verdict == "trust" and not found.coverage.uncovered.any()
    # The draws there make the difference: a guide far up in the mouth has none.
    mouth = diagnose(funnel, lambda: funnel(9.0, 0.1), num_transitions=0)
    assert mouth.coverage.uncovered.all()


def test_the_search_leaves_the_random_stream_alone():
    found, states, options = [], [], {"num_samples": 200, "num_transitions": 2}
    for modes in (None, "search"):
        guide = exact_guide()
        pyro.set_rng_seed(0)
        found.append(diagnose(gaussian, guide, modes=modes, **options))
        states.append(torch.get_rng_state())
    without, searched = found
    assert searched.coverage is not None and states[0].equal(states[1])
    assert (without.bound, without.drift) == (searched.bound, searched.drift)
    again = diagnose(gaussian, exact_guide(), modes=None, **options)
    assert again.bound != searched.bound


def test_no_search():
    def wide():
        pyro.sample("x", dist.Normal(torch.zeros(101), 1.0).to_event(1))

    found = diagnose(wide, wide, num_samples=250)
    assert found.coverage is None and "not looked for" in str(found)

    def fragile():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1).mask(False))
        matrix = torch.eye(2) * (10 - w.square().sum())
        pyro.factor("a", torch.linalg.cholesky(matrix).sum() * 0.0 - 50 * w.square().sum())

    found = diagnose(
        fragile,
        lambda: pyro.sample("w", dist.Normal(torch.zeros(2), 0.1).to_event(1)),
        num_samples=200,
    )
    # It fails at most draws of its prior, and is searched from the others.
    assert not found.coverage.uncovered.any() and found.verdict == "trust"
    with pytest.raises(ValueError, match="modes must be .search., a tensor or None, but got 'all'"):
        diagnose(gaussian, exact_guide(), modes="all")


def test_wrong_weights_of_modes_are_seen_by_importance():
    def guide():
        normal = dist.Normal(LOCS.double(), 1.0).to_event(1)
        pyro.sample("x", Mixture(dist.Categorical(torch.tensor([0.3, 0.7])), normal))

    found = diagnose(two_modes, guide)
    assert found.verdict == "do not trust"
    assert found.stein.mean_error == 0 and found.importance.mean_error > 0.5


def regression_posterior():
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def semi_implicit(scale: float):
    guide = AutoSemiImplicit(regression_posterior, lambda size: nn.Identity(), 2, frame=None)
    guide()
    guide.loc.data.zero_()
    guide.scale = scale * torch.ones(2)
    return guide


def test_semi_implicit_guides():
    model = regression_posterior
    options = {"num_samples": 500, "chunk_size": 2500, "modes": None}
    good = diagnose(model, semi_implicit(1.0), loss=LIVI_ELBO(64), **options)
    assert good.verdict == "trust" and abs(good.gap[0]) < 0.2
    assert diagnose(model, semi_implicit(0.6), **options).verdict == "do not trust"


def test_a_fitted_semi_implicit_guide():
    guide = AutoSemiImplicit(regression_posterior, frame=None, init_scale=0.3)
    options = {"num_samples": 200, "num_transitions": 0, "chunk_size": 1000, "modes": None}
    before = diagnose(regression_posterior, guide, **options)
    assert before.verdict == "do not trust"
    steps = 300
    optimizer = pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.01 ** (1 / steps)})
    svi = SVI(regression_posterior, guide, optimizer, LIVI_ELBO(16, compile="trace"))
    for _ in range(steps):
        svi.step()
    found = diagnose(regression_posterior, guide, num_samples=500, chunk_size=2500)
    assert found.verdict == "trust" and found.bound.value == pytest.approx(0.0, abs=0.02)


def test_an_objective_that_overstates():
    class Optimist(Trace_ELBO):
        def loss(self, *args, **kwargs):
            return super().loss(*args, **kwargs) - 2.0

    def scaled():
        gaussian()
        pyro.factor("constant", torch.tensor(-5.0))

    found = diagnose(scaled, exact_guide(), loss=Optimist(4))
    assert found.bound.value == pytest.approx(-5.0, abs=1e-6)
    assert found.verdict == "check" and found.gap[0] == pytest.approx(2.0, abs=0.01)
    assert "2.0 nats above the certified bound" in str(found)


def test_a_long_reason_is_cut(monkeypatch):
    """Pyro's errors bring the shapes of all sites along."""

    def fail(*args, **options):
        raise ValueError("no density\nTrace Shapes:\n Param Sites:")

    monkeypatch.setattr(examination, "weighted_draws", fail)
    found = diagnose(gaussian, exact_guide(), num_samples=100, num_transitions=0, modes=None)
    assert found.no_density == "no density"


def test_without_a_density():
    """Never trusted, as the weights of modes would be unknown; but a bad one is found out."""
    guide = AutoImplicit(regression_posterior, MLP(2, 2), 2, frame=None)
    guide()
    found = diagnose(regression_posterior, guide)
    assert found.bound is None and "knows no density" in found.no_density
    assert found.verdict == "do not trust" and found.stein.sd_ratios[0] < 0.5
    guide = AutoImplicit(regression_posterior, lambda size: nn.Identity(), 2, frame=None)
    guide()
    guide.loc.data.zero_()
    guide.scale = torch.ones(2)
    found = diagnose(regression_posterior, guide)
    assert found.verdict == "check" and "no importance weights" in str(found)
    assert any("InjectiveELBO" in cure for cure in found.cures)


def test_degenerate_draws():
    found = diagnose(gaussian, AutoDelta(gaussian))
    assert found.verdict == "do not trust" and "lie on a hyperplane" in str(found)

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("edge", torch.where(x > 0, 0.0, -math.inf))

    def guide():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    found = diagnose(model, guide)
    assert found.verdict == "do not trust" and "finite" in found.broken


def test_models_that_vmap_cannot_run():
    def stubborn():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        assert w.sum().item() < math.inf

    def guide():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    with pytest.warns(UserWarning, match="one particle at a time"):
        found = diagnose(stubborn, guide, num_samples=200)
    assert found.drift is None and found.coverage is None and found.verdict == "trust"


@pytest.mark.parametrize("kind", ["list", "messenger", "flow"])
def test_other_guides(kind):
    """Composed ones, those that run the model themselves, and flows, of latents in a plate."""

    def model():
        with pyro.plate("rows", 3):
            x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        return x

    if kind == "list":
        guide = AutoGuideList(model)
        guide.append(AutoNormal(poutine.block(model, expose=["x"]), init_scale=1.0))
        guide.append(AutoMultivariateNormal(poutine.block(model, hide=["x"]), init_scale=1.0))
    elif kind == "messenger":
        guide = AutoNormalMessenger(model, init_scale=1.0)
    else:
        guide = AutoNormalizingFlow(model, lambda size: dist.transforms.affine_autoregressive(size))
    found = diagnose(model, guide, num_samples=200, modes=None)
    assert found.latent_dim == 5 and found.bound is not None and found.stein is not None
    if kind != "flow":  # these start at zero (or at a draw), with the right spread
        assert found.stein.sd_ratios == pytest.approx((1.0, 1.0), abs=0.1)


def test_float32_and_arguments():
    torch.set_default_dtype(torch.float)

    def model(y, scale=1.0):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, scale), obs=y)

    def guide(y, scale=1.0):
        pyro.sample("x", dist.Normal(y / (1 + scale**2), (1 / (1 + scale**-2)) ** 0.5))

    found = diagnose(model, guide, torch.tensor(1.0), scale=2.0)
    assert found.verdict == "trust"
    evidence = dist.Normal(0.0, 5.0**0.5).log_prob(torch.tensor(1.0)).item()
    assert found.bound.value == pytest.approx(evidence, abs=1e-4)


def test_a_policy_moves_the_limits():
    guide = exact_guide(width=1.15)
    options = {"num_transitions": 0, "modes": None}
    found = diagnose(gaussian, guide, **options)
    assert found.verdict == "check"
    lenient = VerdictPolicy(sd=Thresholds(2.0, 3.0), good_weights=0.0, khat=Thresholds(0.9, 1.0))
    assert dataclasses.replace(found, policy=lenient).verdict == "trust"
    strict = VerdictPolicy(sd=Thresholds(1.01, 1.02))
    assert diagnose(gaussian, guide, policy=strict, **options).verdict == "do not trust"


def test_one_target_for_each_call(monkeypatch):
    built, init = [], Target.__init__
    monkeypatch.setattr(Target, "__init__", lambda self, *a, **k: built.append(init(self, *a, **k)))
    guide = exact_guide(width=0.9)
    built.clear()
    pyro.set_rng_seed(1)
    options = {"num_samples": 200, "num_transitions": 2}
    of_model = diagnose(gaussian, guide, **options)
    assert len(built) == 1
    pyro.set_rng_seed(1)
    target = Target(gaussian)  # with the same random numbers
    assert str(diagnose(target, guide, **options)) == str(of_model)
    assert len(built) == 2
    with pytest.raises(TypeError, match=r"further arguments \[1, 'x'\]. Cure: diagnose\(target"):
        diagnose(target, guide, 1, x=2)


@pytest.mark.parametrize("options", [{"chunk_size": 0}, {"num_transitions": -1}])
def test_bad_counts(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        diagnose(lambda: None, {}, **options)


def test_too_few_draws():
    with pytest.raises(ValueError, match="max_core_seconds must be positive, but got 0"):
        diagnose(gaussian, exact_guide(), max_core_seconds=0)
    with pytest.raises(ValueError, match="must be at least 100, but got 50"):
        diagnose(gaussian, exact_guide(), num_samples=50)


def test_the_order_of_arguments():
    wanted = r"diagnose needs the model first, but got AutoNormal there and gaussian as the guide. "
    with pytest.raises(TypeError, match=wanted + r"Cure: diagnose\(model, guide, ...\)"):
        diagnose(AutoNormal(gaussian), gaussian)

    def model(y=0.0):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(y))

    def guide(y=0.0):
        pyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(TypeError, match="guide model observes site 'y'.*is .model, guide, .args"):
        diagnose(guide, model)
    with pytest.raises(ValueError, match="the guide has no site 'w', which the model samples"):
        diagnose(gaussian, guide)


def test_a_guide_of_other_data_is_named():
    def model(y):
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = AutoSemiImplicit(model)
    guide(torch.zeros(5))
    message = r"AutoSemiImplicit has draws of shape \('num_draws', 5\) at site 'z', but the model "
    with pytest.raises(ValueError, match=message + r"needs \('num_draws', 3\). Cure: a guide of"):
        diagnose(model, guide, torch.zeros(3))


def test_model_keywords_of_our_names():
    """Those of ours stay ours, and the model's reach it."""

    def model(num_samples, loss, init_loc_fn, chunk_size=1.0):
        assert init_loc_fn == "mine"
        x = pyro.sample("x", dist.Normal(0.0, loss).expand([num_samples]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), chunk_size), obs=torch.tensor(1.0))

    names = {"num_samples": 2, "loss": 3.0, "init_loc_fn": "mine"}
    for guide in (AutoNormal(model), AutoSemiImplicit(model, frame=None)):
        options = {"num_samples": 100, "num_transitions": 0, "modes": None, "loss": LIVI_ELBO(2)}
        found = diagnose(model, guide, model_kwargs=names, **options)
        assert found.latent_dim == 2 and found.num_samples == 100 and found.gap is not None


@pytest.mark.parametrize("modes", [torch.zeros(3), torch.zeros(2, 2), torch.full((1, 3), math.nan)])
def test_bad_modes(modes):
    with pytest.raises(
        ValueError, match=r"modes must be finite points .*\(num_modes, 3\), but got"
    ):
        diagnose(gaussian, exact_guide(), modes=modes)


def test_each_draw_is_scored_once():
    """Model runs: a few to set up, one for each weight and one for each score, all in parallel."""
    batches = []

    class Counting(dist.Normal):
        def log_prob(self, value):
            batches.append(value)
            return super().log_prob(value)

    def model():
        pyro.sample("x", Counting(torch.zeros(2), 1.0).to_event(1))

    guide = AutoNormal(model)
    guide()
    diagnose(model, guide, num_samples=500, num_transitions=0, modes=None)
    few = len(batches)
    batches.clear()
    diagnose(model, guide, num_samples=500, num_transitions=0, modes=None, chunk_size=2500)
    # Of chunks of 100 and 500, then of 500 and 2,500.
    assert few - len(batches) == 4 + 4


def test_a_semi_implicit_guide_is_not_advised_where_it_failed():
    def narrow(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)

    for guide in (AutoSemiImplicit(narrow, frame=None, init_scale=0.05), AutoNormal(narrow)):
        options = {"num_samples": 200, "num_transitions": 0, "chunk_size": 1000, "modes": None}
        found = diagnose(narrow, guide, torch.tensor(1.0), **options)
        advice = "AutoSemiImplicit with LIVI_ELBO" in str(found)
        assert found.verdict == "do not trust" and advice == isinstance(guide, AutoNormal)
        assert ("refine" in str(found)) != advice


@pytest.mark.parametrize(("num_groups", "is_improper"), [(1, True), (3, False)])
def test_endless_draws_of_a_flat_scale_are_improper(num_groups, is_improper):
    """The scale of one group has the density 1 / tau, up to the largest number."""
    y = torch.linspace(-1.0, 1.0, num_groups)

    def model():
        tau = pyro.sample("tau", dist.ImproperUniform(constraints.positive, (), ()))
        with pyro.plate("groups", num_groups):
            theta = pyro.sample("theta", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    log_tau = torch.rand(1000, 1) * (80.0 if is_improper else 3.0)
    noise = torch.randn(1000, num_groups) / (1 + (-2 * log_tau).exp()).sqrt()
    found = diagnose(
        model, {"tau": log_tau.exp().squeeze(-1), "theta": y + noise}, num_transitions=0
    )
    assert (found.improper != "") == is_improper
    if is_improper:
        assert found.verdict == "do not trust"
        assert "that of `tau` in 5" in str(found) and "a proper prior" in str(found)


@pytest.mark.parametrize("height", [4.0, 0.0])
def test_steins_identities_are_left_out_where_the_density_jumps(height):
    """Exact draws of a normal whose right half counts exp(height) times as much."""

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("jump", torch.where(x[0] > 0, height, 0.0))

    draws = torch.randn(4000, 2)
    is_right = torch.rand(4000) < torch.tensor(height).sigmoid()
    draws[:, 0] = torch.where(is_right, 1.0, -1.0) * draws[:, 0].abs()
    found = diagnose(model, {"x": draws}, modes=None)
    assert (found.stein is None) == (height > 0)
    message = "Stein's identities, because the log-density jumps in"
    assert found.skipped.startswith(message) == (height > 0)
    assert not any("Stein" in finding.reason for finding in found.findings)
