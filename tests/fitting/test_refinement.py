# SPDX-License-Identifier: Apache-2.0
"""``fit(refine=...)``: chains after the guide, where it wants them."""

from __future__ import annotations

import math
import re
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal, init_to_value

from pyro_implicit import fit
from pyro_implicit.compiled import RecordedFunction
from pyro_implicit.density import Target, cost
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import ROUNDING
from pyro_implicit.diagnostics.verdict import SMALL_ENOUGH
from pyro_implicit.fitting import BudgetPolicy, FitPolicy, auto, refinement, stages
from pyro_implicit.fitting.policy import TrainingPolicy
from pyro_implicit.guides import AutoImplicit
from pyro_implicit.infer.engine import recording
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.ops import LogWeights
from pyro_implicit.runtime.clock import TimeLimit

QUIET = {"seed": 0, "progress": False}
#: Chains of 400 gradients, whether or not they converge.
SHORT = BudgetPolicy(most_gradients=400, least_gradients=400, patience=1, patient_seconds=0.0)


def correlated(y):
    """Mean and difference of two latents with a posterior correlation of -.96."""
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(), 0.2), obs=y)


def test_a_rough_guide_ends_at_the_posterior():
    y = torch.tensor(1.5)
    result = fit(correlated, AutoNormal(correlated), y, refine=True, num_steps=50, **QUIET)
    assert [stage.name for stage in result.stages] == ["guide", "refine"]
    draws = result.sample(5000)["x"]
    precision = torch.eye(2) + torch.ones(2, 2) / 0.04
    covariance = precision.inverse()
    mean = covariance @ torch.full((2,), y.item() / 0.04)
    scale = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 0.1 * scale).all()
    torch.testing.assert_close(draws.mT.cov(), covariance, rtol=0.15, atol=0)
    # The mean-field guide alone has variances of the conditionals.
    assert result.guide.quantiles([0.16, 0.84])["x"].diff(dim=0).max() < 1.2 * scale.min()


def skewed():
    x = pyro.sample("x", dist.Normal(torch.zeros(12), 3.0).to_event(1))
    pyro.factor("skew", (x - x.exp()).sum())


def test_chains_that_cost_less_than_a_training():
    """The guide then has the moments of their draws."""
    result = fit(skewed, "auto", **QUIET)
    assert [stage.name for stage in result.stages] == [
        "search", "gaussian", "choose", "correct", "refine", "teach",
    ]  # fmt: skip
    assert result.stages[1].outcome.endswith("chains cost less than the training of a guide")
    assert result.refined.settled and result.refined.chains.space == "latent"
    grid = torch.linspace(-30, 10, 40_001, dtype=torch.float64)
    density = torch.exp(grid - grid.exp() - grid.square() / 18)
    mean = (grid * density).sum() / density.sum()
    sd = ((grid - mean).square() * density).sum().div(density.sum()).sqrt()
    for sample in (result.sample, result.guide.sample_posterior):
        x = sample(4000)["x"].double()
        torch.testing.assert_close(x.mean(0), mean.expand(12), rtol=0, atol=0.1)
        torch.testing.assert_close(x.std(0), sd.expand(12), rtol=0.08, atol=0)


@pytest.mark.parametrize("batches", [False, True])
def test_many_latent_variables_next_to_discrete_ones(batches):
    """The flags are summed out, and each x has a posterior of two normals."""

    def model(y):
        with pyro.plate("rows", 101):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            flag = pyro.sample("flag", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(x + 1.5 * flag, 0.7), obs=y)

    y = torch.linspace(-1, 3, 101)
    if batches:
        result = fit(model, "auto", batches=[(y,)], epochs=400, **QUIET)
    else:
        result = fit(model, "auto", y, **QUIET)
    # Given the flag, x is normal with variance .49 / 1.49.
    shift = torch.tensor([0.0, 1.5])
    means = (y.unsqueeze(-1) - shift) / 1.49
    log_share = torch.tensor([0.7, 0.3]).log()
    marginal = dist.Normal(shift, math.sqrt(1.49)).log_prob(y.unsqueeze(-1))
    share = (log_share + marginal).softmax(-1)
    mean = (share * means).sum(-1)
    draws = result.sample(2000)
    assert draws.keys() == {"x"}
    torch.testing.assert_close(draws["x"].mean(0), mean, rtol=0, atol=0.2 if batches else 0.12)
    if not batches:  # a mean field is too narrow where both flags are likely
        second = (share * (means.square() + 0.49 / 1.49)).sum(-1)
        sd = (second - mean.square()).sqrt()
        torch.testing.assert_close(draws["x"].std(0), sd, rtol=0.15, atol=0)


def test_a_gaussian_that_is_near_is_trained():
    policy = replace(FitPolicy(), training=TrainingPolicy(near_efficiency=0.0))
    result = fit(skewed, "auto", **QUIET, policy=policy)
    assert "injective" in [stage.name for stage in result.stages]


@pytest.mark.filterwarnings("ignore:fit's chains stopped at")
def test_compile_reaches_trainings_and_chains(monkeypatch):
    def run(compile):
        recorded.clear()
        pyro.clear_param_store()
        guide, y = AutoNormal(correlated), torch.tensor(1.5)
        budget = replace(SHORT, most_gradients=50, least_gradients=50)
        options = {"policy": FitPolicy(budget=budget), "num_steps": 30, "refine": True, **QUIET}
        return fit(correlated, guide, y, compile=compile, **options)

    recorded = []
    for module in (recording, cost):
        monkeypatch.setattr(module, "RecordedFunction", counting(module, recorded))
    traced = run("trace")
    assert set(recorded) == {recording, cost}
    plain = run(False)
    assert not recorded
    assert traced.losses == plain.losses
    assert traced.refined.samples["x"].equal(plain.refined.samples["x"])


def counting(module, recorded):
    def make(*args):
        recorded.append(module)
        return RecordedFunction(*args)

    return make


def test_auto_leaves_a_guide_that_is_trusted():
    result = fit(correlated, "auto", torch.tensor(1.5), refine="auto", **QUIET)
    assert result.refined is None and result.correction > 0.99
    assert result.stages[-1].name == "correct"
    assert result.sample(7)["x"].shape == (7, 2)


@pytest.mark.parametrize(("efficiency", "moves"), [(0.5, True), (0.95, False)])
def test_uneven_new_weights_overrule_a_bound_that_is_near(efficiency, moves, monkeypatch):
    class Found(LogWeights):
        khat, efficiency = 2.0, property(lambda self: efficiency)

    def found(guide, target, policy, wide):
        return Found(torch.zeros(1))

    monkeypatch.setattr("pyro_implicit.fitting.stages.reliability", found)
    result = fit(correlated, "auto", torch.tensor(1.5), max_seconds=20.0, **QUIET)
    assert result.correction is None and (result.refined is not None) is moves


EIGHT = torch.zeros(8), torch.full((8,), 10.0)


def test_without_time_for_chains_the_guide_is_the_result():
    with pytest.warns(UserWarning, match="max_seconds passed before chains could start"):
        result = fit(schools, "auto", *EIGHT, max_seconds=1e-6, **QUIET)
    assert result.refined is None and result.chosen == "gaussian"
    assert result.sample(5)["effect"].shape == (5, 8)


def test_a_slow_model_is_fitted_in_time(monkeypatch):
    """Stages that do not fit into the time that is left are skipped, and the result says so."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def model(y):
        clock[0] += 0.005
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if x.item() > -9:  # cannot be vectorised: one run for each draw
            x = x**3
        pyro.sample("y", dist.Normal(x, 0.3), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(model, "auto", torch.tensor(0.5), max_seconds=4.0, **QUIET)
    assert clock[0] <= 4.4, (clock, result.stages)
    said = {stage.name: stage.outcome for stage in result.stages}
    assert "skipped: max_seconds" in said["correct"] and result.correction is None
    assert result.refined is None and "skipped: max_seconds" in said["refine"]


@pytest.mark.parametrize("optional", ["auto", True])
def test_chains_that_hardly_moved_are_dropped(optional, monkeypatch):
    def stopped(*args, **options):
        return replace(refine_target(*args, **options), stopped="max_seconds")

    monkeypatch.setattr(refinement, "refine_target", stopped)
    stopping = replace(refinement.CHAINS.stopping, unmoved_r_hat=0.5)
    monkeypatch.setattr(refinement, "CHAINS", replace(refinement.CHAINS, stopping=stopping))
    monkeypatch.setattr(auto, "find_normal_marginal", lambda *args: None)
    policy = FitPolicy(budget=BudgetPolicy(least_gradients=30, chain_seconds=0.1))
    options = {**QUIET, "policy": policy, "max_seconds": 60.0, "refine": optional}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(schools, "auto", *EIGHT, **options)
    told = " ".join(str(warning.message) for warning in caught)
    assert (result.refined is None) == ("had hardly moved (" in told) == (optional == "auto")


def test_many_latents_start_from_a_mean_field_guide():
    def model(y):
        with pyro.plate("many", 101):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = torch.linspace(-3.0, 3.0, 101)
    result = fit(model, "auto", y, refine="auto", num_steps=20, **QUIET)
    assert [stage.name for stage in result.stages] == ["mean-field", "refine", "teach"]
    draws = result.refined.get_samples()["x"]
    assert ((draws.mean(0) - y / 2).abs() < 0.15).all()
    assert ((draws.std(0) / 0.5**0.5 - 1).abs() < 0.15).all()


def several_shapes(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("columns", 2):
        x = pyro.sample("x", dist.Normal(torch.zeros(3), scale).to_event(1))
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    pyro.sample("y", dist.Normal((x * share).sum(), scale), obs=y)


def test_the_loss_of_the_rough_guide_is_that_of_pyros_elbo():
    """In value and gradient, for the same noise; draws without density do not count."""
    y = torch.tensor(1.5)
    target, guide = Target(several_shapes, y), AutoNormal(several_shapes, init_scale=0.3)
    guide(y)
    loss = refinement._MeanFieldELBO(target, 5, 100, "auto")
    parameters = [*guide.locs.parameters(), *guide.scales.parameters()]

    def gradients(value):
        return [value, *torch.autograd.grad(value, parameters)]

    for step in range(3):  # plain, recorded, and from the recording
        torch.manual_seed(step)
        found = gradients(loss.differentiable_loss(None, guide, y))
        torch.manual_seed(step)
        noise = torch.randn(5, target.latent_dim)
        total = 0.0
        for row in noise:
            parts, log_q = {}, 0.0
            for name, eps in target.split(row).items():
                loc, scale = guide._get_loc_and_scale(name)
                parts[name] = target.transforms[name](loc + scale * eps)
                jacobian = target.transforms[name].log_abs_det_jacobian(
                    loc + scale * eps, parts[name]
                )
                log_q = (
                    log_q
                    - scale.log().sum()
                    - jacobian.sum()
                    - 0.5 * math.log(2 * math.pi * math.e) * eps.numel()
                )
            trace = poutine.trace(poutine.condition(several_shapes, parts)).get_trace(y)
            total = total + log_q - trace.log_prob_sum()
        torch.testing.assert_close(found, gradients(total / 5), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        guide.scales.scale_unconstrained.fill_(1e6)  # its exponential overflows
    assert loss.differentiable_loss(None, guide, y).isnan()


def test_parameters_of_a_model_train_with_the_rough_guide():
    def learnt(y):
        centre = pyro.param("centre", torch.tensor(0.0))
        fixed = sum(pyro.param(f"net$$$p{i}", torch.tensor(0.0)) for i in range(5))
        with pyro.plate("rows", 101):
            x = pyro.sample("x", dist.StudentT(5.0, centre + 0.0 * fixed, 1.0))
            pyro.sample("y", dist.StudentT(5.0, x, 1.0), obs=y)

    y = 3.0 + torch.randn(101)
    policy = FitPolicy(budget=replace(SHORT, most_gradients=50, least_gradients=50))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(learnt, "auto", y, num_steps=300, policy=policy, **QUIET)
    assert (
        "ImplicitELBO; its ELBO, not the evidence, determines `centre`, `p0`, `p1`, `p2` and 2 more"
        in str(result)
    )
    assert abs(result.parameters["centre"].value - y.median()) < 0.7


def test_subsampled_data_are_refused():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), subsample_size=2) as rows:
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[rows])

    with pytest.raises(ValueError, match="subsamples them. Cure: refine=False"):
        fit(model, "auto", torch.zeros(10), refine=True, **QUIET)


def test_failure_is_said_and_the_guide_kept(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("no start")

    monkeypatch.setattr("pyro_implicit.fitting.refinement.refine_target", fails)
    guide = AutoNormal(correlated)
    with pytest.warns(UserWarning, match="did not refine its draws: ValueError: no start"):
        result = fit(correlated, guide, torch.tensor(1.0), refine=True, num_steps=2, **QUIET)
    assert result.guide is guide and result.refined is None
    assert result.sample(3)["x"].shape == (3, 2)  # the guide's own, one of Pyro's


def test_a_guide_that_is_not_injective_is_refined_on_the_latents():
    y = torch.tensor(1.5)
    guide = AutoImplicit(correlated)
    result = fit(correlated, guide, y, refine=True, num_steps=2, max_seconds=20.0, **QUIET)
    assert result.guide is guide and result.refined is not None


def test_what_fails_before_the_chains_start_leaves_the_guide_too(monkeypatch):
    def fails(*args):
        raise NotImplementedError("no cost")

    monkeypatch.setattr("pyro_implicit.fitting.refinement._score_of_chains", fails)
    guide = AutoNormal(correlated)
    with pytest.warns(UserWarning, match="not refine its draws: NotImplementedError: no cost"):
        result = fit(correlated, guide, torch.tensor(1.0), refine=True, num_steps=2, **QUIET)
    assert result.guide is guide and result.stages[-1].outcome.startswith("failed")


def test_a_hierarchy_next_to_discrete_latents_is_refined_in_its_noise():
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]) / 10

    def model():
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.plate("groups", 8):
            x = pyro.sample("x", dist.Normal(mean, scale))
            wide = pyro.sample("wide", dist.Bernoulli(0.2))
            pyro.sample("y", dist.Normal(x, 0.5 + wide), obs=y)

    budget = BudgetPolicy(
        most_chains=32, most_gradients=200, least_gradients=200, patient_seconds=0.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few gradients
        result = fit(model, refine=True, policy=FitPolicy(budget=budget), **QUIET)
    assert set(result.refined.reparams) == {"x"}
    assert not any("failed" in stage.outcome for stage in result.stages)
    assert set(result.guide()) >= {"mean", "scale", "x"}


def summed(y, sd):
    x = pyro.sample("x", dist.Normal(torch.zeros(100), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(x.sum(), sd), obs=y)


def random_walk(y):
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    start = pyro.sample("start", dist.Normal(-1.0, 2.0))
    steps = pyro.sample("steps", dist.Normal(0.0, sigma).expand([len(y)]).to_event(1))
    with pyro.plate("days", len(y)):
        pyro.sample("y", dist.Normal(0.0, ((start + steps.cumsum(-1)) / 2).exp()), obs=y)


def train_roughly(model, *args, num_steps):
    run = stages.Stages(model, args, {}, num_steps, lr=0.01, num_particles=8, limit=TimeLimit(None))
    with run.kept_apart():
        return refinement.train_mean_field(run, Target(model, *args))


def test_the_rough_guide_starts_at_such_a_scale():
    result = train_roughly(summed, torch.tensor(0.01), 0.01, num_steps=1)
    assert (result.guide.scales.x < 0.04).all()  # of at most .1


def test_the_rough_guide_of_a_long_walk_trains():
    """With a scale of .1 and a first step of .05, losses are infinite or not numbers."""
    pyro.set_rng_seed(3)
    y = 0.5 * torch.randn(2500)
    result = train_roughly(random_walk, y, num_steps=300)
    losses = torch.tensor(result.losses)
    assert losses.isfinite().all()
    assert losses[-50:].median() < 0.9 * losses[0]


def test_the_rough_guide_trains_in_haste(monkeypatch):
    rates = []

    def train(*args, schedule, **options):
        rates.append(schedule.lr)
        raise KeyboardInterrupt

    monkeypatch.setattr("pyro_implicit.fitting.refinement.MAX_DENSE_DIM", 1)
    monkeypatch.setattr("pyro_implicit.fitting.stages.train", train)
    fit(correlated, "auto", torch.tensor(1.5), lr=0.02, **QUIET)
    assert rates == [pytest.approx(0.1)]


def overdispersed(groups, y):
    level = pyro.sample("level", dist.Normal(8.0, 4.0))
    spread = pyro.sample("spread", dist.HalfCauchy(1.0))
    shape = pyro.sample("shape", dist.Gamma(2.0, 0.1))
    with pyro.plate("groups", 12):
        effect = pyro.sample("effect", dist.Normal(0.0, spread))
    logits = level + effect[groups] - shape.log()
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.NegativeBinomial(shape, logits=logits), obs=y)


def test_fit_evaluates_large_counts_in_double_precision():
    """Log-densities of counts of 2e4 have rounding errors of a nat, at which chains stand still."""
    torch.manual_seed(0)
    groups = torch.arange(12).repeat_interleave(8)
    rate = (10.0 + 0.5 * torch.randn(12)).exp()[groups]
    y = dist.GammaPoisson(20.0, 20.0 / rate).sample()
    result = fit(overdispersed, "auto", groups, y, **QUIET)
    assert "from here in float64, because of rounding errors of" in result.stages[0].outcome
    assert result.refined.settled and not result.refined.modes_weighed


def counts_by_product():
    """A matrix product keeps the model in single precision."""
    log_rate = pyro.sample("log_rate", dist.Normal(0.0, 10.0).expand([1]).to_event(1))
    with pyro.plate("counts", 3):
        pyro.sample("y", dist.Poisson((torch.ones(3, 1) @ log_rate).exp()), obs=COUNTS)


def counts_by_rate():
    rate = pyro.sample("rate", dist.LogNormal(0.0, 5.0))
    with pyro.plate("counts", 3):
        pyro.sample("y", dist.Poisson(rate), obs=COUNTS)


COUNTS = torch.tensor([1e6, 1.001e6, 9.99e5])


def fit_near_counts(model, name, value):
    guide = AutoNormal(model, init_loc_fn=init_to_value(values={name: value}))
    budget = BudgetPolicy(most_gradients=800, patience=1, patient_seconds=0.0)
    policy = FitPolicy(budget=budget)
    return fit(model, guide, num_steps=200, lr=1e-4, refine=True, policy=policy, **QUIET)


def test_chains_that_rounding_keeps_from_settling_have_float64_as_cure():
    with pytest.warns(
        UserWarning, match="In float32 the log-density .*rounding error.*Cure: .*float64"
    ):
        fit_near_counts(counts_by_product, "log_rate", torch.tensor([1e6]).log())


def test_chains_that_rounding_keeps_apart_start_again_in_double_precision():
    result = fit_near_counts(counts_by_rate, "rate", torch.tensor(1e6))
    rate = result.sample(4000)["rate"]
    assert result.refined.settled and not result.refined.modes_weighed
    assert rate.dtype == torch.float32
    assert rate.mean().item() == pytest.approx(1e6, abs=60.0)  # an sd is 577
    assert rate.std().item() == pytest.approx(1e3 / 3**0.5, rel=0.05)


def schools(y, scales):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, scales), obs=y)


def test_a_search_that_ends_in_a_spike(monkeypatch):
    """Its Gaussian has no bound: chains start from a mean field, and the mode is dropped."""
    weigh = stages.weigh

    def useless(*args, **kwargs):
        found, none = weigh(*args, **kwargs), LogWeights(torch.full((9,), -torch.inf))
        return replace(found, log_weights=none, draws=torch.nan * found.draws)

    monkeypatch.setattr(stages, "weigh", useless)
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    scales = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    budget, training = BudgetPolicy(search_seconds=0.3), TrainingPolicy(mean_field_steps=300)
    policy = FitPolicy(budget=budget, training=training)
    result = fit(schools, "auto", y, scales, policy=policy, **QUIET)
    names = [stage.name for stage in result.stages]
    assert names[-3:] == ["mean-field", "refine", "teach"]
    assert result.modes is None and result.num_modes is None
    assert result.refined.settled
    assert result.stages[-1].outcome == "a conditional guide with the moments of the draws"
    draws = result.sample(4000)
    # posteriordb's reference: 4.4 +- 3.3.
    assert draws["mean"].mean().item() == pytest.approx(4.4, abs=0.3)


def test_a_spike_that_double_precision_removes(monkeypatch):
    """If rounding errors make the spike, the search begins again in double precision."""
    weigh = stages.weigh

    def useless_in_float32(name, target, guide, *args, **kwargs):
        found = weigh(name, target, guide, *args, **kwargs)
        spike = LogWeights(torch.full((9,), -torch.inf))
        return found if target.is_wide else replace(found, log_weights=spike)

    monkeypatch.setattr(stages, "weigh", useless_in_float32)
    result = fit(correlated, "auto", torch.tensor(1.5), **QUIET)
    names = [stage.name for stage in result.stages]
    assert names.count("search") == 2 and "mean-field" not in names
    assert result.num_modes == 1 and math.isfinite(max(result.bounds.values()))


def test_double_precision_after_the_mean_field(monkeypatch):
    monkeypatch.setattr(refinement, "MAX_DENSE_DIM", 0)
    policy = FitPolicy(budget=BudgetPolicy(patient_seconds=0.0))
    result = fit(counts_by_rate, "auto", policy=policy, **QUIET)
    line = result.stages[0]
    assert line.name == "mean-field"
    assert "from here in float64, because of rounding errors of" in line.outcome
    assert result.target.is_wide and result.refined.settled


def test_one_target_of_the_model_from_search_to_chains(monkeypatch):
    """Chains, their plan and the taught guide add targets of reparameterised models only."""
    built = []
    init = Target.__init__

    def counting(self, model, *args, **kwargs):
        built.append(model)
        init(self, model, *args, **kwargs)

    monkeypatch.setattr(Target, "__init__", counting)
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    scales = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    result = fit(schools, "auto", y, scales, **QUIET)
    assert result.refined is not None and result.chosen == "conditional"
    number = len(built)
    assert built.count(schools) == 1 and number <= 6
    assert result.target.model is schools
    result.sample(3, y, scales)
    assert len(built) == number


@pytest.mark.parametrize(("number", "is_named"), [(1, False), (4, True)])
def test_rounding_errors_at_some_draws_are_the_cause_of_a_failure(number, is_named):
    """Such as a state-space model near an observation noise of 0; the others are exact."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("steep", -1e8 * (x - 5.0).clamp(min=0.0))

    draws = {"x": torch.where(torch.arange(ROUNDING.num_draws) < number, 6.0, 0.0)}
    refined = SimpleNamespace(get_samples=lambda: draws, weights=None, stopped="max_gradients")
    cure = refinement._cure(Target(model), refined)
    message = r"In float32 the log-density has a rounding error of .* nats or more at 5% of .*"
    message += r"Cure: torch.set_default_dtype\(torch.float64\)"
    assert (re.match(message, cure) is not None) == is_named
    assert ("refine_more" in cure) != is_named
    if not is_named:  # annealed draws cannot continue, and no max_seconds was given
        refined.weights = LogWeights(torch.zeros(9))
        assert "fit(..., max_seconds=...)" in refinement._cure(Target(model), refined)
        refined.stopped = "max_seconds"
        assert refinement._cure(Target(model), refined) == "Cure: a larger max_seconds"


def test_chains_that_a_budget_ended_say_why_they_are_trusted(monkeypatch):
    chains = SimpleNamespace(
        stopped="max_gradients", num_gradients=9, modes_weighed=False, weights=None, settled=False
    )
    chains.unresolved = chains.images = ""
    monkeypatch.setattr(refinement, "refine_target", lambda *args, **kwargs: chains)
    for drift, is_small in ((Drift(0.05, 0.05, 1.02), True), (Drift(0.3, 0.3, 1.4), False)):
        chains.drift, chains.get_samples = drift, lambda: {"x": torch.zeros(20, 2)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guide = AutoNormal(correlated)
            result = fit(correlated, guide, torch.tensor(1.5), refine=True, num_steps=2, **QUIET)
        assert result.stages[-1].outcome.startswith("max_gradients after 9 gradients; means may")
        assert result.stages[-1].outcome.endswith(SMALL_ENOUGH) == is_small
        assert any("chains stopped at" in str(one.message) for one in caught) != is_small


def test_too_many_modes_are_not_weighed():
    """Four pairs of modes are 16, and five up to the order of the pairs."""

    def model():
        with pyro.plate("pairs", 4):
            z = pyro.sample("z", dist.Normal(0.2, 1.0))
            pyro.sample("y", dist.Normal(z.square(), 0.1), obs=torch.ones(4))

    budget = BudgetPolicy(
        most_modes=3, least_gradients=100, most_gradients=100, patience=1, patient_seconds=0.0
    )
    policy = FitPolicy(budget=budget, training=TrainingPolicy(mean_field_steps=200))
    with pytest.warns(
        UserWarning, match="the search found 5 separate modes.*Cure: a model without"
    ):
        result = fit(model, "auto", policy=policy, **QUIET)
    assert [stage.name for stage in result.stages][:3] == ["search", "mean-field", "refine"]
    assert result.diagnose().verdict == "do not trust"


def test_data_that_bound_a_latent_variable():
    """The Gaussian reaches beyond the bound: chains start at its draws that have a density."""

    def largest(y):
        top = pyro.sample("top", dist.LogNormal(1.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Uniform(0.0, top), obs=y)

    y = torch.tensor([1.0, 2.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chains against a wall converge slowly
        result = fit(largest, "auto", y, policy=FitPolicy(budget=SHORT), **QUIET)
    assert result.chosen == "gaussian" and "mean-field" not in str(result)
    top = result.sample(4000)["top"]
    grid = torch.linspace(3.0, 60.0, 20_000)
    weights = (dist.LogNormal(1.0, 1.0).log_prob(grid) - 3 * grid.log()).softmax(0)
    assert top.min() >= 3
    assert top.median() == pytest.approx(grid[(weights.cumsum(0) < 0.5).sum()].item(), abs=0.3)


def rising_to_one(shape):
    """The posterior is Beta(1, shape), and the prior has draws everywhere."""
    p = pyro.sample("p", dist.Uniform(0.0, 1.0))
    pyro.factor("rise", (shape - 1) * (-p).log1p())


def test_chains_at_the_last_number_below_a_bound_run_again_in_float64():
    """9 % lies beyond the last number below 1 in float32, and 0.5 % in float64."""
    without_search = FitPolicy(budget=BudgetPolicy(search_seconds=0.0))
    result = fit(rising_to_one, "auto", 0.15, policy=without_search, **QUIET)
    outcome = next(line.outcome for line in result.stages if line.name == "refine")
    assert outcome.startswith("again in float64, as draws of 'p' lie nearer to a bound than float")
    assert result.refined.unresolved == ""


def test_draws_that_no_dtype_resolves_are_doubted():
    policy = FitPolicy(budget=replace(SHORT, search_seconds=0.0))
    with pytest.warns(UserWarning, match="draws of 'p' lie nearer .*float64.*Cure: integrate"):
        result = fit(rising_to_one, "auto", 0.05, refine=True, policy=policy, **QUIET)
    found = result.diagnose(num_transitions=0, modes=None)
    assert found.verdict != "trust" and "mass beyond is lost" in str(found)


def two_modes_of_a_hierarchy(y):
    """A latent with modes near 2.5 and -1.5, and groups whose scale makes a funnel."""
    z = pyro.sample("z", dist.Normal(0.3, 1.0))
    pyro.sample("known", dist.Normal(z**2 - z, 0.5), obs=torch.tensor(4.0))
    vague_groups(y, pyro.sample("scale", dist.HalfNormal(2.0)))


def vague_groups(y, scale):
    with pyro.plate("groups", len(y)):
        x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


GROUPS = torch.tensor([-2.0, -1.0, 0.0, 1.0, 1.5, 3.0])


def test_both_modes_in_a_model_with_a_funnel():
    z = torch.linspace(-5, 5, 10_001).double()
    weights = (-0.5 * (z - 0.3) ** 2 - 0.5 * ((z**2 - z - 4) / 0.5) ** 2).softmax(0)
    few = FitPolicy(budget=BudgetPolicy(most_gradients=2000))
    result = fit(two_modes_of_a_hierarchy, "auto", GROUPS, policy=few, **QUIET)
    share = (result.sample(4000)["z"] > 0).double().mean()
    assert abs(share - weights[z > 0].sum()) < 0.04  # .31; 0 without the second mode
    assert result.refined.weights is not None


def test_neck_and_mouth_of_a_funnel_are_one_mode(monkeypatch):
    def model(y):
        tau = pyro.sample("tau", dist.Gamma(0.01, 0.01))
        vague_groups(y, tau**-0.5)

    search = stages.Stages.search

    def with_neck(self, target, *args):
        mouth = search(self, target, *args)
        scales = torch.tensor([1.0] + [0.14] * 6)  # of x given tau = exp(4)
        neck = torch.tensor([[4.0] + [0.0] * 6]), scales.diag().unsqueeze(0), mouth.elbo - 1
        both = Modes(*map(torch.cat, zip(mouth, neck, strict=True)))
        self.result.modes, self.result.num_modes = both.loc, 2
        return both

    monkeypatch.setattr(stages.Stages, "search", with_neck)
    u = torch.linspace(-12, 12, 10_001).double()
    variance = (1 + (-u).exp()).unsqueeze(-1)
    log_prob = dist.Normal(0.0, variance.sqrt()).log_prob(GROUPS.double()).sum(-1)
    weights = (log_prob + 0.01 * (u - u.exp())).softmax(0)
    mean = weights @ u
    result = fit(model, "auto", GROUPS, **QUIET)
    drawn = result.sample(8000)["tau"].log()
    scale = (weights @ (u - mean) ** 2).sqrt()
    assert abs(drawn.mean() - mean) < 0.1 * scale
    assert abs(drawn.std() / scale - 1) < 0.1
    assert "chains mix between the 2 modes" in str(result)
    assert result.num_modes == len(result.modes) == 1 and result.refined.weights is None


@pytest.mark.parametrize(("start", "number"), [(-4.0, 1), (4.0, 1), (math.nan, 2)])
def test_modes_of_a_funnel_are_joined_and_others_are_not(start, number):
    """Neck and mouth are one, whatever the order; without a density, nothing is known."""

    def model(y):
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        vague_groups(y, (v / 2).exp())

    ends = torch.tensor([[0.0] + [0.5] * 6, [start] + [0.0] * 6])
    modes = Modes(ends, 0.1 * torch.eye(7).expand(2, 7, 7), torch.tensor([-1.0, -2.0]))
    assert len(stages.joined_in_noise(Target(model, GROUPS), modes).loc) == number
    target = Target(two_modes_of_a_hierarchy, GROUPS)
    ends = torch.tensor([[-1.5] + [0.0] * 7, [2.5] + [0.0] * 7])
    two = modes._replace(loc=ends)
    assert torch.equal(stages.joined_in_noise(target, two).loc, ends)
